"""Who sees which bytes while files are overwritten: each row of the table in `mount.states`, as
system calls on a real mount show it."""

import mmap
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.files import store_at
from tests.mounts import MountProcess
from tests.processes import wait_until

MIB = 1024 * 1024


def read(path: Path) -> bytes:
    """The whole file through a new descriptor."""
    return path.read_bytes()


def read_fd(fd: int) -> bytes:
    return os.pread(fd, 1 << 30, 0)


def opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


# READ: readers keep what they opened --------------------------------------------------------------
@pytest.mark.parametrize("new", [b"", b"N", b"n" * 5 * MIB])
@pytest.mark.parametrize("warm", [True, False])
def test_readers_keep_a_file_that_is_truncated_and_rewritten(
    place: Path, new: bytes, warm: bool
) -> None:
    old = os.urandom(MIB + 7)
    (place / "a").write_bytes(old)
    reader = opened(place / "a", os.O_RDONLY)
    if warm:
        assert read_fd(reader) == old
    writer = opened(place / "a", os.O_WRONLY | os.O_TRUNC)
    assert read_fd(reader) == old
    assert read(place / "a") == b""
    os.write(writer, new)
    assert read_fd(reader) == old
    os.close(writer)
    assert read(place / "a") == new
    assert read_fd(reader) == old
    assert os.fstat(reader).st_size == len(old)
    assert os.fstat(reader).st_nlink == 0
    assert os.stat(place / "a").st_size == len(new)
    os.close(reader)
    assert read(place / "a") == new


def test_readers_keep_a_file_that_is_changed_in_the_middle(place: Path) -> None:
    (place / "a").write_bytes(b"0123456789")
    reader = opened(place / "a", os.O_RDONLY)
    writer = opened(place / "a", os.O_RDWR)
    os.pwrite(writer, b"XX", 4)
    assert read_fd(writer) == b"0123XX6789"
    assert read_fd(reader) == b"0123456789"
    assert read(place / "a") == b"0123XX6789"
    os.close(writer)
    assert read(place / "a") == b"0123XX6789"
    assert read_fd(reader) == b"0123456789"
    os.close(reader)


def test_readers_keep_a_file_that_is_cut_by_name(place: Path) -> None:
    (place / "a").write_bytes(b"0123456789")
    reader = opened(place / "a", os.O_RDONLY)
    os.truncate(place / "a", 3)
    assert read(place / "a") == b"012"
    assert read_fd(reader) == b"0123456789"
    os.close(reader)
    assert read(place / "a") == b"012"


def test_mappings_keep_a_file_that_is_rewritten(place: Path) -> None:
    old = os.urandom(64 * 1024)
    (place / "a").write_bytes(old)
    with open(place / "a", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    (place / "a").write_bytes(b"new")
    assert mapped[:] == old
    mapped.close()
    assert read(place / "a") == b"new"


def test_many_versions_are_read_at_once(place: Path) -> None:
    readers = []
    for number in range(20):
        (place / "a").write_bytes(b"%d" % number * (number + 1))
        readers.append(opened(place / "a", os.O_RDONLY))
    for number, reader in enumerate(readers):
        assert read_fd(reader) == b"%d" % number * (number + 1)
    for reader in readers[::2] + readers[1::2]:
        os.close(reader)
    assert read(place / "a") == b"19" * 20


def test_a_reader_keeps_what_a_client_replaces_and_what_is_evicted(
    place: Path, mounted: MountProcess
) -> None:
    path = f"{place.name}/a".encode()
    (place / "a").write_bytes(b"old" * 1000)
    reader = opened(place / "a", os.O_RDONLY)
    store_at(mounted.store, path, b"client")
    wait_until(lambda: os.stat(place / "a").st_size == 6)
    assert read(place / "a") == b"client"
    assert read_fd(reader) == b"old" * 1000
    second = opened(place / "a", os.O_RDONLY)
    with Client(mounted.store) as client:
        assert client.evict([path]) == 1
    wait_until(lambda: not (place / "a").exists())
    assert read_fd(second) == b"client"
    os.close(reader)
    os.close(second)


# WRITE and STAGED: those who are there together see one file --------------------------------------
def test_readers_who_come_while_a_file_is_written_see_it_grow(place: Path) -> None:
    writer = opened(place / "a", os.O_WRONLY | os.O_CREAT)
    reader = opened(place / "a", os.O_RDONLY)
    for number in range(10):
        os.write(writer, b"%d" % number)
        assert read_fd(reader) == b"0123456789"[: number + 1]
    os.close(writer)
    assert read_fd(reader) == b"0123456789"
    os.close(reader)


def test_a_reader_who_joined_a_writer_sees_writes_after_a_publication(place: Path) -> None:
    writer = opened(place / "a", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"one")
    os.close(os.dup(writer))  # publishes
    reader = opened(place / "a", os.O_RDONLY)
    os.write(writer, b"two")
    assert read_fd(reader) == b"onetwo"
    os.close(writer)
    assert read_fd(reader) == b"onetwo"
    (place / "a").write_bytes(b"three")
    assert read_fd(reader) == b"onetwo"
    os.close(reader)


def test_a_publication_is_never_written_into(place: Path, mounted: MountProcess) -> None:
    writer = opened(place / "a", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"one")
    os.close(os.dup(writer))
    with Client(mounted.store) as client:
        (published,) = client.open([f"{place.name}/a".encode()])
        assert published is not None
        os.pwrite(writer, b"TWO", 0)
        assert os.pread(published.fd, 10, 0) == b"one"
        os.close(writer)
        assert os.pread(published.fd, 10, 0) == b"one"
        published.close()
    assert read(place / "a") == b"TWO"


def test_two_writers_share_a_file(place: Path) -> None:
    first = opened(place / "a", os.O_RDWR | os.O_CREAT)
    second = opened(place / "a", os.O_RDWR)
    os.pwrite(first, b"1111", 0)
    os.pwrite(second, b"22", 1)
    assert read_fd(first) == read_fd(second) == b"1221"
    os.close(first)
    os.pwrite(second, b"3", 0)
    assert read_fd(second) == b"3221"
    os.close(second)
    assert read(place / "a") == b"3221"


def test_a_writer_who_truncates_joins_another(place: Path) -> None:
    first = opened(place / "a", os.O_RDWR | os.O_CREAT)
    os.write(first, b"first")
    second = opened(place / "a", os.O_RDWR | os.O_TRUNC)
    assert read_fd(first) == b""
    os.write(second, b"2nd")
    assert read_fd(first) == b"2nd"
    os.close(second)
    os.close(first)
    assert read(place / "a") == b"2nd"


def test_opening_for_writing_changes_nothing_by_itself(place: Path, mounted: MountProcess) -> None:
    (place / "a").write_bytes(b"data")
    os.utime(place / "a", ns=(1, 1))
    with Client(mounted.store) as client:
        before = client.stat(f"{place.name}/a".encode())
        os.close(opened(place / "a", os.O_RDWR))
        assert client.stat(f"{place.name}/a".encode()) == before
    assert read(place / "a") == b"data"


def test_a_writer_who_reads_first_and_writes_later(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    both = opened(place / "a", os.O_RDWR)
    assert read_fd(both) == b"data"
    reader = opened(place / "a", os.O_RDONLY)  # comes while a writer is there
    os.pwrite(both, b"D", 0)
    assert read_fd(both) == read_fd(reader) == b"Data"
    os.close(both)
    os.close(reader)
    assert read(place / "a") == b"Data"


def test_reopening_by_descriptor(place: Path) -> None:
    (place / "a").write_bytes(b"old")
    reader = opened(place / "a", os.O_RDONLY)
    (place / "a").write_bytes(b"new")
    again = opened(Path(f"/proc/self/fd/{reader}"), os.O_RDONLY)
    assert read_fd(again) == b"old"
    os.close(again)
    os.unlink(place / "a")
    again = opened(Path(f"/proc/self/fd/{reader}"), os.O_RDONLY)
    assert read_fd(again) == b"old"
    os.close(again)
    os.close(reader)


# The page cache -----------------------------------------------------------------------------------
def test_the_cache_follows_every_overwrite(place: Path) -> None:
    for number in range(30):
        data = os.urandom(number * 5000 % 70_000 + 1)
        (place / "a").write_bytes(data)
        assert read(place / "a") == data
        with open(place / "a", "rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as mapped:
            assert mapped[:] == data


def test_the_cache_follows_clients(place: Path, mounted: MountProcess) -> None:
    for number in range(10):
        data = os.urandom(number * 5000 + 1)
        store_at(mounted.store, f"{place.name}/a".encode(), data)
        assert read(place / "a") == data


# Many processes -----------------------------------------------------------------------------------
def rewrite(path: str, number: int, rounds: int) -> None:
    """Overwrite one name in all ways; each content is one letter, at its own length."""
    for turn in range(rounds):
        data = bytes([65 + number]) * (number * 1000 + turn + 1)
        if turn % 3 == 0:
            Path(f"{path}.{number}").write_bytes(data)
            os.rename(f"{path}.{number}", path)
        else:
            with open(path, "wb") as file:
                file.write(data)


def check_readers(path: str, rounds: int) -> None:
    """Opening and reading works at any moment; a writer may be seen half-way, as POSIX says."""
    for _ in range(rounds):
        with open(path, "rb") as file:
            # NUL: where one writer emptied the file under another.
            assert set(file.read()) <= set(b"ABCD\0")
            assert os.fstat(file.fileno()).st_size >= 0


def test_writers_and_readers_of_one_name(place: Path) -> None:
    context = get_context("spawn")
    path = str(place / "a")
    (place / "a").write_bytes(b"A")
    workers = [context.Process(target=rewrite, args=(path, n, 60)) for n in range(4)]
    workers += [context.Process(target=check_readers, args=(path, 150)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * 7
    data = read(place / "a")
    assert len(set(data)) == 1
    assert os.stat(place / "a").st_size == len(data)
    assert os.listdir(place) == ["a"]


def write_own(directory: str, number: int) -> None:
    for turn in range(40):
        data = os.urandom(turn * 4001 + number)
        path = Path(directory, f"{number}-{turn}")
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        os.rename(temporary, path)
        assert path.read_bytes() == data
        if turn % 2:
            path.unlink()


def test_many_writers_of_their_own_files(place: Path) -> None:
    context = get_context("spawn")
    workers = [context.Process(target=write_own, args=(str(place), n)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert len(os.listdir(place)) == 6 * 20


def test_a_forked_writer_that_ends(place: Path) -> None:
    code = f"""
import os, subprocess
fd = os.open({str(place / "a")!r}, os.O_WRONLY | os.O_CREAT)
os.write(fd, b"before ")
if os.fork() == 0:
    os.write(fd, b"child ")
    os._exit(0)
os.wait()
os.write(fd, b"after")
os.close(fd)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read(place / "a") == b"before child after"
