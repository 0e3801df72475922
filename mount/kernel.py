"""What this kernel can do, where only its version says so."""

import os
import re


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Major and minor number of a release, this kernel's by default; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release if release is None else release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# A write that goes past the page cache drops the pages of it that other opens have there.
DIRECT_WRITES_ARE_SEEN = kernel_version() >= (6, 6)


def writes_direct(flags: int, *, is_root: bool) -> bool:
    """Whether an open goes past the kernel's page cache, which spares a copy of all that is written
    and costs who only writes nothing: such a file is neither read nor mapped. Others than root lose
    set-user-ID bits by writing, which the kernel sees to only where it caches."""
    return DIRECT_WRITES_ARE_SEEN and is_root and flags & os.O_ACCMODE == os.O_WRONLY
