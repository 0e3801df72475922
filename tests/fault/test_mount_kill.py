"""kill -9 of the mount's process, bad bytes and full stores, as users of the mount see them."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mount.point import find_mounts
from tests.conftest import StartMount
from tests.mounts import is_mounted
from tests.processes import wait_until

MIB = 1024 * 1024


def entries_at(mountpoint: Path) -> int:
    return sum(entry.mountpoint == mountpoint for entry in find_mounts())


class Load(threading.Thread):
    """Writes files by every pattern until the mount dies; notes what was closed, with its hash."""

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__()
        self.closed: dict[str, str] = {}
        self._directory = directory
        self._number = number

    def run(self) -> None:
        turn = 0
        try:
            while True:
                self._write(turn)
                turn += 1
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO), error

    def _write(self, turn: int) -> None:
        data = os.urandom(300_000 + turn % 7 * 100_000)
        name = f"{self._number}-{turn}"
        target = self._directory / name
        written = target.with_suffix(".tmp") if turn % 2 else target
        with open(written, "wb", buffering=0) as file:
            for start in range(0, len(data), 128 * 1024):
                file.write(data[start : start + 128 * 1024])
        if turn % 2:
            os.rename(written, target)
        self.closed[name] = hashlib.sha256(data).hexdigest()
        if turn % 5 == 4:
            old = f"{self._number}-{turn - 3}"
            del self.closed[old]  # killed half-way it may be there or not
            os.unlink(self._directory / old)


def test_kill_under_load_then_mount_again(start_mount: StartMount) -> None:
    mount = start_mount()
    directory = mount.mountpoint / "load"
    directory.mkdir()
    (directory / "first").write_bytes(b"first")
    loads = [Load(directory, number) for number in range(3)]
    for load in loads:
        load.start()
    wait_until(lambda: sum(len(load.closed) for load in loads) > 40, 60)
    mount.kill()
    for load in loads:
        load.join(30)
        assert not load.is_alive()
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
        os.listdir(directory)
    assert entries_at(mount.mountpoint) == 1

    again = start_mount()
    assert entries_at(again.mountpoint) == 1
    assert (directory / "first").read_bytes() == b"first"
    closed = {name: digest for load in loads for name, digest in load.closed.items()}
    for name, digest in closed.items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest, name
    lengths = {300_000 + turn * 100_000 for turn in range(7)}
    for name in set(os.listdir(directory)) - closed.keys() - {"first"}:
        assert (directory / name).stat().st_size in lengths, f"{name} is partial"
    assert not any((again.store / "staging").iterdir())
    assert again.stop() == 0
    assert not is_mounted(again.mountpoint)


def test_kill_while_files_are_open(start_mount: StartMount) -> None:
    mount = start_mount()
    (mount.mountpoint / "a").write_bytes(b"old")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    replaced = os.open(mount.mountpoint / "a", flags)
    os.write(replaced, b"new, and never cl")
    fresh = os.open(mount.mountpoint / "b", flags)
    os.write(fresh, b"never closed")
    mount.kill()
    for fd in (replaced, fresh):
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
            os.close(fd)
    start_mount()
    assert (mount.mountpoint / "a").read_bytes() == b"old"
    assert sorted(os.listdir(mount.mountpoint)) == [".kvfs", "a"]


def test_a_dead_mount_in_which_someone_works_is_replaced(start_mount: StartMount) -> None:
    mount = start_mount()
    (mount.mountpoint / "d").mkdir()
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('in', flush=True); sys.stdin.read()"],
        cwd=mount.mountpoint / "d",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"in\n"
    mount.kill()
    again = start_mount()
    assert entries_at(again.mountpoint) == 1
    (again.mountpoint / "d" / "a").write_bytes(b"data")
    worker.communicate()


def test_a_hanging_mount_is_an_error_and_can_be_taken_away(
    start_mount: StartMount, tmp_path: Path
) -> None:
    import signal

    mount = start_mount(allow="the event loop was held")  # which a watch can't tell from this
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        words = ["mount", mount.mountpoint, "--store", tmp_path / "other"]
        begin_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "kvfs", *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert f"does not answer (process {mount.pid}, which is stopped" in done.stderr
        assert time.monotonic() - begin_s < 30
        words = ["umount", mount.mountpoint, "--lazy"]
        subprocess.run([sys.executable, "-m", "kvfs", *words], check=True, timeout=60)
        assert not is_mounted(mount.mountpoint)
    finally:
        os.kill(mount.pid, signal.SIGCONT)


def blobs_of(store: Path) -> list[Path]:
    return [path for path in (store / "blobs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("passthrough", [True, False])
def test_a_byte_that_is_flipped_past_the_mount_is_seen_at_the_next_open(
    start_mount: StartMount, passthrough: bool
) -> None:
    """Also of a file that this node has stored, and read, since it started."""
    mount = start_mount(
        config=f"[mount]\npassthrough = {str(passthrough).lower()}\n", allow="quarantined|open: "
    )
    path = mount.mountpoint / "f"
    path.write_bytes(bytes(range(256)) * 64)
    assert path.read_bytes() == bytes(range(256)) * 64
    [blob] = blobs_of(mount.store)
    os.chmod(blob, 0o600)
    with open(blob, "r+b") as file:
        file.seek(5000)
        file.write(b"x")
    with pytest.raises(OSError) as refused:
        path.read_bytes()
    assert refused.value.errno == errno.EIO
    wait_until(lambda: not path.exists())
    assert len(list((mount.store / "quarantine").iterdir())) == 1


def test_a_flipped_byte_is_eio_once_and_then_a_miss(start_mount: StartMount) -> None:
    mount = start_mount()
    (mount.mountpoint / "a").write_bytes(os.urandom(MIB))
    (mount.mountpoint / "good").write_bytes(b"good")
    mount.stop()
    bad = max(blobs_of(mount.store), key=lambda path: path.stat().st_size)
    os.chmod(bad, 0o600)
    with open(bad, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    mount = start_mount(allow="quarantined|open: ")
    with pytest.raises(OSError, check=lambda error: error.errno == errno.EIO):
        (mount.mountpoint / "a").read_bytes()
    wait_until(lambda: not (mount.mountpoint / "a").exists())
    assert (mount.mountpoint / "good").read_bytes() == b"good"
    assert len(list((mount.store / "quarantine").iterdir())) == 1
    (mount.mountpoint / "a").write_bytes(b"written again")
    assert (mount.mountpoint / "a").read_bytes() == b"written again"


@pytest.mark.parametrize("harm", ["truncated", "empty", "missing"])
def test_a_blob_that_was_harmed_while_nobody_looked(start_mount: StartMount, harm: str) -> None:
    mount = start_mount()
    (mount.mountpoint / "a").write_bytes(os.urandom(MIB))
    mount.stop()
    (blob,) = blobs_of(mount.store)
    if harm == "missing":
        blob.unlink()
    else:
        os.truncate(blob, 0 if harm == "empty" else 5000)
    mount = start_mount(allow="quarantined|open: |lost its file|wrong length")
    with pytest.raises(OSError, check=lambda error: error.errno in (errno.EIO, errno.ENOENT)):
        (mount.mountpoint / "a").read_bytes()
    wait_until(lambda: not (mount.mountpoint / "a").exists())


def test_a_full_store_says_so_at_write(start_mount: StartMount) -> None:
    mount = start_mount(config='max_bytes = "16MiB"\n')
    with open(mount.mountpoint / "a", "wb", buffering=0) as file:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
            for _ in range(64):
                file.write(bytes(MIB))
        written = file.tell()
        assert 4 * MIB < written < 16 * MIB
    assert os.stat(mount.mountpoint / "a").st_size == written
    assert (mount.mountpoint / "a").read_bytes() == bytes(written)
    os.unlink(mount.mountpoint / "a")
    (mount.mountpoint / "b").write_bytes(bytes(4 * MIB))


def test_a_full_store_makes_room_by_evicting(start_mount: StartMount) -> None:
    mount = start_mount(config='max_bytes = "24MiB"\n')
    for number in range(20):
        (mount.mountpoint / f"f{number}").write_bytes(os.urandom(4 * MIB))
    left = sorted(os.listdir(mount.mountpoint))
    assert "f19" in left
    assert "f0" not in left
    assert sum(path.stat().st_size for path in blobs_of(mount.store)) <= 24 * MIB
    for name in left:
        if name != ".kvfs":
            assert len((mount.mountpoint / name).read_bytes()) == 4 * MIB


def test_open_files_are_not_evicted(start_mount: StartMount) -> None:
    mount = start_mount(config='max_bytes = "24MiB"\n')
    data = os.urandom(4 * MIB)
    (mount.mountpoint / "kept").write_bytes(data)
    with open(mount.mountpoint / "kept", "rb") as reader:
        for number in range(12):
            (mount.mountpoint / f"f{number}").write_bytes(os.urandom(3 * MIB))
        assert (mount.mountpoint / "kept").exists()
        assert reader.read() == data


def test_what_was_just_removed_makes_room_at_once(start_mount: StartMount) -> None:
    mount = start_mount(config='max_bytes = "24MiB"\n')
    for number in range(4):
        file = mount.mountpoint / f"f{number}"
        file.write_bytes(os.urandom(16 * MIB))
        place = os.open(file, os.O_PATH)  # the kernel remembers the inode, so the file lingers
        try:
            file.unlink()
            data = os.urandom(16 * MIB)
            (mount.mountpoint / "next").write_bytes(data)
        finally:
            os.close(place)
        assert (mount.mountpoint / "next").read_bytes() == data
        (mount.mountpoint / "next").unlink()
