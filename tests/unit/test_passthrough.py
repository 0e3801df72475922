"""How an open inode is served: each transition of the table in `mount.passthrough`."""

import errno
import os
import struct
import tempfile
from collections.abc import Iterator

import pytest

pytest.importorskip("pyfuse3", reason="mount.passthrough is pyfuse3's")

from mount.passthrough import (
    BACKING_CLOSE,
    BACKING_OPEN,
    BackingIds,
    explain_refusal,
    has_capability,
    judge_before_mount,
)

SESSION_FD = 77


class Kernel:
    """The two ioctls, as the kernel answers them."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.last_id = 0
        self.refusal = 0

    def ioctl(self, fd: int, request: int, argument: bytearray) -> int:
        assert fd == SESSION_FD
        if request == BACKING_OPEN:
            if self.refusal:
                raise OSError(self.refusal, os.strerror(self.refusal))
            backing_fd, flags, padding = struct.unpack("=iIQ", argument)
            os.fstat(backing_fd)
            assert (flags, padding) == (0, 0)
            self.last_id += 1
            self.live.add(self.last_id)
            return self.last_id
        assert request == BACKING_CLOSE
        self.live.remove(struct.unpack("=I", argument)[0])
        return 0


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def ids(kernel: Kernel) -> BackingIds:
    return BackingIds(SESSION_FD, None, kernel.ioctl)


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def test_ioctl_numbers_are_those_of_linux_fuse_h() -> None:
    def write_of(number: int, size_bytes: int) -> int:  # the kernel's _IOW with the magic 229
        return 1 << 30 | size_bytes << 16 | 229 << 8 | number

    assert write_of(1, struct.calcsize("=iIQ")) == BACKING_OPEN
    assert write_of(2, struct.calcsize("=I")) == BACKING_CLOSE


def test_opens_of_an_inode_share_one_id_until_the_last_release(
    kernel: Kernel, ids: BackingIds, fd: int
) -> None:
    first = ids.enter(5, fd)
    assert first > 0
    assert ids.enter(5, fd) == first
    assert ids.enter(5, None) == first
    ids.leave(5)
    ids.leave(5)
    assert kernel.live == {first}
    assert ids.is_passthrough(5)
    ids.leave(5)
    assert kernel.live == set()
    assert not ids.is_passthrough(5)
    assert ids.enter(5, fd) not in (0, first)


def test_two_inodes_have_two_ids_even_of_one_file(ids: BackingIds, fd: int) -> None:
    assert ids.enter(5, fd) != ids.enter(6, fd)
    assert ids.count() == (2, 0)


def test_a_file_that_is_fetched_stays_with_python_until_its_last_release(
    kernel: Kernel, ids: BackingIds, fd: int
) -> None:
    assert ids.enter(5, None) == 0
    assert ids.enter(5, fd) == 0, "the kernel would answer EIO"
    assert ids.count() == (0, 1)
    ids.leave(5)
    assert ids.enter(5, fd) == 0
    ids.leave(5)
    ids.leave(5)
    assert kernel.last_id == 0
    assert ids.enter(5, fd) > 0
    assert ids.why_not is None


def test_refusals_serve_from_python_and_say_why(kernel: Kernel, ids: BackingIds, fd: int) -> None:
    kernel.refusal = errno.ELOOP
    assert ids.enter(5, fd) == 0
    assert ids.why_not is not None
    assert "overlayfs" in ids.why_not
    kernel.refusal = 0
    assert ids.enter(5, fd) == 0, "it is open from Python"
    assert ids.enter(6, fd) > 0, "another one may lie on another disk"


def test_an_obstacle_keeps_every_open_in_python(kernel: Kernel, fd: int) -> None:
    ids = BackingIds(SESSION_FD, "because", kernel.ioctl)
    assert ids.enter(5, fd) == 0
    assert kernel.last_id == 0
    assert ids.why_not == "because"


def test_other_bytes_under_an_open_number_are_our_bug(ids: BackingIds, fd: int) -> None:
    ids.enter(5, fd)
    with (
        tempfile.TemporaryFile() as other,
        pytest.raises(AssertionError, match="one run of bytes"),
    ):
        ids.enter(5, other.fileno())
    ids.leave(5)
    assert ids.count() == (0, 0), "the open that failed is not counted"


def test_closing_gives_every_id_back(kernel: Kernel, ids: BackingIds, fd: int) -> None:
    ids.enter(5, fd)
    ids.enter(6, fd)
    ids.enter(7, None)
    ids.close()
    assert kernel.live == set()
    assert ids.count() == (0, 0)


def test_obstacles_are_told_in_the_order_in_which_they_can_be_removed() -> None:
    admin = f"Name:\tx\nCapEff:\t{1 << 21:016x}\n"
    nobody = "Name:\tx\nCapEff:\t0000000000000000\n"
    assert judge_before_mount(is_patched=True, status=admin) is None
    assert "scripts/setup" in (judge_before_mount(is_patched=False, status=nobody) or "")
    assert "CAP_SYS_ADMIN" in (judge_before_mount(is_patched=True, status=nobody) or "")


def test_a_capability_is_one_bit_of_the_effective_set() -> None:
    status = f"CapPrm:\t{1 << 21:016x}\nCapEff:\t{1 << 20 | 1 << 22:016x}\n"
    assert not has_capability(status, 21)
    assert has_capability(status, 22)
    assert not has_capability("", 21)


def test_unknown_refusals_keep_the_systems_words() -> None:
    assert "too many" in explain_refusal(OSError(errno.ENFILE, "too many"))
    assert "user namespace" in explain_refusal(OSError(errno.EPERM, "x"))
