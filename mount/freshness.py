"""Tell the kernel what changed behind its back: what clients publish, and what eviction takes.

The kernel blocks such a notice until requests for the same directory are answered, so none is sent
from a request or from the mount's own thread: changes wait in a bounded set, in which repetitions
fall together, and a worker thread sends them. When the set is full the oldest change is dropped:
its name may then be shown for `KERNEL_CACHE_S`, but opening it looks again.
"""

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable

import pyfuse3
import trio

from kvfs.config import ON_THE_WAY_S, STALE_NAMES_MAX
from kvfs.errors import NamespaceError, Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.node import Change, Node

log = logging.getLogger(__name__)

_BATCH = 1024
_DEPTH_MAX = 2048  # directories above a name

# Most names and inodes are not in the kernel's cache; at the end no kernel is there.
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EBADF, errno.ENOTCONN)

Name = tuple[int, bytes]


class Freshness:
    """What the kernel must still be told. `number_of` gives the number that shows an inode."""

    def __init__(self, node: Node, number_of: Callable[[int], int]) -> None:
        self._node = node
        self._number_of = number_of
        self._names: OrderedDict[Name, None] = OrderedDict()
        self._inodes: OrderedDict[int, bool] = OrderedDict()  # whose attributes, or also pages
        # Inodes that changed elsewhere, and until when an open may still be on its way to them.
        self._changed: OrderedDict[int, float] = OrderedDict()
        self._moved_until_s = 0.0
        self._wake = trio.Event()
        self.dropped = 0
        node.watch(self.note)

    def note(self, change: Change) -> None:
        """A change that did not come through the mount."""
        if change.name is None:
            self._note_changed(change)
        if change.ino:
            self.expire_attributes(self._number_of(change.ino))
        if change.name is None:
            return
        self.expire_name(change.parent, change.name)
        directory = change.parent
        try:
            for _ in range(_DEPTH_MAX):  # parents may be new, so theirs have changed as well
                if directory in self._inodes:
                    break  # and so do those above it
                self.expire_attributes(directory)
                if directory == ROOT_INO:
                    break
                directory = self._node.meta.parent_of(directory)
        except (NamespaceError, Unavailable):
            pass  # the directory has gone, and with it what is above

    def expire_name(self, parent: int, name: bytes) -> None:
        """The kernel must look a name up again."""
        self._names[(parent, name)] = None
        self._names.move_to_end((parent, name))
        if len(self._names) > STALE_NAMES_MAX:
            self._names.popitem(last=False)
            self.dropped += 1
            if self.dropped == 1:
                log.warning("more changes than can be told to the kernel; stat may lag behind")
        self._wake.set()

    def expire_attributes(self, number: int) -> None:
        """The kernel must ask for an inode's attributes again."""
        self._expire(number, pages=False)

    def expire_pages(self, number: int) -> None:
        """The kernel must ask for an inode's attributes and bytes again."""
        self._expire(number, pages=True)

    def _expire(self, number: int, *, pages: bool) -> None:
        self._inodes[number] = pages or self._inodes.get(number, False)
        if len(self._inodes) > STALE_NAMES_MAX:
            self._inodes.popitem(last=False)
        self._wake.set()

    def is_untold(self, number: int) -> bool:
        """Whether the kernel may still find an inode by a name that it has lost."""
        now_s = trio.current_time()
        return (
            now_s < self._moved_until_s
            or number in self._inodes
            or now_s < self._changed.get(number, 0.0)
        )

    def _note_changed(self, change: Change) -> None:
        """A request may have been on its way since before the kernel was told."""
        until_s = trio.current_time() + ON_THE_WAY_S
        if change.moves_directories:
            self._moved_until_s = until_s
        self._changed.pop(self._number_of(change.ino), None)
        self._changed[self._number_of(change.ino)] = until_s
        if len(self._changed) > STALE_NAMES_MAX:
            self._changed.popitem(last=False)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to tell that nobody has begun to tell."""
        return bool(self._names or self._inodes)

    async def run(self) -> None:
        """Send what waits, for ever. Cancel it before requests are no longer answered, since a
        notice may wait for one."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self.is_waiting:
                names = [self._names.popitem(last=False)[0] for _ in range(_take(self._names))]
                inodes = [self._inodes.popitem(last=False) for _ in range(_take(self._inodes))]
                await trio.to_thread.run_sync(_send, names, inodes)


def _take(waiting: OrderedDict[Name, None] | OrderedDict[int, bool]) -> int:
    return min(_BATCH, len(waiting))


def _send(names: list[Name], inodes: list[tuple[int, bool]]) -> None:
    for parent, name in names:
        _notify(pyfuse3.invalidate_entry, parent, name)
    for number, pages in inodes:
        _notify(pyfuse3.invalidate_inode, number, not pages)


def _notify(notice: Callable[..., None], *arguments: object) -> None:
    try:
        notice(*arguments)
    except OSError as error:
        if error.errno not in _EXPECTED:
            log.warning("the kernel took no notice of a change: %s", error)
