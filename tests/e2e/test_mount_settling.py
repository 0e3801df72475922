"""Large files that were closed and are published a little later, on a real mount: that nobody in it
sees the difference, that others need not wait, and that a crash loses nothing. Skipped where the
kernel does not serve writes."""

import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.config import MIB
from tests.commands import kvfs, kvfs_text
from tests.e2e.written_through import LARGE, make, require_through, stored
from tests.mounts import MountProcess, describe
from tests.processes import wait_until

LATER_NS = 1_500_000_000_123_456_789


@pytest.fixture
def mounted(start_mount) -> MountProcess:  # type: ignore[no-untyped-def]  # a fixture's callable
    return require_through(start_mount())


@pytest.fixture
def place(mounted: MountProcess) -> Path:
    return mounted.mountpoint


@contextmanager
def immutable(directory: Path) -> Iterator[None]:
    """No name can be made in a directory, by nobody."""
    if subprocess.run(["chattr", "+i", directory], check=False, timeout=30).returncode:
        pytest.skip("this file system has no immutable directories")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", directory], check=True, timeout=30)


def write(path: Path, data: bytes) -> None:
    os.close(make(path, data))


def staged(mount: MountProcess) -> list[str]:
    return os.listdir(mount.store / "staging")


def wait_settled(mount: MountProcess) -> None:
    wait_until(lambda: describe(mount)["unsettled_files"] == 0)


def restart(start_mount, mount: MountProcess, allow: str | None = None) -> MountProcess:  # type: ignore[no-untyped-def]  # a fixture's callable
    """The mount again, after a kill."""
    mount.kill()
    again: MountProcess = start_mount(store=mount.store, mountpoint=mount.mountpoint, allow=allow)
    wait_until(lambda: staged(again) == [])
    return again


def test_the_mount_shows_it_before_and_after(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    write(place / "a.tmp", data)
    assert describe(mounted)["unsettled_files"] == 1
    os.rename(place / "a.tmp", place / "a")
    before = os.stat(place / "a")
    assert before.st_size == LARGE
    assert (place / "a").read_bytes() == data
    wait_settled(mounted)
    wait_until(lambda: staged(mounted) == [])
    after = os.stat(place / "a")
    for kind in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_mode", "st_nlink"):
        assert getattr(after, kind) == getattr(before, kind), kind
    assert (place / "a").read_bytes() == data
    assert stored(mounted, b"a") == data


def test_a_reader_keeps_it_open_meanwhile(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    write(place / "a", data)
    with open(place / "a", "rb", buffering=0) as file:
        assert file.read(MIB) == data[:MIB]
        wait_settled(mounted)
        assert file.read(LARGE) == data[MIB:]
        assert (place / "a").read_bytes() == data


def test_clients_of_the_node_see_it_at_once(mounted: MountProcess, place: Path) -> None:
    for _ in range(5):
        data = os.urandom(LARGE)
        write(place / "a.tmp", data)
        os.rename(place / "a.tmp", place / "a")  # over the one before
        assert stored(mounted, b"a") == data


def test_a_file_that_is_removed_leaves_nothing(mounted: MountProcess, place: Path) -> None:
    write(place / "a", os.urandom(LARGE))
    os.unlink(place / "a")
    write(place / "b", os.urandom(LARGE))
    write(place / "c", os.urandom(LARGE))
    os.rename(place / "c", place / "b")
    wait_until(lambda: len(staged(mounted)) <= 2)  # that of b, and its second name
    wait_settled(mounted)
    wait_until(lambda: staged(mounted) == [])
    assert os.listdir(place) == [".kvfs", "b"]


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR])
def test_a_writer_that_comes_back(mounted: MountProcess, place: Path, flags: int) -> None:
    data = os.urandom(LARGE)
    write(place / "a", data)
    fd = os.open(place / "a", flags)
    try:
        os.write(fd, b"more")
        expected = data + b"more" if flags & os.O_APPEND else b"more" + data[4:]
        assert (place / "a").read_bytes() == expected
    finally:
        os.close(fd)
    assert stored(mounted, b"a") == expected


def test_a_mapping_that_outlives_its_file(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    write(place / "a", data)
    with open(place / "a", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:4] = b"more"
    wait_until(lambda: stored(mounted, b"a") == b"more" + data[4:])
    assert (place / "a").read_bytes() == b"more" + data[4:]


def test_rewritten_cut_and_set_to_another_time(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    write(place / "a", data)
    os.truncate(place / "a", MIB)
    assert stored(mounted, b"a") == data[:MIB]
    write(place / "b", data)
    fd = os.open(place / "b", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, data[::-1])
    os.close(fd)
    os.utime(place / "b", ns=(LATER_NS, LATER_NS))
    os.chmod(place / "b", 0o640)
    assert os.stat(place / "b").st_mtime_ns == LATER_NS
    assert stored(mounted, b"b") == data[::-1]
    status = os.stat(place / "b")
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (LATER_NS, 0o640)


def test_a_client_sees_what_one_of_two_writers_closed(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    first = make(place / "a", data)
    second = os.dup(first)
    os.close(first)
    wait_settled(mounted)  # though the other one is there
    assert stored(mounted, b"a") == data
    os.pwrite(second, b"more", LARGE)
    os.close(second)
    assert stored(mounted, b"a") == data + b"more"


def test_a_kill_loses_nothing_that_was_closed(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount())
    place = mount.mountpoint
    data = [os.urandom(LARGE) for _ in range(6)]
    write(place / "old", data[0])
    wait_settled(mount)
    write(place / "gone", data[1])
    os.unlink(place / "gone")
    write(place / "renamed.tmp", data[2])
    os.rename(place / "renamed.tmp", place / "renamed")
    timed = make(place / "timed", data[3])
    os.utime(timed, ns=(LATER_NS, LATER_NS))
    os.close(timed)
    write(place / "new.tmp", data[4])
    os.rename(place / "new.tmp", place / "old")
    rewritten = os.open(place / "renamed", os.O_WRONLY | os.O_TRUNC)
    os.write(rewritten, data[5])
    os.close(rewritten)
    again = restart(start_mount, mount)
    assert os.listdir(place) == [".kvfs", "old", "renamed", "timed"]
    assert (place / "renamed").read_bytes() == data[5]
    assert (place / "timed").read_bytes() == data[3]
    assert os.stat(place / "timed").st_mtime_ns == LATER_NS
    assert (place / "old").read_bytes() == data[4]
    assert stored(again, b"old") == data[4]
    for name in ("old", "renamed", "timed"):
        os.unlink(place / name)
    restart(start_mount, again)
    assert os.listdir(place) == [".kvfs"]


def test_a_survivor_does_not_reach_what_the_next_start_publishes(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount())
    data = os.urandom(LARGE)
    first = make(mount.mountpoint / "a", data)
    second = os.dup(first)
    os.close(first)
    again = restart(start_mount, mount)
    try:
        os.pwrite(second, b"survivor", 0)
    except OSError as error:
        assert error.errno in (errno.ENOTCONN, errno.EIO, errno.ESTALE)
    assert stored(again, b"a") == data
    try:
        os.close(second)
    except OSError as error:
        assert error.errno == errno.ENOTCONN


def test_a_stop_publishes(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount())
    data = [os.urandom(LARGE) for _ in range(8)]
    for number, content in enumerate(data):
        write(mount.mountpoint / f"{number}", content)
    mount.stop()
    assert staged(mount) == []
    again = start_mount(store=mount.store, mountpoint=mount.mountpoint)
    for number, content in enumerate(data):
        assert (again.mountpoint / f"{number}").read_bytes() == content


def test_with_fsync_a_close_publishes_itself(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount(config="fsync = true\n"))
    write(mount.mountpoint / "a", os.urandom(LARGE))
    assert describe(mount)["unsettled_files"] == 0


@pytest.mark.parametrize("seconds", [-631_152_000, 16_725_225_600])  # 1950 and 2500
def test_a_time_that_is_far_away(start_mount, seconds: int) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount())
    data = os.urandom(LARGE)
    fd = make(mount.mountpoint / "a", data)
    os.utime(fd, (seconds, seconds))
    os.close(fd)
    shown = os.stat(mount.mountpoint / "a").st_mtime_ns
    again = restart(start_mount, mount)
    assert stored(again, b"a") == data
    assert os.stat(mount.mountpoint / "a").st_mtime_ns == shown


def test_a_file_that_is_cut_while_it_is_closed(mounted: MountProcess, place: Path) -> None:
    for _ in range(200):
        fd = make(place / "a", b"x" * LARGE)
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(os.truncate, place / "a", MIB)
            os.close(fd)
            cut.result()
        assert os.stat(place / "a").st_size in (MIB, LARGE)
    assert len(stored(mounted, b"a")) in (MIB, LARGE)


def test_links_show_as_soon_as_a_file_is_closed(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount(config="[mount]\nsymlink = true\n"))
    write(mount.mountpoint / "a", os.urandom(LARGE))
    assert (mount.mountpoint / "a").is_symlink()


def test_what_cannot_be_stored_yet_is_said(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount(allow="inode 3 cannot be published yet"))
    data = os.urandom(LARGE)
    with immutable(mount.store / "blobs"):
        write(mount.mountpoint / "a", data)
        wait_until(lambda: describe(mount)["unsettled_why"] is not None)
        assert (mount.mountpoint / "a").read_bytes() == data
        said = kvfs_text("status", store=mount.store)
        assert "1 closed file (3 MiB) not stored yet, bytes only in the mount: " in said
        metrics = (mount.mountpoint / ".kvfs" / "metrics").read_text()
        assert "kvfs_mount_unsettled_files 1\n" in metrics
        examined = kvfs("doctor", store=mount.store)
        assert examined.returncode == 1
        assert "1 closed file cannot be stored yet: " in examined.stdout
    wait_until(lambda: stored(mount, b"a") == data)
    assert describe(mount)["unsettled_why"] is None
