"""Writes that the kernel serves by itself, on a real mount: what closes publish, whoever writes on
after them, and what a crash leaves. Skipped where it cannot."""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from tests.e2e.written_through import LARGE, SMALL, make, require_through, stored
from tests.mounts import MountProcess, describe
from tests.processes import allocated_bytes, wait_until

# From linux/fs.h and linux/fiemap.h.
_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP = struct.Struct("=QQ4I")
_FIEMAP_EXTENT = struct.Struct("=5Q4I")
_EXTENT_DELAYED = 4


@pytest.fixture
def mounted(start_mount) -> MountProcess:  # type: ignore[no-untyped-def]  # a fixture's callable
    return require_through(start_mount(allow="cannot be published: File too large"))


@pytest.fixture
def place(mounted: MountProcess) -> Iterator[Path]:
    yield mounted.mountpoint


@pytest.mark.parametrize("size_bytes", [0, 1, SMALL, MIB, LARGE])
def test_a_close_publishes(mounted: MountProcess, place: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    fd = make(place / "a", data)
    assert os.fstat(fd).st_size == os.stat(place / "a").st_size == size_bytes
    assert (place / "a").read_bytes() == data  # while it is written
    os.close(fd)
    assert stored(mounted, b"a") == data
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    assert (place / "a").read_bytes() == data
    wait_until(lambda: os.listdir(mounted.store / "staging") == [])


def test_files_of_other_sizes_than_the_last_ones(mounted: MountProcess, place: Path) -> None:
    """They find stages with blocks for those, and keep no more than they need."""

    def finds_blocks() -> bool:
        staged = (mounted.store / "staging").iterdir()
        with contextlib.suppress(FileNotFoundError):  # one that went meanwhile
            return any(s.st_blocks * 512 >= LARGE and s.st_size == 0 for s in map(os.stat, staged))
        return False

    files = {f"first {number}": os.urandom(LARGE) for number in range(12)}
    for name, data in files.items():
        os.close(make(place / name, data))
    wait_until(finds_blocks)
    for number, size in enumerate((LARGE // 2, LARGE // 2 + 5, 100, LARGE + 7, LARGE, MIB + 1)):
        files[f"{number}"] = os.urandom(size)
        os.close(make(place / f"{number}", files[f"{number}"]))
    os.close(make(place / "cut", os.urandom(LARGE)))
    os.truncate(place / "cut", MIB + 4097)
    fd = make(place / "sparse", b"")
    os.pwrite(fd, b"end", LARGE - 3)
    os.close(fd)
    assert (place / "sparse").read_bytes() == bytes(LARGE - 3) + b"end"
    for name, data in files.items():
        assert stored(mounted, name.encode()) == data
        assert (place / name).read_bytes() == data
    assert stored(mounted, b"sparse") == bytes(LARGE - 3) + b"end"
    with Client(mounted.store) as client:
        client.gc()
    needed_bytes = sum(map(len, files.values())) + MIB + 4097 + LARGE
    wait_until(lambda: allocated_bytes(mounted.store / "blobs") < needed_bytes * 1.05)
    wait_until(lambda: os.listdir(mounted.store / "staging") == [])


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_who_writes_after_a_close_is_published_again(
    mounted: MountProcess, place: Path, size_bytes: int
) -> None:
    data = bytearray(os.urandom(size_bytes))
    first = make(place / "a", data)
    second = os.dup(first)
    os.close(first)
    assert stored(mounted, b"a") == data
    for number in range(5):
        data[number * 100 : number * 100 + 3] = b"new"
        os.pwrite(second, b"new", number * 100)
        assert (place / "a").read_bytes() == data
        os.close(os.dup(second))
        assert stored(mounted, b"a") == data
    os.pwrite(second, b"end", 1000)
    data[1000:1003] = b"end"
    os.close(second)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    assert (place / "a").read_bytes() == data
    assert stored(mounted, b"a") == data
    with Client(mounted.store) as client:
        client.gc()
        status = client.status()
    assert (status["files"], status["blobs"]) == (2, 1)  # with the root
    assert allocated_bytes(mounted.store / "blobs") < size_bytes + 100_000


def test_equal_bytes_are_not_taken_from_a_file_that_may_change(
    mounted: MountProcess, place: Path
) -> None:
    data = os.urandom(LARGE)
    first = make(place / "a", data)
    second = os.dup(first)
    os.close(first)
    (place / "b").write_bytes(data)
    os.pwrite(second, b"changed", 0)
    assert stored(mounted, b"b") == data
    assert (place / "b").read_bytes() == data
    os.close(second)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    assert (place / "b").read_bytes() == data
    assert (place / "a").read_bytes() == b"changed" + data[7:]
    assert stored(mounted, b"a") == b"changed" + data[7:]
    assert stored(mounted, b"b") == data


def test_two_files_of_equal_bytes_that_both_may_change(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    names = ("a", "b", "c")
    writers = [make(place / name, data) for name in names]
    for fd in writers:
        os.close(os.dup(fd))
    os.pwrite(writers[1], b"changed", 0)
    os.close(os.dup(writers[1]))
    for fd in writers:
        os.close(fd)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    for name, wanted in zip(names, (data, b"changed" + data[7:], data), strict=True):
        assert (place / name).read_bytes() == wanted
        assert stored(mounted, name.encode()) == wanted
    with Client(mounted.store) as client:
        assert client.verify_all([name.encode() for name in names]) == [True] * 3


def test_bytes_that_changed_after_their_name_went_are_given_to_nobody(
    mounted: MountProcess, place: Path
) -> None:
    data = os.urandom(LARGE)
    writer = make(place / "a", data)
    os.close(os.dup(writer))
    reader = os.open(place / "a", os.O_RDONLY)
    os.unlink(place / "a")
    os.pwrite(writer, b"changed", 0)
    os.close(writer)
    assert os.pread(reader, 7, 0) == b"changed"
    (place / "b").write_bytes(data)
    assert (place / "b").read_bytes() == data
    os.close(reader)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    assert (place / "b").read_bytes() == data
    assert stored(mounted, b"b") == data


def test_what_grows_after_it_was_published_has_room_made_for_it(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = require_through(start_mount(config="max_bytes = '1200MiB'\nmin_free = 0\n"))
    for number in range(10):
        (mount.mountpoint / f"{number}").write_bytes(os.urandom(100 * MIB))
    block = os.urandom(MIB)
    fd = make(mount.mountpoint / "grows", b"x" * LARGE)
    os.close(os.dup(fd))
    for number in range(400):
        os.write(fd, number.to_bytes(2, "big") + block[2:])
    with Client(mount.store) as client:
        wait_until(lambda: client.status()["counters"]["evicted_files"] >= 2)
    os.close(fd)
    assert (mount.mountpoint / "grows").stat().st_size == LARGE + 400 * MIB


def test_many_writers_at_once(mounted: MountProcess, place: Path) -> None:
    """So many that some end while room is reserved for others."""

    def write(first: int) -> None:
        for number in range(first, first + 25):
            with open(place / f"{number}", "wb", 0) as file:
                for _ in range(4):
                    file.write(number.to_bytes(2, "big") * (MIB // 2))

    threads = [threading.Thread(target=write, args=(100 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    names = [name for name in os.listdir(place) if name != ".kvfs"]
    assert len(names) == 150
    for name in names:
        assert (place / name).read_bytes() == int(name).to_bytes(2, "big") * (2 * MIB)


def test_a_file_that_changes_is_no_damage(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(LARGE)
    first = make(place / "a", data)
    second = os.dup(first)
    os.close(first)
    os.pwrite(second, b"changed", 0)
    with Client(mounted.store) as client:
        (opened,) = client.open([b"a"])
        assert opened is not None
        opened.close()
        assert not client.report_corrupt(opened.digest)
        assert client.verify_all([b"a"]) == [True]
        assert client.status()["counters"]["corrupt_blobs"] == 0
    os.close(second)
    wait_until(lambda: stored(mounted, b"a") == b"changed" + data[7:])


def test_a_shell_writes_by_redirection(mounted: MountProcess, place: Path) -> None:
    script = "(echo one; echo two; head -c 3000000 /dev/zero; echo three) > out; cat in out > both"
    (place / "in").write_bytes(b"in\n")
    subprocess.run(["sh", "-c", script], cwd=place, check=True, timeout=60)
    wanted = b"one\ntwo\n" + bytes(3_000_000) + b"three\n"
    assert (place / "out").read_bytes() == wanted
    assert (place / "both").read_bytes() == b"in\n" + wanted
    wait_until(lambda: stored(mounted, b"out") == wanted)


def test_append_truncate_and_sync(mounted: MountProcess, place: Path) -> None:
    fd = make(place / "a", b"x" * LARGE, os.O_APPEND)
    os.ftruncate(fd, 10)
    assert os.stat(place / "a").st_size == 10
    os.write(fd, b"end")
    os.fsync(fd)
    other = os.open(place / "a", os.O_WRONLY | os.O_APPEND)
    os.write(other, b"!")
    os.truncate(place / "a", 12)
    os.write(fd, b"?")
    os.close(other)
    os.close(fd)
    assert (place / "a").read_bytes() == b"x" * 10 + b"en?"
    with open(place / "a", "wb") as again:
        assert os.stat(place / "a").st_size == 0
        again.write(b"anew")
    assert (place / "a").read_bytes() == b"anew"


@pytest.mark.parametrize("by_kernel", [True, False])
def test_synchronous_writes_are_on_the_disk(start_mount, by_kernel: bool) -> None:  # type: ignore[no-untyped-def]  # as above
    mount = start_mount(config=f"[mount]\npassthrough = {str(by_kernel).lower()}\n")
    staging = mount.store / "staging"
    seen = []
    syncs = (0, os.O_DSYNC, os.O_SYNC)
    for mode, direct, sync in itertools.product((os.O_WRONLY, os.O_RDWR), (0, os.O_DIRECT), syncs):
        # Names of their own: what is removed gets a name in staging as well, and a newer one.
        path = mount.mountpoint / f"{len(seen)}"
        fd = os.open(path, mode | direct | sync | os.O_CREAT | os.O_EXCL)
        with mmap.mmap(-1, SMALL // 4096 * 4096) as data:
            assert os.write(fd, data) == len(data)
        stages = [path for path in staging.iterdir() if path.stat().st_size]
        stage = max(stages, key=lambda path: int(path.suffix[1:], 16))  # the newest
        seen.append((sync, has_delayed_extents(stage)))
        os.close(fd)
    assert not any(is_delayed for sync, is_delayed in seen if sync)
    assert any(is_delayed for sync, is_delayed in seen if not sync), "this test sees nothing"


def has_delayed_extents(path: Path) -> bool:
    """Whether the file system has yet to choose a place for some of a file's bytes."""
    answer = bytearray(_FIEMAP.pack(0, 2**63, 0, 0, 32, 0) + bytes(32 * _FIEMAP_EXTENT.size))
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, answer)
    except OSError as error:
        pytest.skip(f"the store's file system does not tell: {error.strerror}")
    finally:
        os.close(fd)
    count = _FIEMAP.unpack_from(answer)[3]
    extents = _FIEMAP_EXTENT.iter_unpack(answer[_FIEMAP.size :])
    return any(extent[5] & _EXTENT_DELAYED for extent in itertools.islice(extents, count))


COPY_AND_CLOSE = """
import ctypes, mmap, os, sys, threading
size_bytes = 8 << 20
libc = ctypes.CDLL(None)
libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
source = os.open("source", os.O_RDWR)  # for both: Python serves it
mapped = mmap.mmap(source, size_bytes)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
for turn in range(50):
    fd = os.open("target", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, bytes(2 << 20))
    other = os.dup(fd)
    mapped.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    copying = threading.Thread(target=lambda: libc.pwrite(fd, address, size_bytes, 0))
    copying.start()
    os.close(other)
    copying.join()
    os.close(fd)
"""


@pytest.mark.parametrize("may_put_off", [True, False])
def test_a_close_while_another_file_of_the_mount_is_copied_stops_nobody(
    start_mount,  # type: ignore[no-untyped-def]  # as above
    may_put_off: bool,
) -> None:
    """The kernel holds the target's lock while it waits for Python to read the source."""
    mount = require_through(start_mount(config="" if may_put_off else "fsync = true\n"))
    data = os.urandom(8 << 20)
    (mount.mountpoint / "source").write_bytes(data)
    copy = [sys.executable, "-c", COPY_AND_CLOSE]
    subprocess.run(copy, cwd=mount.mountpoint, check=True, timeout=30)
    assert (mount.mountpoint / "target").read_bytes() == data


WRITE_AND_CLOSE = """
import ctypes, mmap, os, sys, threading, time
size_bytes = 4 << 20
libc = ctypes.CDLL(None)
libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]

class Source:
    def __init__(self, number):
        self.fd = os.open(f"source{number}", os.O_RDWR)  # for both: Python serves it
        self.mapped = mmap.mmap(self.fd, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))

    def copy(self, target):
        self.mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        libc.pwrite(target, self.address, size_bytes, 0)

def keep_closing(number, way):
    before = None if way == "late" else Source(number)
    for turn in range(60 if way == "shared" else 4):
        fd = os.open(f"target{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, os.urandom(2 << 20))
        if way == "shared":  # with another open
            other = os.open(f"target{number}", os.O_WRONLY)
            copying = threading.Thread(target=before.copy, args=(other,))
            copying.start()
            os.close(fd)
            copying.join()
            os.close(other)
            continue
        os.close(os.dup(fd))
        time.sleep(0.3)  # for its publication
        source = before or Source(number)
        is_over = threading.Event()
        def copy_on():
            while not is_over.is_set():
                source.copy(fd)
        copying = threading.Thread(target=copy_on)
        copying.start()
        for _ in range(20):
            os.close(os.dup(fd))
        is_over.set()
        copying.join()
        os.close(fd)

threads = [threading.Thread(target=keep_closing, args=(n, sys.argv[1])) for n in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.parametrize("way", ["shared", "early", "late"])
def test_closes_while_others_copy_into_the_same_files_stop_nobody(start_mount, way: str) -> None:  # type: ignore[no-untyped-def]  # as above
    """`late`: Python serves the sources only once the targets have been published."""
    mount = require_through(start_mount())
    data = os.urandom(4 << 20)
    for number in range(2):
        (mount.mountpoint / f"source{number}").write_bytes(data)
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_CLOSE, way], cwd=mount.mountpoint
    ) as program:
        try:
            assert program.wait(60) == 0
        except subprocess.TimeoutExpired:
            mount.kill()  # it has to answer, so that the program can end
            raise
        finally:
            program.kill()
    for number in range(2):
        assert (mount.mountpoint / f"target{number}").read_bytes() == data
    wait_until(lambda: os.listdir(mount.store / "staging") == [])


def test_a_reader_keeps_an_old_version_when_a_file_is_emptied(place: Path) -> None:
    (place / "a").write_bytes(b"old")
    with open(place / "a", "rb") as reader:
        (place / "a").write_bytes(b"newer")
        assert reader.read() == b"old"
    assert (place / "a").read_bytes() == b"newer"


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("is_closed_before", [True, False])
def test_a_mapping_by_another_open_changes_no_blob(
    mounted: MountProcess, place: Path, size_bytes: int, is_closed_before: bool
) -> None:
    data = bytearray(os.urandom(size_bytes))
    first = make(place / "a", data)
    second = os.dup(first)
    if is_closed_before:
        os.close(second)
    both = os.open(place / "a", os.O_RDWR)
    with mmap.mmap(both, size_bytes) as mapping:
        (place / "b").write_bytes(data)
        mapping[:6] = b"mapped"
        assert stored(mounted, b"b") == data
        data[:6] = b"mapped"
        assert os.pread(both, 6, 0) == b"mapped"
    os.close(both)
    os.close(first)
    if not is_closed_before:
        os.close(second)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)
    assert (place / "a").read_bytes() == data
    wait_until(lambda: stored(mounted, b"a") == data)


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_unlinked_while_it_is_written(mounted: MountProcess, place: Path, size_bytes: int) -> None:
    fd = make(place / "a", os.urandom(size_bytes))
    os.close(os.dup(fd))
    os.unlink(place / "a")
    os.pwrite(fd, b"more", size_bytes)
    assert os.fstat(fd).st_size == size_bytes + 4
    os.close(fd)
    with Client(mounted.store) as client:
        wait_until(lambda: client.status()["blobs"] == 0)
        client.gc()
    wait_until(lambda: os.listdir(mounted.store / "staging") == [])
    assert allocated_bytes(mounted.store / "blobs") < 50_000


def test_renamed_over_another_while_it_is_written(mounted: MountProcess, place: Path) -> None:
    (place / "b").write_bytes(b"old")
    data = os.urandom(LARGE)
    fd = make(place / "a", data)
    os.rename(place / "a", place / "b")
    os.write(fd, b"tail")
    os.close(fd)
    assert (place / "b").read_bytes() == data + b"tail"
    assert stored(mounted, b"b") == data + b"tail"
    assert os.listdir(place) == [".kvfs", "b"]


def test_times_are_those_of_the_writes(place: Path) -> None:
    fd = make(place / "a", b"1")
    before = os.stat(place / "a").st_mtime_ns
    os.write(fd, b"2")
    assert os.stat(place / "a").st_mtime_ns > before
    os.utime(fd, ns=(1, 2))
    assert os.stat(place / "a").st_mtime_ns == 2
    os.close(fd)
    assert os.stat(place / "a").st_mtime_ns == 2
    fd = os.open(place / "a", os.O_WRONLY | os.O_TRUNC)
    os.utime(fd, ns=(1, 2))
    os.write(fd, b"3")
    os.close(fd)
    assert os.stat(place / "a").st_mtime_ns > before


def test_a_status_is_of_now_whoever_changes_the_file(place: Path) -> None:
    """The kernel keeps what the creation said of a file, and sees by itself what is old of it."""
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    assert os.stat(place / "a").st_size == 0
    created_ns = os.stat(place / "a").st_mtime_ns
    with open(place / "a", "r+b", buffering=0) as other:
        other.write(b"12345")
        assert os.fstat(fd).st_size == 5
        assert os.stat(place / "a").st_mtime_ns > created_ns
    os.ftruncate(fd, 3)
    assert os.stat(place / "a").st_size == 3
    os.truncate(place / "a", 70_000)
    assert os.fstat(fd).st_size == 70_000
    os.utime(place / "a", ns=(5, 7))
    os.chmod(place / "a", 0o640)
    status = os.fstat(fd)
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (7, 0o640)
    os.link(place / "a", place / "b")
    assert os.fstat(fd).st_nlink == 2
    os.rename(place / "a", place / "c")
    os.unlink(place / "b")
    assert os.fstat(fd).st_nlink == 1
    os.close(fd)
    assert os.stat(place / "c").st_size == 70_000


def test_a_mapping_of_a_new_file_moves_its_time(place: Path) -> None:
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    both = os.open(place / "a", os.O_RDWR)
    os.write(fd, b"12345")
    before = os.stat(place / "a").st_mtime_ns
    with mmap.mmap(both, 5) as mapping:
        mapping[0] = 0
        mapping.flush()
        assert os.stat(place / "a").st_mtime_ns > before
    os.close(both)
    os.close(fd)


def test_a_store_with_little_room_says_at_the_write_that_it_is_full(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = start_mount(config="max_bytes = '64MiB'\nmin_free = 0\n")
    with open(mount.mountpoint / "huge", "wb", 0) as file:
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
            for _ in range(80):
                file.write(os.urandom(MIB))
        assert allocated_bytes(mount.store) <= 64 * MIB


def test_a_limit_is_kept_by_evicting(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount = start_mount(config="max_bytes = '1100MiB'\nmin_free = 0\n")
    block = os.urandom(MIB)
    for number in range(5):
        with open(mount.mountpoint / f"{number}", "wb", 0) as file:
            for part in range(300):
                file.write(bytes((number, part % 256, part // 256)) + block[3:])
        assert allocated_bytes(mount.store) <= 1100 * MIB
    names = os.listdir(mount.mountpoint)
    assert "4" in names
    assert "0" not in names


def test_a_length_that_no_directory_holds_is_told_at_close(mounted: MountProcess) -> None:
    fd = make(mounted.mountpoint / "sparse", b"x")
    os.pwrite(fd, b"x", 15 << 40)  # the largest file that ext4 takes is a little longer
    with pytest.raises(OSError, match="File too large"):
        os.close(fd)
    wait_until(lambda: not (mounted.mountpoint / "sparse").exists())
    wait_until(lambda: os.listdir(mounted.store / "staging") == [])


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("end", [MountProcess.kill, MountProcess.stop])
def test_a_writer_that_outlives_the_node(start_mount, end, is_changed: bool) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    """It may go on writing into what was published."""
    mount = require_through(start_mount())
    data = os.urandom(LARGE)
    first = make(mount.mountpoint / "a", data)
    second = os.dup(first)
    os.close(first)
    end(mount)
    if is_changed:
        os.pwrite(second, b"changed", 0)
    allow = "written to after its close|written to after it was stored" if is_changed else None
    again = start_mount(store=mount.store, mountpoint=mount.mountpoint, allow=allow)
    assert stored(again, b"a") == (None if is_changed else data)
    try:
        os.pwrite(second, b"survivor", 0)
    except OSError as error:
        assert error.errno in (errno.ENOTCONN, errno.EIO, errno.ESTALE)
    assert stored(again, b"a") == (None if is_changed else data)
    try:
        os.close(second)
    except OSError as error:
        assert error.errno == errno.ENOTCONN
    assert stored(again, b"a") == (None if is_changed else data)


def test_an_empty_file_shows_when_it_was_made_though_its_stage_was_there_before(
    mounted: MountProcess, place: Path
) -> None:
    os.close(make(place / "first", b""))
    wait_until(lambda: len(os.listdir(mounted.store / "staging")) > 2)  # made for those that follow
    for name, flags in (("new", os.O_EXCL), ("first", os.O_TRUNC)):
        time.sleep(0.05)
        before = time.time_ns() - 20_000_000  # the disk's clock may be a tick behind
        fd = os.open(place / name, os.O_WRONLY | os.O_CREAT | flags)
        while_open = os.fstat(fd).st_mtime_ns
        assert before <= while_open <= time.time_ns()
        os.close(fd)
        assert stored(mounted, name.encode()) == b""
        assert os.stat(place / name).st_mtime_ns == while_open


def test_a_file_that_others_write_to_is_not_renamed_while_they_may_wait_for_the_mount(
    mounted: MountProcess, place: Path
) -> None:
    """It is published as a copy then: the stage stays where it is."""
    other = os.open(place / "other", os.O_RDWR | os.O_CREAT)  # Python serves it
    data = os.urandom(LARGE)
    first = make(place / "a", data)
    second = os.open(place / "a", os.O_WRONLY)
    os.close(first)
    assert stored(mounted, b"a") == data
    held = {path.stat().st_size for path in (mounted.store / "staging").iterdir()}
    assert LARGE in held
    os.close(other)
    os.pwrite(second, b"more", LARGE)
    os.close(second)
    assert stored(mounted, b"a") == data + b"more"
    wait_until(lambda: os.listdir(mounted.store / "staging") == [])
