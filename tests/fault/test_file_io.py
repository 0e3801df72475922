"""The raw data path on real file systems: whatever is cached, aligned or full, bytes are right."""

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.config import PAGE_BYTES
from kvfs.file_io import allocate, read_into, write_from
from tests.disks import small_disk

SIZES = [0, 1, 4095, 4096, 4097, 131_072, 131_073, 1_000_000, 3 * 1024 * 1024 + 5, 9_000_000]


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory on the disk, or on a file system in memory."""
    if request.param == "disk":
        return tmp_path
    memory = Path(f"/dev/shm/kvfs-test-{os.getpid()}")
    memory.mkdir()
    request.addfinalizer(lambda: [*map(os.unlink, memory.iterdir()), memory.rmdir()])
    return memory


def forget_cached(fd: int, offset: int = 0, size_bytes: int = 0) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    memory = allocate(len(data))
    memory[: len(data)] = data
    write_from(fd, memory[: len(data)])
    return fd


@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_was_written_is_read(directory: Path, size_bytes: int) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    fd = write_file(directory / "file", data)
    assert os.fstat(fd).st_size == size_bytes
    assert (directory / "file").read_bytes() == data
    for memory in (allocate(size_bytes), memoryview(bytearray(size_bytes + 3))[3:]):
        forget_cached(fd)
        for _ in range(2):
            assert read_into(fd, memory, size_bytes) == size_bytes
            assert memory[:size_bytes] == data
    os.close(fd)


def test_a_file_is_written_from_its_middle_first(directory: Path) -> None:
    data = random.Random(4).randbytes(5_000_001)
    fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    write_from(fd, memoryview(data)[8 * PAGE_BYTES :], 8 * PAGE_BYTES)
    write_from(fd, memoryview(data)[: 8 * PAGE_BYTES])
    os.close(fd)
    assert (directory / "file").read_bytes() == data


@pytest.mark.parametrize("cached_from", [0, PAGE_BYTES, 40 * PAGE_BYTES])
def test_a_file_that_memory_has_in_part_is_read_whole(directory: Path, cached_from: int) -> None:
    data = random.Random(3).randbytes(2_000_001)
    fd = write_file(directory / "file", data)
    forget_cached(fd)
    os.pread(fd, 20 * PAGE_BYTES, cached_from)
    memory = allocate(len(data))
    assert read_into(fd, memory, len(data)) == len(data)
    assert memory[: len(data)] == data
    os.close(fd)


def test_reading_a_cold_file_leaves_the_page_cache_cold(tmp_path: Path) -> None:
    fd = write_file(tmp_path / "file", bytes(4 * 1024 * 1024))
    forget_cached(fd)
    if cached_pages(fd):
        pytest.skip("the temporary directory lies in memory")
    read_into(fd, allocate(4 * 1024 * 1024), 4 * 1024 * 1024)
    assert cached_pages(fd) == 0
    os.close(fd)


def cached_pages(fd: int) -> int:
    """How many pages of a file the page cache has, as mincore sees it."""
    size_bytes = os.fstat(fd).st_size
    flags = mmap.PROT_READ | mmap.PROT_WRITE  # of a private view, which ctypes can point to
    with mmap.mmap(fd, size_bytes, mmap.MAP_PRIVATE, flags) as view:
        pages = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        refused = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size_bytes), pages)
        del start
    assert refused == 0
    return sum(page & 1 for page in pages)


def test_a_short_file_gives_what_it_has(directory: Path) -> None:
    data = random.Random(4).randbytes(500_000)
    fd = write_file(directory / "file", data)
    memory = allocate(600_000)
    assert read_into(fd, memory, 500_001) == 500_000
    assert memory[:500_000] == data
    os.close(fd)


def test_the_descriptor_is_buffered_again_afterwards(directory: Path) -> None:
    data = b"x" * 300_000
    fd = write_file(directory / "file", data)
    forget_cached(fd)
    read_into(fd, allocate(len(data)), len(data))
    assert os.pread(fd, 3, 1) == b"xxx"
    os.close(fd)


def test_a_read_that_the_memory_cannot_hold_is_our_own_bug(tmp_path: Path) -> None:
    fd = write_file(tmp_path / "file", b"abc")
    with pytest.raises(AssertionError):
        read_into(fd, allocate(1)[:2], 3)
    os.close(fd)


def test_a_full_file_system_is_told(tmp_path: Path, disk: Path) -> None:
    fd = os.open(disk / "file", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError) as raised:
            write_from(fd, allocate(16 * 1024 * 1024))
    finally:
        os.close(fd)
    assert raised.value.errno == errno.ENOSPC


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk(tmp_path / "small", "4m") as path:
        yield path


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES, 3_000_000, 33 * 1024 * 1024])
def test_memory_for_files_is_aligned_whole_pages_of_its_own(size_bytes: int) -> None:
    memory = allocate(size_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address % PAGE_BYTES == 0
    assert len(memory) % PAGE_BYTES == 0 and size_bytes <= len(memory) < size_bytes + 2 * PAGE_BYTES
    pid = os.fork()  # another process must not see what is read into it
    if pid == 0:
        memory[0] = 1
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory[0] == 0 and memory[len(memory) - 1] == 0
