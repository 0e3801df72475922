"""System calls as tests make them: what Python has no word for, and how one fails."""

import ctypes
import os

import pytest

_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def rename_with(old: str | os.PathLike[str], new: str | os.PathLike[str], flags: int) -> None:
    """renameat2(2)."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def fails_with(code: int) -> "pytest.RaisesExc[OSError]":
    """A block that raises an OSError of this errno."""
    return pytest.raises(OSError, check=lambda error: error.errno == code)
