"""What lies in a stored file, read through a descriptor: its digest, its chunk header; and what it
takes on its disk."""

import errno
import fcntl
import mmap
import os
import sys

import xxhash

from kvfs.chunk import ChunkHeader, decode_header, header_bytes_needed
from kvfs.config import MIB, PAGE_BYTES
from kvfs.errors import Corrupt
from kvfs.file_io import is_cached

_READ_BYTES = 4 * MIB
_MAPPED_BYTES = 16 * MIB  # at a time
_POPULATE_READ = 22  # madvise(2), Linux 5.14; Python's mmap module does not name it
_NOT_IN_KERNEL = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of two disks


def allocated_bytes(status: os.stat_result) -> int:
    """What `du` counts for a file: the blocks that it has, not its length."""
    return status.st_blocks * 512


def digest_file(fd: int) -> bytes:
    """The digest of an open file, read from its start. May block."""
    hasher = xxhash.xxh3_128()
    _hash_range(hasher, fd, 0, sys.maxsize)
    return hasher.digest()


def digest_own_file(fd: int) -> bytes:
    """As `digest_file`, in half the time, of a file that nobody but this process can shorten
    meanwhile: what memory has of it is hashed where it lies. May block, but holds the interpreter
    for no longer than pages take to be mapped."""
    hasher = xxhash.xxh3_128()
    size_bytes = os.fstat(fd).st_size
    try:
        for begin in range(0, size_bytes, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size_bytes - begin)
            if not is_cached(fd, begin, length):  # populating would wait for the disk with the lock
                _hash_range(hasher, fd, begin, begin + length)
                continue
            with mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=begin) as piece:
                piece.madvise(_POPULATE_READ)  # what cannot be read raises here, and kills later
                hasher.update(piece)
    except (OSError, ValueError):  # a file system that maps nothing; a page that cannot be read
        return digest_file(fd)
    return hasher.digest()


def _hash_range(hasher: xxhash.xxh3_128, fd: int, begin: int, end: int) -> None:
    """Add what a file holds from `begin` to `end`, or to its own end."""
    # Clearing more than is needed would cost small files more than their digest.
    wanted_bytes = max(PAGE_BYTES, min(end, os.fstat(fd).st_size) - begin)
    buffer = memoryview(bytearray(min(_READ_BYTES, wanted_bytes)))
    while count := os.preadv(fd, [buffer[: end - begin]], begin):
        hasher.update(buffer[:count])
        begin += count


def may_have_writer(fd: int) -> bool:
    """Whether anybody may have a file, of which this is a descriptor for reading, open or mapped
    for writing. Only a lease tells; where there are none, somebody may."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def copy_bytes(source: int, target: int, size_bytes: int) -> None:
    """Copy the start of one open file to that of another, in the kernel where both lie on one file
    system. May block. Raises `Corrupt` when the file is shorter."""
    done_bytes = 0
    copy = _copy_in_kernel
    while done_bytes < size_bytes:
        try:
            copied = copy(source, target, size_bytes - done_bytes, done_bytes)
        except OSError as error:
            if copy is _copy_by_hand or error.errno not in _NOT_IN_KERNEL:
                raise
            copy = _copy_by_hand
            continue
        if copied == 0:
            raise Corrupt("blob", "ended while it was copied")
        done_bytes += copied


def _copy_in_kernel(source: int, target: int, size_bytes: int, offset: int) -> int:
    return os.copy_file_range(source, target, size_bytes, offset, offset)


def _copy_by_hand(source: int, target: int, size_bytes: int, offset: int) -> int:
    return os.pwrite(target, os.pread(source, min(size_bytes, _READ_BYTES), offset), offset)


def read_header(fd: int, file_bytes: int) -> ChunkHeader:
    """The header of a chunk file, checked against the file's length. Raises `Corrupt`."""
    page = os.pread(fd, PAGE_BYTES, 0)
    needed = header_bytes_needed(page)
    header = page if needed <= len(page) else os.pread(fd, needed, 0)
    if len(header) < needed:
        raise Corrupt("chunk", "the file ends inside its header")
    return decode_header(header, file_bytes)[0]
