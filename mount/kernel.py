"""What this kernel can do, where only its version says so, and what it leaves to the mount of an
open, by its flags."""

import os
import re


def kernel_version(release: str | None = None) -> tuple[int, int]:
    """Major and minor number of a release, this kernel's by default; (0, 0) if it has none."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release if release is None else release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# A write that goes past the page cache drops the pages of it that other opens have there.
DIRECT_WRITES_ARE_SEEN = kernel_version() >= (6, 6)


def writes_direct(flags: int, *, is_root: bool, is_backed: bool) -> bool:
    """Whether the writes of an open come to the mount, past the kernel's page cache.

    Of a file that the kernel serves from a backing file, those of an open with O_DIRECT: the
    backing file has that flag as long as it is open, also when fcntl takes it off for an end that
    is not aligned, as dd does. Else all of an open that only writes, which spares a copy: such a
    file is neither read nor mapped. Others than root lose set-user-ID bits by writing, which the
    kernel sees to only where it caches."""
    if is_backed:
        return flags & os.O_DIRECT != 0 and flags & os.O_ACCMODE != os.O_RDONLY
    return DIRECT_WRITES_ARE_SEEN and is_root and flags & os.O_ACCMODE == os.O_WRONLY


def is_synchronous(flags: int) -> bool:
    """Whether each write is to be on the disk when it returns. The kernel sees to that, but for
    what it writes past its page cache."""
    return flags & (os.O_SYNC | os.O_DSYNC) != 0
