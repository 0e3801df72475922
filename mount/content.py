"""Reading open files without a copy too many and without stalling the mount.

Every request is answered in the mount's one thread. Pages that memory has are read there
(RWF_NOWAIT); what has to come from a disk is read in a worker thread, for a hop of 0.1 ms.
"""

import errno
import os
from collections.abc import Callable

import trio

from kvfs.arriving import Arriving
from kvfs.config import MIB

# Requests of the usual size share it: clearing new memory for each costs as much as reading.
_common = memoryview(bytearray(MIB))


class OpenBytes:
    """A descriptor that several reads may share; it is closed, by `close`, when it is retired and
    idle. With `arriving`, its file is on its way from another node, and a read waits for its part.
    """

    __slots__ = ("_arriving", "_close", "_is_retired", "_nowait", "_reads", "fd")

    def __init__(
        self,
        fd: int,
        close: Callable[[int], None] = os.close,
        arriving: Arriving | None = None,
    ) -> None:
        self.fd = fd
        self._close = close
        self._arriving = arriving
        self._reads = 0
        self._is_retired = False
        self._nowait = True

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here, and were checked."""
        return self._arriving is None or self._arriving.is_whole

    @property
    def has_failed(self) -> bool:
        """Whether they will not all come, or are wrong."""
        return self._arriving is not None and self._arriving.has_failed

    async def read(self, offset: int, size_bytes: int) -> bytes | memoryview:
        """Up to `size_bytes`, fewer only at the end of the file. Raises `Unavailable` for bytes
        that don't arrive.

        The result may be the common buffer: it is the caller's until its next `await`, which is
        time enough to reply.
        """
        if self._arriving is None:
            return await self._read(offset, size_bytes)
        self._reads += 1
        try:
            await self._arriving.wait(offset, offset + size_bytes)
            return await self._read(offset, size_bytes)
        finally:
            self._end_read()

    async def _read(self, offset: int, size_bytes: int) -> bytes | memoryview:
        data = self._read_cached(offset, size_bytes)
        if data is not None:
            return data
        self._reads += 1
        try:
            found = await trio.to_thread.run_sync(
                _read_whole, self.fd, offset, size_bytes, abandon_on_cancel=True
            )
        except trio.Cancelled:
            raise  # the thread may still read, so the descriptor stays open: this is the end anyway
        except BaseException:
            self._end_read()
            raise
        self._end_read()
        return found

    def _end_read(self) -> None:
        self._reads -= 1
        self._close_if_done()

    def _read_cached(self, offset: int, size_bytes: int) -> memoryview | None:
        """The bytes if memory has them all, or the file ends there; else None."""
        if not self._nowait:
            return None
        buffer = _common if size_bytes == len(_common) else memoryview(bytearray(size_bytes))
        try:
            count = os.preadv(self.fd, [buffer], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._nowait = False  # this file system cannot say
            return None
        if count < size_bytes and offset + count < os.fstat(self.fd).st_size:
            return None
        return buffer[:count]

    def retire(self) -> None:
        """Close the descriptor as soon as no read uses it."""
        self._is_retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_retired and self._reads == 0 and self.fd >= 0:
            self._close(self.fd)
            self.fd = -1


def _read_whole(fd: int, offset: int, size_bytes: int) -> bytes:
    """Read until `size_bytes` or the end of the file."""
    data = os.pread(fd, size_bytes, offset)
    if not data or len(data) == size_bytes:
        return data
    parts = [data]
    missing = size_bytes - len(data)
    while missing and (data := os.pread(fd, missing, offset + size_bytes - missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def write_whole(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`, whatever single calls manage."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count
