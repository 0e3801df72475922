"""The kernel's control files of a FUSE connection, where `fusectl` is mounted or can be.

What is written to `abort` ends a connection: requests that wait for an answer fail, and so does
whatever waits for them.
"""

import ctypes
import os
from pathlib import Path

_CONNECTIONS = Path("/sys/fs/fuse/connections")

# fsopen(2) and its kin, Linux 5.2, by numbers that all architectures share: libc has them lately.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1  # for either
_CMD_CREATE = 6


def open_abort(device: str) -> int | None:
    """A descriptor to write to, which ends the connection behind a mount, and never another one
    that gets its number; None when it is not ours to have. `device`: its `major:minor`."""
    minor = device.rpartition(":")[2]
    try:
        return os.open(_CONNECTIONS / minor / "abort", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        pass  # mostly it is just not mounted
    try:
        directory = _mount_nowhere()
    except OSError:
        return None
    try:
        return os.open(f"{minor}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    finally:
        os.close(directory)


def _mount_nowhere() -> int:
    """A descriptor of `fusectl`, mounted at no place. Raises OSError."""
    context = _call(_FSOPEN, b"fusectl", _CLOEXEC)
    try:
        _call(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def _call(number: int, *arguments: int | bytes | None) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
