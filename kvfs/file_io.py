"""Files, or ranges of them, between descriptors and the caller's memory, by the shortest way.

Reading goes straight from the disk (O_DIRECT) unless memory has the whole file already, writing
straight to it: a chunk is read or written once and would only push other pages out. Where a file
system or a buffer does not allow it, the page cache serves. Calls release the GIL; several threads
keep a disk busy.

Whether memory has a file is asked of the kernel (cachestat), not tried: a buffered read that finds
nothing, RWF_NOWAIT included, starts to read ahead, megabytes of what is then read once more.

Buffers are the caller's, before, during and after. Those that begin at a page boundary and have
room up to the next multiple of 4096 behind the last byte need no detour; `allocate` makes such.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from kvfs.config import PAGE_BYTES, whole_pages

_PIECE_BYTES = 8 * 1024 * 1024  # smaller ones cost short files more than hashing meanwhile gains
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_DIRECT_BYTES_MIN = 128 * 1024  # below, setting O_DIRECT costs more than it saves
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_CACHESTAT = 451  # since Linux 6.5, on x86-64 and Arm alike
_KEEP_SIZE = 1  # fallocate(2): blocks beyond the end, which stays where it is
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def allocate(size_bytes: int) -> memoryview:
    """Page-aligned memory of at least `size_bytes`, rounded up to whole pages, all zero. Costs
    nothing until it is used.

    Where the kernel gives huge pages, they are used: a disk fills contiguous memory two to four
    times as fast as scattered pages. Shared memory would not get them.
    """
    usable_bytes = whole_pages(max(size_bytes, 1))
    if usable_bytes < _HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, usable_bytes, flags=_PRIVATE))
    area = mmap.mmap(-1, usable_bytes + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without them
        if error.errno != errno.EINVAL:
            raise
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE_BYTES
    return memoryview(area)[begin : begin + usable_bytes]


def read_into(
    fd: int,
    memory: memoryview,
    size_bytes: int,
    tell: Callable[[memoryview], None] | None = None,
    at: int = 0,
) -> int:
    """Read `size_bytes` from a place in a file, usually its start, into `memory`; how many there
    were. `tell` gets each piece as it arrives, in order."""
    assert len(memory) >= size_bytes
    done = 0
    is_large = size_bytes >= _DIRECT_BYTES_MIN and at % PAGE_BYTES == 0
    if is_large and not is_cached(fd, at, size_bytes) and _set_direct(fd, True):
        end = min(whole_pages(size_bytes), len(memory) // PAGE_BYTES * PAGE_BYTES)
        try:
            while done < end and (count := _read_piece(fd, memory[:end], done, at)):
                _tell(tell, memory[done : min(done + count, size_bytes)])
                done += count
                if count % PAGE_BYTES:
                    break  # the end of the file
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        finally:
            _set_direct(fd, False)
    while done < size_bytes and (count := _read_piece(fd, memory[:size_bytes], done, at)):
        _tell(tell, memory[done : done + count])
        done += count
    return min(done, size_bytes)


def _read_piece(fd: int, memory: memoryview, begin: int, at: int) -> int:
    return os.preadv(fd, [memory[begin : begin + _PIECE_BYTES]], at + begin)


def _tell(tell: Callable[[memoryview], None] | None, piece: memoryview) -> None:
    if tell is not None and piece:
        tell(piece)


def is_cached(fd: int, at: int, size_bytes: int) -> bool:
    """Whether the page cache has all of a range; False where the kernel does not tell."""
    whole = (ctypes.c_uint64 * 2)(at, size_bytes)
    pages = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
    refused = _syscall(ctypes.c_long(_CACHESTAT), ctypes.c_long(fd), whole, pages, ctypes.c_long(0))
    return not refused and pages[0] >= -(-size_bytes // mmap.PAGESIZE)


def write_from(fd: int, memory: memoryview, at: int = 0) -> None:
    """Write all of `memory` into a new file, from a place on a page boundary. OSError passes
    (ENOSPC among them); the file is then of no use."""
    assert at % PAGE_BYTES == 0
    done = 0
    whole = len(memory) // PAGE_BYTES * PAGE_BYTES
    if whole >= _DIRECT_BYTES_MIN and _set_direct(fd, True):
        try:
            while done < whole:
                done += os.pwritev(fd, [memory[done:whole]], at + done)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        finally:
            _set_direct(fd, False)
    while done < len(memory):
        done += os.pwritev(fd, [memory[done:]], at + done)


def map_file(fd: int, size_bytes: int) -> memoryview:
    """The pages of a new file, made that long, with room for all of it on its disk. The memory
    stays until the last view of it has gone. OSError passes."""
    if size_bytes == 0:
        return memoryview(b"")
    os.ftruncate(fd, size_bytes)
    os.posix_fallocate(fd, 0, size_bytes)
    return memoryview(mmap.mmap(fd, size_bytes))


def give_blocks(fd: int, size_bytes: int) -> bool:
    """Give a file its blocks on the disk before it is written, as far as `size_bytes`; its length
    stays. False where the file system can't. OSError passes (ENOSPC among them)."""
    if _fallocate(fd, _KEEP_SIZE, 0, size_bytes) == 0:
        return True
    failure = ctypes.get_errno()
    if failure in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(failure, os.strerror(failure))


def _set_direct(fd: int, wanted: bool) -> bool:
    """Switch O_DIRECT on an open descriptor; False where the file system has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    return True
