"""A mount whose process was killed is mounted again, at once, twice, and with people inside: one
mount entry, every closed file whole."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.errors import Unavailable
from tests.commands import kvfs
from tests.conftest import StartMount
from tests.mounts import MountProcess, entries_at, is_mounted
from tests.processes import is_gone, pid_of, wait_until


@contextmanager
def somebody_inside(directory: Path) -> Iterator[None]:
    """A process that works in a directory."""
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('in', flush=True); sys.stdin.read()"],
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"in\n"
    try:
        yield
    finally:
        worker.communicate()


def test_killed_and_mounted_at_once_again_and_again(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ends = threading.Event()

    def ask() -> None:  # so that questions are under way whenever the process dies
        while not ends.is_set():
            try:
                os.statvfs(where)
            except OSError:
                time.sleep(0.001)

    assert kvfs("mount", where, "--store", store).returncode == 0
    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for turn in range(4):
            (where / f"f{turn}").write_bytes(b"%d" % turn)
            os.kill(pid_of(store), signal.SIGKILL)
            done = kvfs("mount", where, "--store", store)
            assert (done.returncode, done.stderr) == (0, "")
            assert entries_at(where) == 1
    finally:
        ends.set()
        for thread in asking:
            thread.join()
    assert [(where / f"f{turn}").read_bytes() for turn in range(4)] == [b"0", b"1", b"2", b"3"]
    assert kvfs("umount", where).returncode == 0
    assert entries_at(where) == 0


def test_killed_while_it_starts(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    chance = random.Random(7)
    words = [sys.executable, "-m", "kvfs", "mount", "--foreground", where, "--store", store]
    assert kvfs("mount", where, "--store", store).returncode == 0
    (where / "a").write_bytes(b"data")
    os.kill(pid_of(store), signal.SIGKILL)
    for _ in range(6):
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.1, 1.0))
        process.kill()
        process.wait()
        assert entries_at(where) <= 1
    done = kvfs("mount", where, "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert entries_at(where) == 1
    assert (where / "a").read_bytes() == b"data"


def test_killed_twice_with_somebody_inside(start_mount: StartMount) -> None:
    mount = start_mount()
    (mount.mountpoint / "d").mkdir()
    (mount.mountpoint / "d" / "a").write_bytes(b"data")
    with somebody_inside(mount.mountpoint / "d"):
        mount.kill()
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
            os.listdir(mount.mountpoint)
        mount = start_mount()
        with somebody_inside(mount.mountpoint / "d"):
            mount.kill()
            mount = start_mount()
            assert entries_at(mount.mountpoint) == 1
            assert (mount.mountpoint / "d" / "a").read_bytes() == b"data"
    assert mount.stop() == 0
    assert not is_mounted(mount.mountpoint)


def test_a_dead_mount_behind_a_link(start_mount: StartMount, tmp_path: Path) -> None:
    mount = start_mount()
    link = tmp_path / "link"
    link.symlink_to(mount.mountpoint)
    mount.kill()
    done = kvfs("mount", link, "--store", mount.store)
    assert (done.returncode, done.stderr) == (0, "")
    assert entries_at(mount.mountpoint) == 1
    assert kvfs("umount", link).returncode == 0
    assert entries_at(mount.mountpoint) == 0


def test_descriptors_of_a_dead_mount_do_not_disturb_the_next(start_mount: StartMount) -> None:
    mount = start_mount()
    (mount.mountpoint / "a").write_bytes(b"data")
    before = [os.open(mount.mountpoint / "a", os.O_RDONLY) for _ in range(50)]
    folder = os.open(mount.mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    mount.kill()
    mount = start_mount()
    assert entries_at(mount.mountpoint) == 1
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
        os.statvfs(folder)
    (mount.mountpoint / "a").write_bytes(b"new")
    os.close(folder)
    for fd in before:
        with contextlib.suppress(OSError):  # a stock pyfuse3 still asks who has gone
            os.close(fd)
    assert (mount.mountpoint / "a").read_bytes() == b"new"
    assert mount.stop() == 0


def test_a_dead_mount_of_another_store(start_mount: StartMount, tmp_path: Path) -> None:
    mount = start_mount()
    (mount.mountpoint / "a").write_bytes(b"data")
    mount.kill()
    other = start_mount(tmp_path / "other", mountpoint=mount.mountpoint)
    assert entries_at(mount.mountpoint) == 1
    assert sorted(os.listdir(other.mountpoint)) == [".kvfs"]
    again = start_mount(mountpoint=tmp_path / "elsewhere")
    assert (again.mountpoint / "a").read_bytes() == b"data"


@contextmanager
def _killed_under_an_engine(mount: MountProcess) -> Iterator[tuple[Client, int]]:
    """Kill a mount that an engine uses: the engine, and the node that it has started instead."""
    (mount.mountpoint / "a").write_bytes(b"data")
    with Client(mount.store, start=True) as engine:
        assert engine.lookup([b"a"]) == [4]
        mount.kill()
        wait_until(lambda: _finds(engine))
        yield engine, pid_of(mount.store)


def test_an_engine_that_was_faster_makes_way(start_mount: StartMount) -> None:
    mount = start_mount()
    with _killed_under_an_engine(mount) as (engine, spare):
        assert spare != mount.pid
        mount = start_mount()
        wait_until(lambda: is_gone(spare))
        wait_until(lambda: _finds(engine))
        assert pid_of(mount.store) == mount.pid
    assert entries_at(mount.mountpoint) == 1
    assert (mount.mountpoint / "a").read_bytes() == b"data"


def test_umount_of_a_dead_mount_leaves_who_has_its_store(start_mount: StartMount) -> None:
    mount = start_mount()
    with _killed_under_an_engine(mount) as (engine, spare):
        done = kvfs("umount", mount.mountpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert entries_at(mount.mountpoint) == 0
        assert pid_of(mount.store) == spare
        assert engine.lookup([b"a"]) == [4]


def _finds(engine: Client) -> bool:
    try:
        return engine.lookup([b"a"]) == [4]
    except Unavailable:
        return False
