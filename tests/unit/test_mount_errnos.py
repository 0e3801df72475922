"""Every error has one errno."""

import errno

import pytest

from kvfs.errors import Corrupt, InvalidInput, KvfsError, NamespaceError, OutOfSpace, Unavailable
from mount.errnos import ERRNOS, errno_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NamespaceError(errno.ENOTEMPTY, b"x"), errno.ENOTEMPTY),
        (OutOfSpace("full"), errno.ENOSPC),
        (Corrupt("x", "bad"), errno.EIO),
        (InvalidInput("x", "bad"), errno.EINVAL),
        (Unavailable("gone"), errno.EIO),
        (KvfsError("other"), errno.EIO),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "quota"), errno.ENOSPC),
        (OSError(errno.EMFILE, "files"), errno.ENFILE),
        (FileNotFoundError(errno.ENOENT, "none"), errno.ENOENT),
        (OSError("no number"), errno.EIO),
    ],
)
def test_errnos(error: Exception, code: int) -> None:
    assert errno_of(error) == code


def test_every_kind_of_error_has_a_row() -> None:
    rows = {kind for kind, _ in ERRNOS}
    kinds = {kind for kind in KvfsError.__subclasses__() if kind.__module__ == "kvfs.errors"}
    assert kinds == rows | {NamespaceError}
