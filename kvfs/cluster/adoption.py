"""Names of a store that was alone, brought into the cluster that it joined.

The old database only lends its names: each is published anew, under a number of the cluster. A
name that the cluster has stays as it is there. Every step can be done twice, so that a walk that
was cut short begins again; what it has done already costs a look-up.
"""

import errno
import logging
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import trio

from kvfs.config import ADOPTION_STEP
from kvfs.errors import Corrupt, InvalidInput, NamespaceError
from kvfs.meta.contract import AWAY, ROOT_INO, Changes, Entry, Inode, Publication
from kvfs.meta.lmdb import LmdbEngine, find_damage
from kvfs.meta.tier_contract import HoldingChange
from kvfs.names import escape
from kvfs.node import Node

log = logging.getLogger(__name__)
_LEFT_SHOWN = 8  # names that are told one by one


@dataclass(slots=True)
class Adopted:
    """What became of the names of one database."""

    named: int = 0
    kept: int = 0  # the cluster had something under that name
    absent: int = 0  # files in directories of the store that are missing now
    left: int = 0  # that cannot have that name there


@dataclass(frozen=True, slots=True)
class _Directory:
    old_ino: int
    ino: int  # in the cluster
    path: bytes


async def adopt(
    node: Node, aside: Path, read_ahead: Callable[[Iterable[bytes]], None] = lambda digests: None
) -> bool:
    """Bring in the names of the database that was set aside there, for who holds
    `Node.upkeep_lock`. True when all are in the cluster, so that it may go; False when some of them
    must wait for a directory that is missing, or when it cannot be read: then what is left of it
    was put aside for a person to look at. `read_ahead` is told which digests will be asked for.
    Raises `KvfsError`, of the node's own metadata, and `OSError`."""
    damage = await trio.to_thread.run_sync(find_damage, aside)
    try:
        if damage is not None:
            raise Corrupt(str(aside), damage)
        with closing(LmdbEngine.open(aside)) as old:
            log.info("bringing %d names of before into the cluster", old.usage().inodes)
            adoption = Adoption(node, old, read_ahead)
            await adoption.run()
    except (Corrupt, InvalidInput) as error:
        if error.subject != str(aside):  # the node's own
            raise
        node.notices.append(f"names of before are lost, but for those of chunk files: {error}")
        log.error("%s", node.notices[-1])
        _leave(aside)
        return False
    log.info("brought in: %s", adoption.done)
    return not adoption.done.absent


def remove_aside(aside: Path) -> None:
    """Its names are all in the cluster."""
    shutil.rmtree(aside)


def _leave(aside: Path) -> None:
    (aside / "data.mdb").replace(aside.parent / "data.mdb.distrusted")
    shutil.rmtree(aside)


class Adoption:
    """One walk over the names of `old`, directories before what they hold."""

    def __init__(
        self, node: Node, old: LmdbEngine, read_ahead: Callable[[Iterable[bytes]], None]
    ) -> None:
        self._node = node
        self._old = old
        self._read_ahead = read_ahead
        self._holdings = _Holdings(node, old)
        self.done = Adopted()

    async def run(self) -> None:
        """Bring in all names, in small steps."""
        waiting = [_Directory(ROOT_INO, ROOT_INO, b"")]
        while waiting:
            directory = waiting.pop()
            after = b""
            while entries := self._old.entries(directory.old_ino, after, ADOPTION_STEP):
                after = entries[-1].name
                waiting += await self._adopt_entries(directory, entries)

    async def _adopt_entries(self, directory: _Directory, entries: list[Entry]) -> list[_Directory]:
        """Bring in some names of a directory; the directories among them."""
        below: list[_Directory] = []
        used: list[tuple[int, int]] = []
        paths = [directory.path + entry.name for entry in entries]
        self._read_ahead({entry.inode.digest for entry in entries} - {b""})
        for entry, path, there in zip(entries, paths, self._node.meta.resolve(paths), strict=True):
            try:
                if entry.inode.is_directory:
                    made = self._adopt_other(directory, entry, there)
                    if made.is_directory:
                        below.append(_Directory(entry.inode.ino, made.ino, path + b"/"))
                    else:
                        raise NamespaceError(errno.ENOTDIR, path)
                elif not entry.inode.is_regular:
                    self._adopt_other(directory, entry, there)
                elif entry.inode.is_published:
                    used += self._adopt_file(directory, entry, path, there)
            except NamespaceError as error:
                self.done.left += 1
                if self.done.left <= _LEFT_SHOWN:
                    log.warning("%s cannot be brought in: %s", escape(path), error)
            await trio.lowlevel.checkpoint()
        self._node.meta.restamp(used)
        return below

    def _adopt_other(self, directory: _Directory, entry: Entry, there: Inode | None) -> Inode:
        """A directory, a link or a special file."""
        if there is not None:
            self.done.kept += not entry.inode.is_directory
            return there
        old, meta, now_ns = entry.inode, self._node.meta, self._node.now_ns()
        made = meta.make(
            directory.ino, entry.name, old.mode, old.uid, old.gid, now_ns,
            rdev=old.rdev, target=old.target,
        )  # fmt: skip
        if not old.is_directory:  # whose times change with each name that it gets
            meta.set_attributes(made.ino, Changes(mtime_ns=old.mtime_ns), now_ns)
        self._node.notify(directory.ino, entry.name, made.ino)
        self.done.named += 1
        return made

    def _adopt_file(
        self, directory: _Directory, entry: Entry, path: bytes, there: Inode | None
    ) -> list[tuple[int, int]]:
        """A file whose bytes are here or in tiers; its number and when it was used last."""
        old, meta = entry.inode, self._node.meta
        blob = self._old.blobs([old.digest])[0]
        if not self._holdings.carry(old.digest, old.size_bytes) and blob is None:
            return []  # of another cluster, whose bytes are elsewhere
        if blob is not None and self._node.directories[blob.directory] is None:
            self.done.absent += 1
            return []
        if there is None and not self._link(directory, entry, path):
            publication = Publication(
                digest=old.digest,
                size_bytes=old.size_bytes,
                allocated_bytes=0 if blob is None else blob.allocated_bytes,
                directory=AWAY if blob is None else blob.directory,
                mtime_ns=old.mtime_ns,
                path=path,
                mode=old.mode,
                uid=old.uid,
                gid=old.gid,
                chunk=self._old.chunk(old.ino),
            )
            if blob is None:
                self._name_away(publication)
            elif not self._node.publisher.publish_found(publication):
                log.info("%s has lost its bytes, or has got others", escape(path))
        found = meta.resolve([path])[0]
        if found is None:
            return []
        if found.digest != old.digest:
            self.done.kept += 1
            return []
        self.done.named += there is None
        if old.pinned and not found.pinned:
            meta.set_pinned(found.ino, True)
        return [(found.ino, old.used_ns)]

    def _name_away(self, publication: Publication) -> None:
        (named,) = self._node.meta.publish([publication], self._node.now_ns())
        self._node.notify(named.parent, named.name, named.inode.ino)

    def _link(self, directory: _Directory, entry: Entry, path: bytes) -> bool:
        """Give a file that is there already, under another of its names, this one as well."""
        if entry.inode.nlink == 1:
            return False
        others = [other for other in self._old.paths_of(entry.inode.ino) if other != path]
        for found in self._node.meta.resolve(others):
            if found is not None and found.digest == entry.inode.digest:
                self._node.meta.link(found.ino, directory.ino, entry.name, self._node.now_ns())
                self._node.notify(directory.ino, entry.name, found.ino)
                return True
        return False


class _Holdings:
    """What the old database knows of the node's tiers, which may have other numbers there."""

    def __init__(self, node: Node, old: LmdbEngine) -> None:
        self._node = node
        self._old = old
        tiers = () if node.tiering is None else node.tiering.tiers
        numbers = old.tier_numbers([one.place for one in tiers])
        self._numbers = [(before, one.number) for before, one in zip(numbers, tiers, strict=True)]

    def carry(self, digest: bytes, size_bytes: int) -> bool:
        """Have the new database know which tiers have a blob; whether any has."""
        (before,) = self._old.tier_masks([digest])
        mask = sum(1 << now for number, now in self._numbers if before >> number & 1)
        if mask:
            self._node.meta.note_holdings([HoldingChange(digest, size_bytes, gained=mask)])
        return bool(mask)
