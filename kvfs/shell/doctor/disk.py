"""The disk under a store: its file system, its room, and what it does with one page."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvfs.config import GIB, PAGE_BYTES
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.render import size_text

FREE_GOOD_BYTES = 10 * GIB
CLOCK_EARLIEST_S = 1_735_689_600  # 2025-01-01: a machine that believes less has no clock
CLOCK_SKEW_MAX_S = 5.0
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "lustre", "ceph", "gpfs"}


def check_file_system(kind: str) -> Finding:
    """Whether a file system suits a local directory."""
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        advice = "a local NVMe file system (ext4, xfs) is what a node's own directory is for"
        return Finding("file system", Level.WARN, kind, advice)
    if kind == "tmpfs":
        return Finding("file system", Level.OK, "tmpfs: in memory, gone after a restart")
    return Finding("file system", Level.OK, kind)


def check_room(store: Path) -> Finding:
    """Free space, as a node that starts now would find it."""
    status = os.statvfs(store)
    free_bytes = status.f_bavail * status.f_frsize
    found = f"{size_text(free_bytes)} free of {size_text(status.f_blocks * status.f_frsize)}"
    if free_bytes >= FREE_GOOD_BYTES:
        return Finding("free space", Level.OK, found)
    return Finding("free space", Level.WARN, found, "a KV cache is useful from tens of GiB on")


def check_scratch_file(store: Path) -> Iterator[Finding]:
    """Writing, direct I/O and the clock, on one page in a file without a name."""
    try:
        with tempfile.TemporaryFile(dir=store) as scratch:
            scratch.write(bytes(PAGE_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            skew_s = os.fstat(scratch.fileno()).st_mtime - time.time()
            is_direct = _reads_directly(scratch.fileno())
    except OSError as error:
        advice = "repair the disk, make room, or choose another directory with --store"
        yield Finding("writing", Level.FAIL, f"{store}: {error.strerror}", advice)
        return
    yield Finding("writing", Level.OK, "works")
    if is_direct:
        yield Finding("direct I/O", Level.OK, "works")
    else:
        advice = "reads and writes go through the page cache, at the price of a copy"
        yield Finding("direct I/O", Level.WARN, "refused by this file system", advice)
    if abs(skew_s) <= CLOCK_SKEW_MAX_S and time.time() >= CLOCK_EARLIEST_S:
        yield Finding("clock", Level.OK, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    else:
        found = f"{time.strftime('%Y-%m-%d', time.gmtime())}, files are {skew_s:+.0f} s off"
        yield Finding("clock", Level.WARN, found, "set the clock: ages and eviction follow it")


def _reads_directly(fd: int) -> bool:
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.preadv(direct, [page], 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(direct)
