"""Giving room back: files of doomed blobs are taken away at once and unlinked at leisure.

Unlinking a large file takes milliseconds, so it is done in a worker thread; the rename that takes
it out of the way is not noticeable. Until it is unlinked its bytes count as trash. Closing the last
descriptor of a file that was unlinked takes as long, and is done there as well.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from kvfs.blobs import BlobDirectory
from kvfs.config import EVICTION_BATCH, MIB, SETTLE_ROOM_S
from kvfs.errors import OutOfSpace
from kvfs.meta.contract import Blob, MetaEngine
from kvfs.open_blobs import OpenBlobs
from kvfs.space import Space
from kvfs.stored import allocated_bytes

log = logging.getLogger(__name__)

_SLACK_BYTES_MAX = 64 * MIB  # evicted beyond the need, so that not every writer has to wait
_UNLINK_DEADLINE_S = 60.0
_FANOUT_SHARE = 16  # of what is used: with less, directories are kept, and need not be made again
_INLINE_BYTES_MAX = 4 * MIB  # what is gone in less time than a hop to a thread is worth


@dataclass(frozen=True, slots=True)
class _Refuse:
    """A file to unlink, or a descriptor to close."""

    directory: int
    path: str
    size_bytes: int
    fd: int = -1


@dataclass(frozen=True, slots=True)
class Evicted:
    """What one step of eviction did."""

    files: int
    is_round_over: bool  # there is nothing to take among what was used until then


class Reclaim:
    """Room by eviction, for one node. `release_spare()` lets go of what was removed and is kept for
    a moment only; it is asked first. `settle()` publishes what was closed, so that it may go as
    well. `evict(directory, bytes, until_ns)` takes names away, of those last used until then, in
    one short step; `demote`, with the same words, comes before it and may take its time to put last
    copies elsewhere."""

    def __init__(
        self,
        directories: Sequence[BlobDirectory | None],
        engine: MetaEngine,
        space: Space,
        release_spare: Callable[[], None],
        settle: Callable[[], Awaitable[None]],
        evict: Callable[[int, int, int], Evicted],
        demote: Callable[[int, int, int], Awaitable[None]],
        open_blobs: OpenBlobs,
    ) -> None:
        self._directories = directories
        self._meta = engine
        self._space = space
        self._release_spare = release_spare
        self._settle = settle
        self._evict = evict
        self._demote = demote
        self._open_blobs = open_blobs
        self._lock = trio.Lock()
        self._refused_bytes = [0] * len(directories)
        self._queue: list[_Refuse] = []
        self._is_removing = False
        self._wake = trio.Event()
        self._removed = trio.Event()

    def refused_bytes(self, index: int) -> int:
        """What a directory had last to refuse since nothing in it may go; 0 once there was room."""
        return self._refused_bytes[index]

    async def make_room(self, index: int, extra_bytes: int) -> None:
        """Return when a directory has room for so many bytes more. Raises `OutOfSpace`."""
        if not self._lock.locked() and self._space.short_bytes(index, extra_bytes) <= 0:
            return  # at once: a lock that is taken costs a turn of the scheduler
        await self._remove_empty_leaves(index)
        if not self._space.fits_ever(index, extra_bytes):
            raise OutOfSpace(
                f"{extra_bytes} bytes exceed what the directory may hold: raise max_bytes"
            )
        if not self._may_have(index, extra_bytes):
            with trio.move_on_after(SETTLE_ROOM_S):  # who asks may be what it waits for
                await self._settle()
        async with self._lock:
            if self._space.short_bytes(index, extra_bytes) > 0:
                self._release_spare()
            if not self._may_have(index, extra_bytes):
                raise OutOfSpace(
                    "not even an empty cache has so much room: raise max_bytes or lower min_free"
                )
            await self._evict_for(index, extra_bytes)

    def _may_have(self, index: int, extra_bytes: int) -> bool:
        space = self._space
        return space.short_bytes(index, extra_bytes) <= space.evictable_bytes(index)

    async def _evict_for(self, index: int, extra_bytes: int) -> None:
        """Evict until there is room. Rounds over all files in short steps: one in which nothing
        went is the last."""
        until_ns, has_evicted = self._meta.newest_used_ns(), False
        while (short_bytes := self._space.short_bytes(index, extra_bytes)) > 0:
            if self._space.trash_bytes(index):
                await self._wait_removed()
                await self._remove_empty_leaves(index)
                continue
            wanted_bytes = short_bytes + self._slack_bytes(index)
            await self._demote(index, wanted_bytes, until_ns)
            evicted = self._evict(index, wanted_bytes, until_ns)
            has_evicted |= evicted.files > 0
            if not evicted.is_round_over:
                await trio.lowlevel.checkpoint()
            elif has_evicted:
                until_ns, has_evicted = self._meta.newest_used_ns(), False
            else:
                self._refused_bytes[index] = extra_bytes
                raise OutOfSpace("nothing is left to evict: unpin files or raise max_bytes")
        self._refused_bytes[index] = 0

    async def _remove_empty_leaves(self, index: int) -> None:
        """Where that is much of what is short, give back what directories take whose blobs have all
        gone. In this thread, where no blob comes to lie in one meanwhile."""
        directory = self._directories[index]
        if directory is None:
            return
        takes_much = directory.fanout_bytes() > self._space.used_bytes(index) // _FANOUT_SHARE
        if not (takes_much or directory.missing_inodes()):
            return
        while not directory.remove_empty_leaves(EVICTION_BATCH):
            await trio.lowlevel.checkpoint()
        directory.note_freed()

    def _slack_bytes(self, index: int) -> int:
        return min(_SLACK_BYTES_MAX, self._space.used_bytes(index) // 64)

    def reap(self) -> None:
        """Take the files of doomed blobs out of the way, and their weight out of the metadata.
        Never fails for a file that stays: what doomed it has happened. One that somebody can still
        write to stays until its end: the rename would wait for a write, and that perhaps for us."""
        while doomed := self._doomed():
            for blob in doomed:
                directory = self._directories[blob.directory]
                try:
                    path = directory.trash(blob.digest) if directory is not None else None
                except OSError as error:
                    log.warning("blob %s cannot be removed, gc may: %s", blob.digest.hex(), error)
                    self._space.begin_trash(blob.directory, blob.allocated_bytes)
                    self._space.end_trash(blob.directory, blob.allocated_bytes, is_removed=False)
                    continue
                if path is not None:
                    self._put(_Refuse(blob.directory, path, blob.allocated_bytes))
            self._meta.bury([blob.digest for blob in doomed])

    def _doomed(self) -> list[Blob]:
        """Some of those that can go."""
        doomed = self._meta.doomed(EVICTION_BATCH + len(self._open_blobs))
        return [blob for blob in doomed if blob.digest not in self._open_blobs][:EVICTION_BATCH]

    def remove(self, index: int, path: str, size_bytes: int) -> None:
        """Unlink a file of a directory that nothing names any more, a large one at leisure."""
        if size_bytes > _INLINE_BYTES_MAX:
            self._put(_Refuse(index, path, size_bytes))
        elif _discard([_Refuse(index, path, size_bytes)]):
            self._space.begin_trash(index, size_bytes)
            self._space.end_trash(index, size_bytes, is_removed=False)

    def close(self, fd: int) -> None:
        """Close a descriptor; at leisure when that is, or may just now become, the end of a large
        file."""
        status = os.fstat(fd)
        may_be_last = status.st_nlink == 0 or self._queue or self._is_removing
        if may_be_last and allocated_bytes(status) > _INLINE_BYTES_MAX:
            self._put(_Refuse(0, "", 0, fd))
        else:
            os.close(fd)

    def _put(self, refuse: _Refuse) -> None:
        self._space.begin_trash(refuse.directory, refuse.size_bytes)
        self._queue.append(refuse)
        self._wake.set()

    async def remove_always(self) -> None:
        """Background task: unlink what was taken away."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self.remove_queued()
            self._removed.set()
            self._removed = trio.Event()

    async def remove_queued(self) -> None:
        """Unlink what was taken away so far."""
        batch, self._queue = self._queue, []
        self._is_removing = True
        try:
            left = await trio.to_thread.run_sync(_discard, batch)
        finally:
            self._is_removing = False
        for refuse in batch:
            self._space.end_trash(
                refuse.directory, refuse.size_bytes, is_removed=refuse.path not in left
            )

    async def _wait_removed(self) -> None:
        removed = self._removed
        self._wake.set()
        with trio.move_on_after(_UNLINK_DEADLINE_S) as scope:
            await removed.wait()
        if scope.cancelled_caught:
            raise OutOfSpace("the disk does not come to removing what was evicted")


def _discard(batch: Sequence[_Refuse]) -> set[str]:
    """Unlink and close; the files that could not be unlinked."""
    left = set()
    for refuse in batch:
        path = refuse.path
        try:
            if refuse.fd >= 0:
                os.close(refuse.fd)
            else:
                os.unlink(path)
        except FileNotFoundError:
            log.debug("%s was gone already", path)
        except OSError as error:
            log.warning("%s cannot be removed, the next start will: %s", path, error)
            left.add(path)
    return left
