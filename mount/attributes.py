"""From the node's records to what the kernel is told of a file, and for how long it may keep it."""

import pyfuse3

from kvfs.config import KERNEL_CACHE_S, PAGE_BYTES
from kvfs.meta.contract import Inode


def _absent() -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = entry.attr_timeout = 0.0
    return entry


ABSENT = _absent()  # the answer for a name that is not there, which the kernel may not keep either


def attributes(inode: Inode, number: int, *, is_changing: bool = False) -> pyfuse3.EntryAttributes:
    """What stat shows of an inode under a number.

    `is_changing`: its bytes are being written, so that size and times are asked for each time. A
    file of several names is looked up each time, since a new version moves only the name that it
    was opened by.
    """
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = number
    entry.st_mode = inode.mode
    entry.st_nlink = inode.nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    entry.st_size = inode.size_bytes
    entry.st_blksize = PAGE_BYTES
    entry.st_blocks = -(-inode.size_bytes // 512)
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    has_several_names = inode.nlink > 1 and not inode.is_directory
    entry.entry_timeout = 0.0 if has_several_names else KERNEL_CACHE_S
    entry.attr_timeout = 0.0 if is_changing else KERNEL_CACHE_S
    return entry
