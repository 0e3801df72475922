"""The bytes of a version while they change: its stage, from the first write to its publication.

Who calls holds the version's lock wherever something is awaited; see `mount.handles`.
"""

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kvfs.config import MIB, PAGE_BYTES, STAGE_STEP_BYTES_MAX
from kvfs.errors import NamespaceError, OutOfSpace
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.stage import Stage
from kvfs.stored import allocated_bytes
from mount.content import OpenBytes, write_whole
from mount.growing import GrowingDigest
from mount.spares import SpareStages
from mount.states import State
from mount.through import Through, ThroughFiles

log = logging.getLogger(__name__)

_HASHED_INLINE_BYTES_MAX = 256 * 1024  # while several files are written
_WRITE_INLINE_BYTES_MAX = MIB
_TRUNCATE_INLINE_BYTES_MAX = 4 * MIB
_SLOW_WRITE_S = 0.005
_SLOW_DISK_S = 1.0  # for so long after a slow write, all are done in threads


@dataclass(slots=True, eq=False)
class Version:
    """One kernel inode with open handles. Bytes are in `stage` while they change, else in the blob
    of `digest`, which `content` has open once someone read."""

    number: int
    ino: int
    digest: bytes = b""
    readers: int = 0
    writers: int = 0
    content: OpenBytes | None = None
    stage: Stage | None = None
    is_dirty: bool = False  # the stage has what is not published
    size_bytes: int = 0  # of the stage
    mtime_ns: int = 0  # of the stage
    written_bytes: int = 0  # at most so much of the reservation is used
    growing: GrowingDigest | None = None  # of the stage, as long as it is written in order
    through: Through | None = None  # while the kernel writes its stage
    was_arriving: bool = False  # it was read while its bytes came from another node
    is_mixed: bool = False  # was open for reading and for writing at once
    frozen: Inode | None = None  # what an old version shows
    shown: Inode | None = None  # what names showed when it was opened
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def opens(self) -> int:
        """How often it is open."""
        return self.readers + self.writers

    @property
    def has_news(self) -> bool:
        """Whether there may be something to publish."""
        return self.is_dirty if self.through is None else self.through.is_changed

    @property
    def state(self) -> State:
        if self.frozen is not None:
            return State.OLD
        if self.stage is not None:
            return State.STAGED
        if self.writers:
            return State.WRITE
        return State.READ if self.readers else State.IDLE


class Stages:
    """What a node does for versions that change."""

    def __init__(self, node: Node, may_be_asked: Callable[[], bool]) -> None:
        """`may_be_asked`: see `ThroughFiles`."""
        self._node = node
        self.through = ThroughFiles(node, may_be_asked)
        self.spares = SpareStages(node)
        self._staged = 0  # versions that have a stage
        self._slow_until_s = 0.0

    async def write(self, version: Version, offset: int, data: bytes) -> None:
        """Write all of `data`, or raise and count nothing as written."""
        if version.through is not None:  # its size and time are asked of the stage
            stage = version.through.stage
            await self._write_out(version, stage, os.fstat(stage.fd).st_size, data, offset)
            return
        stage = await self._start(version)
        if offset > version.size_bytes:  # a hole costs nothing to make, but all of it is hashed
            self._check_length(stage, offset + len(data))
        await self._reserve(version, stage, len(data))
        version.is_dirty = True
        if version.growing is not None and version.growing.size_bytes != offset:
            version.growing = None
        await self._write_out(version, stage, version.size_bytes, data, offset)
        version.size_bytes = max(version.size_bytes, offset + len(data))
        version.mtime_ns = self._node.now_ns()

    async def _write_out(
        self, version: Version, stage: Stage, size_bytes: int, data: bytes, offset: int
    ) -> None:
        """Write into a version's stage of `size_bytes`, in the mount's own thread where that is
        not likely to hold it up. A write that fails leaves the stage no longer than it was."""
        begin_s = trio.current_time()
        arguments = stage.fd, data, offset, version.growing
        may_wait_for_us = version.through is not None and version.writers > 1  # see `mount.through`
        is_large = len(data) > self._inline_bytes_max(is_hashed=version.growing is not None)
        try:
            if is_large or may_wait_for_us or begin_s < self._slow_until_s:
                await trio.to_thread.run_sync(_write, *arguments)
                return
            _write(*arguments)
        except OSError:
            # The kernel lets nobody else make it longer meanwhile.
            if offset + len(data) > size_bytes:
                os.ftruncate(stage.fd, size_bytes)
            raise
        end_s = trio.current_time()
        if end_s - begin_s > _SLOW_WRITE_S:  # too much waits for the disk already
            self._slow_until_s = end_s + _SLOW_DISK_S

    def _inline_bytes_max(self, *, is_hashed: bool) -> int:
        """How much is written in the mount's own thread. Another costs who writes time; where bytes
        are hashed as well, it gives several writers a core each."""
        is_one_of_several = is_hashed and self._staged > 1
        return _HASHED_INLINE_BYTES_MAX if is_one_of_several else _WRITE_INLINE_BYTES_MAX

    async def truncate(self, version: Version, size_bytes: int) -> None:
        """Set a size. Growing makes a hole."""
        if version.through is not None:
            self._check_length(version.through.stage, size_bytes)
            # In a thread: it waits for a write that is under way.
            stage = version.through.stage
            await trio.to_thread.run_sync(os.ftruncate, stage.fd, size_bytes)
            self._note_cut(stage, size_bytes)
            return
        if version.stage is None and size_bytes == 0:
            self.adopt(version, self.spares.take(), 0)
        stage = await self._start(version)
        self._check_length(stage, size_bytes)
        if version.size_bytes - size_bytes > _TRUNCATE_INLINE_BYTES_MAX:
            await trio.to_thread.run_sync(os.ftruncate, stage.fd, size_bytes)
        else:
            os.ftruncate(stage.fd, size_bytes)
        self._note_cut(stage, size_bytes)
        version.size_bytes = size_bytes
        version.mtime_ns = self._node.now_ns()
        version.is_dirty = True
        if version.growing is None or version.growing.size_bytes != size_bytes:
            version.growing = None if size_bytes else GrowingDigest()

    def _note_cut(self, stage: Stage, size_bytes: int) -> None:
        stage.ahead_bytes = min(stage.ahead_bytes, size_bytes)
        self._node.space.note_cut(stage)

    def adopt(self, version: Version, stage: Stage, size_bytes: int) -> None:
        """Give a version a stage, which holds `size_bytes`."""
        assert version.stage is None
        if version.content is not None:
            version.content.retire()
        self._staged += 1
        version.stage = stage
        version.content = OpenBytes(stage.fd, self._node.reclaim.close)
        version.size_bytes = size_bytes
        version.written_bytes = size_bytes
        version.growing = None if size_bytes else GrowingDigest()
        version.mtime_ns = self._node.now_ns()

    def write_through(self, version: Version) -> None:
        """The kernel serves the version's writers from its stage."""
        assert version.stage is not None
        version.through = self.through.begin(version.stage, version.lock)
        version.growing = None
        version.is_dirty = False

    def end_through(self, version: Version) -> None:
        """The last writer has gone, so that only readers may have the version open."""
        through, version.through = version.through, None
        if through is None:
            return
        mark = through.mark()
        version.size_bytes, version.mtime_ns = mark[0], through.mtime_ns(mark)
        self.through.end(through)
        if through.published is not None:
            version.stage = None
            self._staged -= 1

    def note_closed(self, version: Version) -> None:
        """What a writer wrote is whole: the next files may be as large."""
        through = version.through
        self.spares.note_closed(version.size_bytes if through is None else through.mark()[0])

    async def publish(self, version: Version, is_shared: Callable[[], bool]) -> bool:
        """Publish the stage if it has news and the file a name; whether it did. `is_shared`: see
        `ThroughFiles.publish`."""
        if version.through is not None:
            published = await self.through.publish(version.through, version.ino, is_shared)
            if published is not None:
                version.digest = published.digest
            return published is not None
        inode = self._node.meta.inode(version.ino)
        stage = version.stage
        if stage is None or not version.is_dirty or inode is None or inode.nlink == 0:
            return False
        if not stage.is_open:
            raise NamespaceError(errno.EIO)  # used up by a publication that failed half-way
        growing = version.growing
        is_known = growing is not None and growing.size_bytes == version.size_bytes
        digest = growing.digest() if growing is not None and is_known else None
        if stage.ahead_bytes > version.size_bytes:  # the blocks that it did not need
            await trio.to_thread.run_sync(os.ftruncate, stage.fd, version.size_bytes)
        published = await self._node.publish_stage(stage, version.ino, version.mtime_ns, digest)
        version.stage = None
        self._staged -= 1
        version.is_dirty = False
        version.digest = published.digest
        return True

    def drop(self, version: Version, *, is_only: bool) -> None:
        """Give up what was not published. A file that never was has no bytes then, and goes, unless
        another version of it is open."""
        stage, version.stage = version.stage, None
        assert stage is not None
        self._staged -= 1
        if stage.is_open:
            self._node.discard(stage)
        else:
            self._node.reclaim.close(stage.fd)
        inode = self._node.meta.inode(version.ino)
        if is_only and inode is not None and inode.nlink and not inode.is_published:
            log.info("inode %d was not published; its names are dropped", inode.ino)
            self._node.abandon(inode.ino)

    async def _start(self, version: Version) -> Stage:
        """The version's stage, made with a copy of its blob if there is none."""
        if version.stage is not None:
            return version.stage
        size_bytes = 0
        if version.digest:
            stage = await self._copy(version)
            size_bytes = os.fstat(stage.fd).st_size
        else:
            stage = self._node.stage()
        self.adopt(version, stage, size_bytes)
        return stage

    async def _copy(self, version: Version) -> Stage:
        """A stage with the bytes that the version has, which may be those of its file no more."""
        inode = self._node.meta.inode(version.ino)
        if inode is not None and (inode.digest == version.digest or version.content is None):
            return await self._node.stage_copy(version.ino)
        if version.content is None or not version.content.is_whole:
            raise NamespaceError(errno.ESTALE)  # another node has removed it before it was here
        source = os.dup(version.content.fd)
        try:
            return await self._node.stage_copy_of(source)
        finally:
            os.close(source)

    def _check_length(self, stage: Stage, size_bytes: int) -> None:
        """EFBIG for a file that its directory could never hold, holes or not."""
        if not self._node.space.fits_ever(stage.directory, size_bytes):
            raise NamespaceError(errno.EFBIG)

    async def _reserve(self, version: Version, stage: Stage, size_bytes: int) -> None:
        """Have room for `size_bytes` more. What counts is what the file takes on disk."""
        more_bytes = size_bytes + 2 * PAGE_BYTES
        version.written_bytes += more_bytes
        if version.written_bytes <= stage.reserved_bytes:
            return
        needed = allocated_bytes(os.fstat(stage.fd)) + more_bytes
        version.written_bytes = needed
        try:
            await self._node.reserve(stage, needed + min(needed, STAGE_STEP_BYTES_MAX))
        except OutOfSpace:
            await self._node.reserve(stage, needed)


def _write(fd: int, data: bytes, offset: int, growing: GrowingDigest | None) -> None:
    """Write all of `data`, and hash it while the processor has it at hand."""
    write_whole(fd, data, offset)
    if growing is not None:
        growing.add(data)
