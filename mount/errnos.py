"""The one table from errors to the errno that a system call shows."""

import errno

from kvfs.errors import (
    Corrupt,
    InvalidInput,
    KvfsError,
    NamespaceError,
    OutOfSpace,
    QueueFull,
    Unavailable,
)

ERRNOS: tuple[tuple[type[KvfsError], int], ...] = (
    (OutOfSpace, errno.ENOSPC),
    (Corrupt, errno.EIO),
    (InvalidInput, errno.EINVAL),
    (Unavailable, errno.EIO),
    (QueueFull, errno.EIO),
)

# What a full disk, quota or descriptor table of ours looks like to somebody else.
FOREIGN = {errno.EDQUOT: errno.ENOSPC, errno.EMFILE: errno.ENFILE}


def errno_of(error: Exception) -> int:
    """The errno for an error that a request met; EIO for what no row names."""
    if isinstance(error, NamespaceError):
        return error.code
    if isinstance(error, OSError):
        code = error.errno or errno.EIO
        return FOREIGN.get(code, code)
    for kind, code in ERRNOS:
        if isinstance(error, kind):
            return code
    return errno.EIO
