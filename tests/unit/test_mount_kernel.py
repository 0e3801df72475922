"""What a kernel's release says, and what the kernel leaves to the mount of an open."""

import os

import pytest

from mount import kernel
from mount.kernel import is_synchronous, kernel_version, writes_direct


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-fc-v782", (6, 18)),
        ("5.10.0-28-amd64", (5, 10)),
        ("6.9-rc1", (6, 9)),
        ("strange", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_a_release_has_two_numbers(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version


@pytest.mark.parametrize(
    ("flags", "is_direct", "is_direct_backed"),
    [
        (os.O_RDONLY, False, False),
        (os.O_RDONLY | os.O_DIRECT, False, False),
        (os.O_WRONLY, True, False),
        (os.O_WRONLY | os.O_DIRECT, True, True),
        (os.O_RDWR, False, False),
        (os.O_RDWR | os.O_DIRECT, False, True),
    ],
)
def test_which_writes_come_to_the_mount(
    monkeypatch: pytest.MonkeyPatch, flags: int, is_direct: bool, is_direct_backed: bool
) -> None:
    monkeypatch.setattr(kernel, "DIRECT_WRITES_ARE_SEEN", True)
    assert writes_direct(flags, is_root=True, is_backed=False) == is_direct
    assert not writes_direct(flags, is_root=False, is_backed=False)
    for is_root in (True, False):
        assert writes_direct(flags, is_root=is_root, is_backed=True) == is_direct_backed
    monkeypatch.setattr(kernel, "DIRECT_WRITES_ARE_SEEN", False)
    assert not writes_direct(flags, is_root=True, is_backed=False)


def test_which_writes_are_to_be_on_the_disk() -> None:
    assert is_synchronous(os.O_WRONLY | os.O_SYNC)
    assert is_synchronous(os.O_RDWR | os.O_DSYNC)
    assert not is_synchronous(os.O_WRONLY | os.O_DIRECT)
