"""What a node must know by itself to name its files again on a server that has lost everything
(`kvfs.meta.refill`): the whole way from the root to each file whose bytes it has.

A transaction leaves in the mirror what it read and wrote. Of a file that came from another node, of
one that another node moved, and of directories that others made, that is not all: the rest is
learned here, a moment later and in small steps. What the server does not have is not forgotten by
this, since it may be the server that has lost it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from kvfs.config import WAYS_STEP, WAYS_WAITING_MAX
from kvfs.meta import records
from kvfs.meta.cluster import ClusterView
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.mirror import Mirror, inode_record
from kvfs.meta.records import pack_native, pack_ordered
from kvfs.meta.shared import Record, SharedTable
from kvfs.meta.view import View
from kvfs.names import CHUNK_SUFFIX

_DEPTH_MAX = 2048  # directories above a name


class Ways:
    """Inodes to which the way may not be known. The oldest are given up where there are too many:
    the next start of the node finds them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()

    def note(self, inos: Iterable[int]) -> None:
        """Something of these files came, or changed."""
        for ino in inos:
            self._waiting[ino] = None
        while len(self._waiting) > WAYS_WAITING_MAX:
            self._waiting.popitem(last=False)

    def take(self, local: View, mirror: Mirror) -> list[int]:
        """Some of which the way must be learned; none once all is known."""
        taken: list[int] = []
        while self._waiting and len(taken) < WAYS_STEP:
            ino, _ = self._waiting.popitem(last=False)
            if not _is_known(local, mirror, ino):
                taken.append(ino)
        return taken


def _is_known(local: View, mirror: Mirror, ino: int) -> bool:
    """Whether there is nothing to learn; so it is of a file whose bytes are not here."""
    inode = mirror.inode(ino)
    if inode is None:
        return False
    if not inode.is_directory and local.blob(inode.digest) is None:
        return True
    names = mirror.names_of(ino)
    return bool(names) and all(
        mirror.value(_dirent(parent, name)) is not None and _leads_up(mirror, parent)
        for parent, name in names
    )


def _leads_up(mirror: Mirror, directory: int) -> bool:
    """Whether all is known from a directory to the root."""
    for _ in range(_DEPTH_MAX):
        if directory == ROOT_INO:
            return True
        names = mirror.names_of(directory)
        if not names or mirror.value(inode_record(directory)) is None:
            return False
        parent, name = names[0]
        if mirror.value(_dirent(parent, name)) is None:
            return False
        directory = parent
    return False


def find_ways(view: ClusterView, inos: Sequence[int]) -> list[Record]:
    """Read all that leads to these files, which the view's transaction then has seen; and the
    names that do. Raises `Unavailable`."""
    names: list[Record] = []
    todo, seen = deque(inos), {ROOT_INO}
    view.read_inodes_ahead(inos)
    while todo:
        ino = todo.popleft()
        if ino in seen:
            continue
        seen.add(ino)
        view.txn.get(pack_native(ino), db=view.tables.inode)
        for parent, name in view.names(ino):
            view.txn.get(pack_ordered(parent) + name, db=view.tables.dirent)
            if name.endswith(CHUNK_SUFFIX):
                view.txn.get(pack_native(ino), db=view.tables.chunk)
            names.append(Record(SharedTable.NAME, records.name_key(ino, parent, name)))
            todo.append(parent)
    return names


def _dirent(parent: int, name: bytes) -> Record:
    return Record(SharedTable.DIRENT, pack_ordered(parent) + name)
