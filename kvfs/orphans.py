"""Files that nobody can reach any more, on their way out of the metadata.

Who lets a file's last name or handle go often has nobody to tell when the metadata cannot be
written (a FORGET of the kernel, a timer, the end of a mount), and has done what it was asked for in
any case. So what fails is noted and tried again in the background. The list is bounded, and lost
when the process ends: what is left the next start drops (`MetaEngine.recover`).
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice

from kvfs.config import EVICTION_BATCH, ORPHANS_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import MetaEngine

log = logging.getLogger(__name__)


class Orphans:
    """See the module's docstring. `reap` removes the files of doomed blobs; `is_held` has the
    inodes that somebody has open; `unlink` takes all names of files away."""

    def __init__(
        self,
        engine: MetaEngine,
        reap: Callable[[], None],
        is_held: Container[int],
        unlink: Callable[[Sequence[int]], object],
    ) -> None:
        self._meta = engine
        self._reap = reap
        self._is_held = is_held
        self._unlink = unlink
        self._left: dict[int, None] = {}
        self._is_failing = False

    def release(self, ino: int) -> None:
        """An inode is held no more: it goes if it has no name. Never raises."""
        try:
            inode = self._meta.inode(ino)
            if inode is not None and inode.nlink == 0:
                self.drop([ino])
        except KvfsError as error:  # not even readable
            self._put_off([ino], error)

    def drop(self, inos: Sequence[int]) -> None:
        """Let go of those that have no name and that nobody holds; never raises."""
        if self._is_failing:  # the background task will see when it works again
            self._note(inos)
            return
        try:
            self.drop_now(inos)
        except (KvfsError, OSError) as error:
            self._put_off([], error)

    def drop_now(self, inos: Sequence[int]) -> None:
        """As `drop`, but tell when it failed, for who needs the room at once."""
        self._note(inos)
        going = [ino for ino in inos if ino not in self._is_held]
        if going:
            self._meta.forget(going)
        for ino in inos:
            self._left.pop(ino, None)  # whoever holds it will let it go once more
        self._reap()

    def abandon(self, ino: int) -> None:
        """Take the names of a file away that was never published; never raises."""
        try:
            self._unlink([ino])
        except (KvfsError, OSError) as error:
            self._put_off([ino], error)

    def reap(self) -> None:
        """Remove the files of doomed blobs; never raises."""
        self.drop([])

    def retry(self) -> bool:
        """Do some of what failed; whether there is more that could be done now. Never raises."""
        if not self._is_failing:
            return False
        batch = list(islice(self._left, EVICTION_BATCH))
        try:
            abandoned = [ino for ino in batch if self._is_abandoned(ino)]
            if abandoned:
                self._unlink(abandoned)
            self.drop_now(batch)
        except (KvfsError, OSError) as error:
            log.debug("not yet: %s", error)
            return False
        self._is_failing = bool(self._left)
        return self._is_failing

    def _is_abandoned(self, ino: int) -> bool:
        inode = self._meta.inode(ino)
        return (
            inode is not None
            and inode.is_regular
            and not inode.is_published
            and inode.nlink > 0
            and ino not in self._is_held
        )

    def _put_off(self, inos: Iterable[int], error: Exception) -> None:
        self._note(inos)
        if not self._is_failing:
            log.warning("files that were removed keep their room for now: %s", error)
        self._is_failing = True

    def _note(self, inos: Iterable[int]) -> None:
        self._left.update(dict.fromkeys(inos))
        while len(self._left) > ORPHANS_MAX:
            del self._left[next(iter(self._left))]
