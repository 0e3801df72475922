"""The kernel, its pages, and how many files it lets a node open."""

import resource

from kvfs.config import PAGE_BYTES
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.software import parse_version

PASSTHROUGH_KERNEL = (6, 9)
NOFILE_GOOD = 65_536
NOFILE_MIN = 1024


def check_kernel(release: str) -> Finding:
    """Linux, and whether it can serve reads without the daemon."""
    if parse_version(release)[:2] >= PASSTHROUGH_KERNEL:
        return Finding("kernel", Level.OK, f"{release}, can do FUSE passthrough")
    return Finding(
        "kernel",
        Level.WARN,
        f"{release}, without FUSE passthrough",
        "reads through the mount come from Python; several times faster are Linux 6.9 or later and,"
        " within limits, `-o symlink` (docs/mount.md)",
    )


def check_page_size(page_bytes: int) -> Finding:
    """The size that direct I/O aligns to."""
    if page_bytes == PAGE_BYTES:
        return Finding("page size", Level.OK, f"{page_bytes} bytes")
    return Finding(
        "page size",
        Level.WARN,
        f"{page_bytes} bytes",
        f"chunk payloads are aligned to {PAGE_BYTES}: direct I/O may fall back to the page cache",
    )


def check_open_files(limits: tuple[int, int]) -> Finding:
    """How many descriptors a node may hand out; it raises its soft limit to the hard one."""
    hard = limits[1]
    if hard == resource.RLIM_INFINITY or hard >= NOFILE_GOOD:
        return Finding("open files", Level.OK, "no limit" if hard < 0 else f"up to {hard:,}")
    level = Level.WARN if hard >= NOFILE_MIN else Level.FAIL
    advice = f"raise the hard limit (`ulimit -Hn`, LimitNOFILE=) to {NOFILE_GOOD}"
    return Finding("open files", level, f"at most {hard:,}", advice)
