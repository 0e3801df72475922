"""Memory as a benchmark is to find it: without file contents, or with pages that are there."""

import mmap
import os
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 does not name it


def drop_page_cache() -> bool:
    """Make the kernel forget file contents; False without the right to do so."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def warm_memory(size_bytes: int) -> None:
    """Have memory free that is really there, for whoever writes so much next: twice that, for
    others take some of it meanwhile.

    The host of a virtual machine may take back what is free for a moment (free page reporting).
    Who gets it first waits for the host at each page: files are written at a tenth of the speed.
    """
    with mmap.mmap(-1, 2 * size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)  # freed in pieces that are given out again first
        room.madvise(_MADV_POPULATE_WRITE)
