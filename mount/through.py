"""Files that are written through the kernel: FUSE passthrough for writes.

A file that is made, or emptied, by an open for writing only is served by the kernel from its stage
(`mount.passthrough`). Its writes do not come here, but for those of opens with O_DIRECT, which
Python does beside the kernel: so size and time are asked of the stage, room is reserved while it
grows, and a close finds what to publish by comparing size and mtime with what it published last. A
file that finds no room is told so by close, so a store with little room does without.

Who closes may have another descriptor (a shell's redirection has), and write after the close:

- A small file is published as a copy. The stage stays the writer's own until the last release.
- A large one is published as it is, but for one that others have open for writing as well while
  Python serves a file (see below), or that has many blocks more than it needs. Until the last
  release its blob is open (`kvfs.open_blobs`).
  If it changed by then, what it holds is published as a copy, and the old blob goes with its name.
- A file that somebody opens for reading and writing as well may be mapped, and a mapping outlives
  the last release: it is published as a copy, always. What is stored into such a mapping after the
  release is lost.

Whatever takes the lock of a stage's file (a link, an unlink, a write, a change of its mode or
length) waits for a write of the kernel's that is under way, and that may wait for this process:
what it writes may be mapped from a file of the same mount that Python serves. So all that is done
in threads, but for what is done while Python serves no file (the link of a close: a thread takes
0.15 ms) or nobody else has the stage open for writing (the rename that makes it a blob), and what
comes after the last release. A thread that waits so with the lock of a directory stops this one as
well. Who closes may have another descriptor of the same open, which nobody sees: see
`docs/concurrency.md`.

A large file that is closed for the first time, and not mapped, may be published later
(`mount.settling`): then `keep` has the next start know of it.

On file systems that keep time finely (from Linux 6.13 on), each write moves mtime once somebody has
asked for it; on others this is not done. Nobody can map a file that is open for writing only.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kvfs.blob_files import remove_name
from kvfs.blobs import BlobDirectory
from kvfs.config import MIB, THROUGH_ROOM_BYTES_MIN
from kvfs.errors import KvfsError, NamespaceError, OutOfSpace
from kvfs.file_io import is_cached
from kvfs.kept import Kept, keep, shown_digest
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.publish import InUse
from kvfs.stage import Stage
from kvfs.stored import allocated_bytes, copy_bytes
from mount.locks import Held

log = logging.getLogger(__name__)

_COPIED_BYTES_MAX = MIB
_INLINE_BYTES_MAX = 16 * MIB  # are hashed in the mount's own thread
_WATCH_S = 0.01  # in it a disk takes some 30 MiB
_AHEAD_BYTES = 32 * MIB
_PROBES = 8

Mark = tuple[int, int]


def goes_through(flags: int) -> bool:
    """Whether an open that makes or empties a file may have the kernel serve its writes."""
    return flags & os.O_ACCMODE == os.O_WRONLY


@dataclass(slots=True, eq=False)
class Through:
    """The stage that the kernel writes to, whatever becomes of its name."""

    stage: Stage
    lock: trio.Lock  # the version's
    published: Mark | None = None  # what it was when it was published
    is_mapped: bool = False  # perhaps, for writing
    set_mtime: tuple[int, Mark] | None = None  # by a person, when it was so
    growth: Stage | None = None  # room for what comes after it was published as it is
    counted_bytes: int = 0  # as what was published
    kept: Kept | None = None  # what the next start would make of it
    left: list[str] = field(default_factory=list)  # names of that kind to remove at the end

    def mark(self) -> Mark:
        """Another whenever the bytes are: size and mtime of the stage."""
        return _mark_of(os.fstat(self.stage.fd))

    def mtime_ns(self, mark: Mark) -> int:
        """What the file shows while it is as `mark` says."""
        if self.set_mtime is not None and self.set_mtime[1] == mark:
            return self.set_mtime[0]
        return mark[1]

    @property
    def is_changed(self) -> bool:
        """Whether there may be something to publish."""
        return self.is_mapped or self.published != self.mark()


class ThroughFiles:
    """What a node does for them. Who calls holds the version's lock where something is awaited.

    `may_be_asked` tells whether somebody has a file open whose bytes come from Python, so that a
    write of the kernel's may wait for this process.
    """

    def __init__(self, node: Node, may_be_asked: Callable[[], bool]) -> None:
        self._node = node
        self._may_be_asked = may_be_asked
        self._growing: set[Through] = set()
        self._tells: dict[int, bool] = {}
        self._wake = trio.Event()

    def may_begin(self, stage: Stage) -> bool:
        """Whether writes to a new, empty stage can be told by its mtime, and are not likely to be
        more than there is room for: what Python writes is told so at the write."""
        space = self._node.space
        room_bytes = space.room_bytes(stage.directory) + space.evictable_bytes(stage.directory)
        if room_bytes < THROUGH_ROOM_BYTES_MIN:
            return False
        if stage.directory not in self._tells:
            try:
                self._tells[stage.directory] = _tells_writes(stage.fd)
                stage.ahead_bytes = 0
            except OSError:
                return False  # a full disk, which Python's write tells
        return self._tells[stage.directory]

    def begin(self, stage: Stage, lock: trio.Lock) -> Through:
        """The kernel writes to a version's stage from now on; `lock` is the version's."""
        through = Through(stage, lock)
        self._growing.add(through)
        self._wake.set()
        return through

    async def keep(
        self, through: Through, ino: int, size_bytes_max: int, is_shared: Callable[[], bool]
    ) -> int | None:
        """See to it that the next start publishes what a file holds, so that this one may do it
        later; its size, None where it has to be done now. `is_shared` and what it raises: as
        `publish`."""
        stage = through.stage
        is_fit = through.published is None and stage.is_open and not through.is_mapped
        is_alone = self._node.neighbours is None  # others would see a name without bytes
        if not (is_fit and is_alone) or self._node.config.fsync or self._named(ino) is None:
            return None
        status = os.fstat(stage.fd)
        mark = size_bytes, changed_ns = _mark_of(status)
        if not _COPIED_BYTES_MAX < size_bytes <= size_bytes_max or stage.wastes_blocks(size_bytes):
            return None
        self._check_length(stage, size_bytes)
        await self._node.reserve(stage, allocated_bytes(status))
        self._node.space.fit(stage, allocated_bytes(status))
        inode = self._named(ino)
        if inode is None:  # it was removed meanwhile
            return None
        replaces = shown_digest(inode)
        mtime_ns, identity = through.mtime_ns(mark), self._node.meta.identity
        kept = Kept(stage.name, ino, size_bytes, changed_ns, mtime_ns, replaces, identity)
        if kept != through.kept:
            if is_shared() and self._may_be_asked():
                return None
            if not await self._keep(stage, kept):
                return None
            await self._end_keeping(through)
            through.kept = kept
        return size_bytes

    async def _keep(self, stage: Stage, kept: Kept) -> bool:
        directory = self._directory(stage)
        if self._may_be_asked():
            return await trio.to_thread.run_sync(_wait_and_keep, stage.fd, directory, kept)
        return keep(directory, kept)

    async def _end_keeping(self, through: Through) -> None:
        """Remove the name that the next start would know: it says what is no more. Where that could
        wait for ever, at the end: a start leaves alone what shows other bytes by then."""
        path = self._take_kept(through)
        if path is None:
            return
        if self._may_be_asked():
            through.left.append(path)
        else:
            await trio.to_thread.run_sync(remove_name, path)

    def _take_kept(self, through: Through) -> str | None:
        """Where the name lies by which the next start would know of a file; it is nobody's now."""
        kept, through.kept = through.kept, None
        return None if kept is None else self._directory(through.stage).stage_path(kept.name)

    def _named(self, ino: int) -> Inode | None:
        """An inode, if it has a name."""
        inode = self._node.meta.inode(ino)
        return inode if inode is not None and inode.nlink > 0 else None

    async def publish(
        self, through: Through, ino: int, is_shared: Callable[[], bool]
    ) -> Inode | None:
        """Publish what a file holds, if that is new and the file has a name; the inode then.
        `is_shared` tells whether others than who closes have it open for writing. Raises
        `OutOfSpace`, ENOSPC and EFBIG, which only a close can tell of."""
        if self._named(ino) is None or not through.is_changed:
            return None
        before = through.mark()
        mtime_ns = through.mtime_ns(before)
        self._check_length(through.stage, before[0])
        published = None
        is_large = before[0] > _COPIED_BYTES_MAX and not through.stage.wastes_blocks(before[0])
        if through.stage.is_open and not through.is_mapped and is_large:
            published = await self._publish_itself(through, before, ino, mtime_ns, is_shared)
        if published is None:
            published = await self._publish_copy(through.stage.fd, before, ino, mtime_ns)
        through.published = before
        await self._end_keeping(through)
        return published

    def _check_length(self, stage: Stage, size_bytes: int) -> None:
        """Refuse what its directory could never hold, holes included, which a digest reads."""
        fits_ever = self._node.space.fits_ever
        if not fits_ever(stage.directory, size_bytes):
            is_full = not fits_ever(stage.directory, allocated_bytes(os.fstat(stage.fd)))
            raise NamespaceError(errno.ENOSPC if is_full else errno.EFBIG)

    async def _publish_itself(
        self,
        through: Through,
        before: Mark,
        ino: int,
        mtime_ns: int,
        is_shared: Callable[[], bool],
    ) -> Inode | None:
        """Make the stage's file the blob; None when somebody writes at this moment, or may begin to
        and keep the rename waiting for ever."""
        stage = through.stage
        await self._node.reserve(stage, allocated_bytes(os.fstat(stage.fd)))
        digest = await self._digest(stage, before[0], is_awaited=through.kept is None)
        if self._node.config.fsync:
            await trio.to_thread.run_sync(os.fsync, stage.fd, abandon_on_cancel=True)
        # Nothing is awaited from here on: the rename would wait for a write that has begun since.
        if through.mark() != before or (is_shared() and self._may_be_asked()):
            return None
        try:
            published = await self._node.publish_stage(
                stage,
                ino,
                mtime_ns,
                digest,
                ctime_ns=before[1],
                writable_bytes=before[0],
            )
        except InUse:
            return None
        # What it grows by from now on is nobody's yet.
        through.growth = Stage(stage.directory, "", -1)
        through.counted_bytes = allocated_bytes(os.fstat(stage.fd))
        self._node.space.begin_stage(through.growth)
        return published

    async def _digest(self, stage: Stage, size_bytes: int, *, is_awaited: bool) -> bytes:
        """The digest of what a stage holds. For a lone file of 16 MiB in memory that takes 2 ms,
        and another thread as long again to begin and to tell; several get a core each."""
        directory = self._directory(stage)
        is_alone = is_awaited and len(self._growing) == 1
        if is_alone and size_bytes <= _INLINE_BYTES_MAX and is_cached(stage.fd, 0, size_bytes):
            await trio.to_thread.run_sync(_wait_written, stage.fd)
            return directory.prepare(stage.fd)
        own_fd = os.dup(stage.fd)
        return await trio.to_thread.run_sync(
            _prepare_and_close, directory, own_fd, abandon_on_cancel=True
        )

    def _directory(self, stage: Stage) -> BlobDirectory:
        directory = self._node.directories[stage.directory]
        assert directory is not None
        return directory

    async def _publish_copy(self, fd: int, before: Mark, ino: int, mtime_ns: int) -> Inode:
        size_bytes, changed_ns = before
        copy = self._node.stage(size_bytes)
        try:
            await self._node.reserve(copy, size_bytes)
            digest = await trio.to_thread.run_sync(
                _prepare_copy, self._directory(copy), fd, copy.fd, size_bytes
            )
            published = await self._node.publish_stage(
                copy, ino, mtime_ns, digest, ctime_ns=changed_ns
            )
        except BaseException:
            if copy.is_open:
                self._node.discard(copy)
            else:
                self._node.reclaim.close(copy.fd)
            raise
        self._node.reclaim.close(copy.fd)
        return published

    async def note_mapped(self, through: Through, ino: int) -> None:
        """Somebody may map the file for writing: it must be no blob, nor stay one."""
        if not through.is_mapped:
            through.is_mapped = True
            if through.stage.adopted_as:
                await self.publish(through, ino, lambda: True)

    def end(self, through: Through) -> None:
        """Nobody writes to the file any more. Its descriptor stays the version's."""
        self._growing.discard(through)
        kept_path = self._take_kept(through)
        for path in (*through.left, *([] if kept_path is None else [kept_path])):
            remove_name(path)
        stage, growth = through.stage, through.growth
        if growth is not None:
            growth.is_open = False
            self._node.space.end_stage(growth)
        if stage.adopted_as:
            self._node.open_blobs.end(stage.adopted_as)
            if through.is_changed:
                self._node.contents.withdraw(stage.adopted_as, stage.fd)
            self._node.orphans.reap()  # it may have been waited for
        elif through.published is not None:
            self._node.publisher.drop_stage(stage)

    async def watch(self) -> None:
        """Reserve room for what grows, for ever. A writer that finds none is told at its close."""
        while True:
            await self._wake.wait()
            while self._growing:
                for through in list(self._growing):
                    if through.kept is None and not through.lock.locked():
                        async with Held(through.lock):
                            if through in self._growing:  # it may have ended while others had turns
                                await self._reserve_ahead(through)
                await trio.sleep(_WATCH_S)
            self._wake = trio.Event()

    async def _reserve_ahead(self, through: Through) -> None:
        stage = through.growth or through.stage
        taken = allocated_bytes(os.fstat(through.stage.fd)) - through.counted_bytes
        if taken <= _COPIED_BYTES_MAX or taken + _AHEAD_BYTES // 2 <= stage.reserved_bytes:
            return
        for wanted in (taken + _AHEAD_BYTES, taken):
            try:
                await self._node.reserve(stage, wanted)
            except OutOfSpace:
                continue
            except (KvfsError, OSError) as error:  # the close will tell
                log.debug("no room was reserved: %s", error)
            return


def _mark_of(status: os.stat_result) -> Mark:
    return status.st_size, status.st_mtime_ns


def _tells_writes(fd: int) -> bool:
    """Whether each write to an empty file moves its mtime; it is empty again afterwards."""
    seen = set()
    for _ in range(_PROBES):
        os.pwrite(fd, b"x", 0)
        seen.add(os.fstat(fd).st_mtime_ns)
    os.ftruncate(fd, 0)
    return len(seen) == _PROBES


def _wait_written(fd: int) -> None:
    """Wait for writes that are under way: mtime moves when one begins."""
    # Nothing is changed, but it takes the lock that a write has.
    os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode))


def _wait_and_keep(fd: int, directory: BlobDirectory, kept: Kept) -> bool:
    """As `keep`, which holds the lock of `staging` while it waits for a write: so wait before."""
    _wait_written(fd)
    return keep(directory, kept)


def _prepare_copy(directory: BlobDirectory, source: int, target: int, size_bytes: int) -> bytes:
    _wait_written(source)
    copy_bytes(source, target, size_bytes)
    return directory.prepare(target)


def _prepare_and_close(directory: BlobDirectory, fd: int) -> bytes:
    try:
        _wait_written(fd)
        return directory.prepare(fd)
    finally:
        os.close(fd)
