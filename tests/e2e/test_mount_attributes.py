"""What POSIX users expect of a mount's attributes, and what tools that copy files make of it."""

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.e2e.calls import fails_with


def test_modes_owners_and_times(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.chmod(place / "a", 0o604)
    assert stat.S_IMODE(os.stat(place / "a").st_mode) == 0o604
    if os.geteuid() == 0:
        os.chown(place / "a", 1234, 4321)
        assert (os.stat(place / "a").st_uid, os.stat(place / "a").st_gid) == (1234, 4321)
    os.utime(place / "a", ns=(123_456_789_012_345_678, 987_654_321_098_765_432))
    status = os.stat(place / "a")
    assert status.st_atime_ns == 123_456_789_012_345_678
    assert status.st_mtime_ns == 987_654_321_098_765_432
    assert (place / "a").read_bytes() == b"data"
    assert status.st_blocks == 1


def test_a_time_set_before_close_stays(place: Path) -> None:
    with open(place / "a", "wb") as file:
        file.write(b"data")
        file.flush()
        os.utime(file.fileno(), ns=(5_000_000_001, 6_000_000_001))
    assert os.stat(place / "a").st_mtime_ns == 6_000_000_001


def test_writing_moves_the_time_on(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.utime(place / "a", ns=(1, 1))
    with open(place / "a", "ab") as file:
        file.write(b"more")
    assert os.stat(place / "a").st_mtime_ns > 10**18
    assert os.stat(place / "a").st_size == 8


def test_copies_keep_times(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.utime(place / "a", ns=(7_000_000_000, 8_000_000_000))
    subprocess.run(["cp", "-p", place / "a", place / "b"], check=True)
    assert os.stat(place / "b").st_mtime_ns == 8_000_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's place")
def test_statfs(place: Path) -> None:
    room = os.statvfs(place)
    assert room.f_bsize == room.f_frsize == 4096
    assert room.f_namemax == 255
    assert 0 < room.f_bavail <= room.f_bfree <= room.f_blocks
    assert 0 < room.f_ffree <= room.f_files


def test_extended_attributes_are_refused(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    with fails_with(errno.EOPNOTSUPP):
        os.setxattr(place / "a", "user.x", b"1")
    with fails_with(errno.EOPNOTSUPP):
        os.getxattr(place / "a", "user.x")


def test_locks(place: Path) -> None:
    import fcntl

    with open(place / "a", "wb") as first, open(place / "a", "wb") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(first, fcntl.LOCK_EX)


def test_tar_rsync_like_tools_and_removal(place: Path) -> None:
    source = Path(__file__).parent.parent
    subprocess.run(["cp", "-a", source, place / "copy"], check=True)
    subprocess.run(["diff", "-r", source, place / "copy"], check=True)
    subprocess.run(["tar", "-cf", place / "t.tar", "-C", place, "copy"], check=True)
    (place / "out").mkdir()
    subprocess.run(["tar", "-xf", place / "t.tar", "-C", place / "out"], check=True)
    subprocess.run(["diff", "-r", source, place / "out" / "copy"], check=True)
    subprocess.run(["rm", "-rf", *place.iterdir()], check=True)
    assert os.listdir(place) == []
