"""POSIX, bytes: open flags, offsets, sizes, holes, mappings, versions and synchronisation."""

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context

import pytest

from tests.e2e.posix_ground import OK, as_user, needs_root, outcome, read, write

MIB = 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2), as the kernel answers it."""
    if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), "fallocate")


def on_open(flags: int, use: Callable[[int], object]) -> str:
    """The outcome of what is done with a descriptor of "a"; opening it must work."""
    fd = os.open("a", flags)
    try:
        return outcome(lambda: use(fd))
    finally:
        os.close(fd)


# open ---------------------------------------------------------------------------------------------
OPENING = [
    ("open creating", "new", os.O_CREAT | os.O_WRONLY, OK),
    ("open creating for reading", "new", os.O_CREAT | os.O_RDONLY, OK),
    ("open exclusive", "a", os.O_CREAT | os.O_EXCL | os.O_WRONLY, "EEXIST"),
    ("open exclusive on a link", "to", os.O_CREAT | os.O_EXCL | os.O_WRONLY, "EEXIST"),
    ("open exclusive on a dangling link", "bad", os.O_CREAT | os.O_EXCL | os.O_WRONLY, "EEXIST"),
    ("open creating on a dangling link", "bad", os.O_CREAT | os.O_WRONLY, OK),
    ("open nofollow", "to", os.O_RDONLY | os.O_NOFOLLOW, "ELOOP"),
    ("open nofollow creating", "to", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, "ELOOP"),
    ("open nofollow on a file", "a", os.O_RDONLY | os.O_NOFOLLOW, OK),
    ("open directory", "d", os.O_RDONLY | os.O_DIRECTORY, OK),
    ("open directory on a file", "a", os.O_RDONLY | os.O_DIRECTORY, "ENOTDIR"),
    ("open directory for writing", "d", os.O_WRONLY, "EISDIR"),
    ("open directory for both", "d", os.O_RDWR, "EISDIR"),
    ("open directory truncating", "d", os.O_RDONLY | os.O_TRUNC, "EISDIR"),
    ("open directory creating", "d", os.O_CREAT | os.O_RDONLY, "EISDIR"),
    ("open with a slash", "a/", os.O_RDONLY, "ENOTDIR"),
    ("open creating with a slash", "new/", os.O_CREAT | os.O_WRONLY, "EISDIR"),
    ("open path", "a", os.O_PATH, OK),
    ("open synchronous", "a", os.O_WRONLY | os.O_SYNC, OK),
    ("open data-synchronous", "a", os.O_WRONLY | os.O_DSYNC, OK),
    ("open without access time", "a", os.O_RDONLY | os.O_NOATIME, OK),
    ("open direct", "a", os.O_RDWR | os.O_DIRECT, OK),
]  # fmt: skip


@pytest.mark.parametrize("case", OPENING, ids=lambda case: case[0])
def test_open(ground: str, case: tuple[str, str, int, str]) -> None:
    _, path, flags, expected = case
    write("a", b"data")
    os.mkdir("d")
    os.symlink("a", "to")
    os.symlink("made", "bad")
    assert outcome(lambda: os.close(os.open(path, flags, 0o644))) == expected
    assert read("a") == b"data"
    if path == "bad":
        assert os.path.exists("made") == (expected == OK)


def test_open_unnamed_files_are_refused_in_the_mount(ground: str) -> None:
    expected = "EOPNOTSUPP" if ground == "mount" else OK
    assert outcome(lambda: os.close(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600))) == expected


WRONG_USE: list[tuple[str, int, Callable[[int], object], str]] = [
    ("open reading, write", os.O_RDONLY, lambda fd: os.write(fd, b"x"), "EBADF"),
    ("open writing, read", os.O_WRONLY, lambda fd: os.read(fd, 1), "EBADF"),
    ("open path, read", os.O_PATH, lambda fd: os.read(fd, 1), "EBADF"),
    ("ftruncate reading", os.O_RDONLY, lambda fd: os.ftruncate(fd, 1), "EINVAL"),
    ("ftruncate negative", os.O_RDWR, lambda fd: os.ftruncate(fd, -1), "EINVAL"),
    ("ftruncate far", os.O_RDWR, lambda fd: os.ftruncate(fd, 2**62), "EFBIG"),
    ("write far", os.O_RDWR, lambda fd: os.pwrite(fd, b"x", 2**60), "EFBIG"),
    ("read negative", os.O_RDWR, lambda fd: os.pread(fd, 1, -1), "EINVAL"),
    ("write negative", os.O_RDWR, lambda fd: os.pwrite(fd, b"x", -1), "EINVAL"),
    ("lseek negative", os.O_RDWR, lambda fd: os.lseek(fd, -1, os.SEEK_SET), "EINVAL"),
    ("posix_fallocate reading", os.O_RDONLY, lambda fd: os.posix_fallocate(fd, 0, 1), "EBADF"),
    ("posix_fallocate nothing", os.O_RDWR, lambda fd: os.posix_fallocate(fd, 0, 0), "EINVAL"),
    ("posix_fallocate negative", os.O_RDWR, lambda fd: os.posix_fallocate(fd, -1, 1), "EINVAL"),
    ("mmap shared for writing", os.O_RDONLY, lambda fd: mmap.mmap(fd, 4), "EACCES"),
    ("mmap of a writer", os.O_WRONLY, lambda fd: mmap.mmap(fd, 4, prot=mmap.PROT_READ), "EACCES"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG_USE, ids=lambda case: case[0])
def test_wrong_use_of_a_descriptor(
    ground: str, case: tuple[str, int, Callable[[int], object], str]
) -> None:
    _, flags, use, expected = case
    write("a", b"data")
    assert on_open(flags, use) == expected
    assert read("a") == b"data"


def test_read_of_a_directory_and_seek_of_a_fifo(ground: str) -> None:
    os.mkdir("a")
    assert on_open(os.O_RDONLY, lambda fd: os.read(fd, 1)) == "EISDIR"
    os.rmdir("a")
    os.mkfifo("a")
    assert on_open(os.O_RDWR, lambda fd: os.lseek(fd, 0, os.SEEK_SET)) == "ESPIPE"


def test_open_truncating_for_reading(ground: str) -> None:
    write("a", b"data")
    os.close(os.open("a", os.O_RDONLY | os.O_TRUNC))
    assert read("a") == b""


def test_open_appending_ignores_the_offset(ground: str) -> None:
    write("a", b"data")
    fd = os.open("a", os.O_RDWR | os.O_APPEND)
    os.pwrite(fd, b" and", 0)  # as Linux does; POSIX would write at 0
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b" more")
    assert os.pread(fd, 99, 0) == b"data and more"
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    os.pwrite(fd, b"D", 0)
    os.close(fd)
    assert read("a") == b"Data and more"


def append_lines(path: str, number: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for turn in range(100):
        os.write(fd, b"%d %03d\n" % (number, turn))
    os.close(fd)


def test_open_appending_from_processes_loses_nothing(ground: str) -> None:
    write("a", b"")
    context = get_context("fork")
    workers = [context.Process(target=append_lines, args=("a", n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    lines = read("a").splitlines()
    assert sorted(lines) == sorted(b"%d %03d" % (n, turn) for n in range(4) for turn in range(100))


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR], ids=["write", "both"])
@pytest.mark.parametrize("made", ["new", "empty", "held", "whole"])
def test_write_direct_and_an_odd_end_after_fcntl(ground: str, flags: int, made: str) -> None:
    """As dd does with oflag=direct: what is not aligned it writes when O_DIRECT is off."""
    blocks, end = os.urandom(MIB), os.urandom(4097)
    holder = None
    if made == "held":  # the kernel serves it to another writer already
        holder = os.open("a", os.O_WRONLY | os.O_CREAT)
    elif made != "new":
        write("a", b"x" * (2 * MIB if made == "whole" else 0))
    with mmap.mmap(-1, MIB) as aligned:
        aligned[:] = blocks
        fd = os.open("a", flags | os.O_CREAT | os.O_DIRECT | (0 if holder else os.O_TRUNC))
        assert os.write(fd, aligned) == MIB
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    assert os.write(fd, end) == len(end)
    assert os.fstat(fd).st_size == os.stat("a").st_size == MIB + len(end)
    if flags == os.O_RDWR:
        assert os.pread(fd, 4098, MIB - 1) == blocks[-1:] + end
    assert read("a") == blocks + end
    os.close(fd)
    if holder:
        os.close(holder)
    assert read("a") == blocks + end


def test_direct_set_by_fcntl(ground: str) -> None:
    fd = os.open("a", os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, b"x" * 4096) == 4096
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    with mmap.mmap(-1, 4096) as aligned:
        aligned[:] = b"y" * 4096
        assert os.write(fd, aligned) == 4096
    os.close(fd)
    assert read("a") == b"x" * 4096 + b"y" * 4096


def test_read_direct_up_to_an_odd_end(ground: str) -> None:
    data = os.urandom(MIB + 4097)
    write("a", data)
    fd = os.open("a", os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as aligned:
        assert os.readv(fd, [aligned]) == MIB
        assert aligned[:] == data[:MIB]
        assert os.readv(fd, [aligned]) == 4097
        assert aligned[:4097] == data[MIB:]
    os.close(fd)


def test_read_and_write_at_any_offset(ground: str) -> None:
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    expected = bytearray()
    for offset in (0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, MIB - 1, MIB, MIB + 1):
        data = offset.to_bytes(4, "big") * 2
        assert os.pwrite(fd, data, offset) == 8
        expected.extend(bytes(max(0, offset + 8 - len(expected))))
        expected[offset : offset + 8] = data
    assert os.pread(fd, 2 * MIB, 0) == expected
    for offset in range(0, len(expected), 77_777):
        assert os.pread(fd, 4099, offset) == expected[offset : offset + 4099]
    assert os.pread(fd, 1, len(expected)) == b""
    assert os.pwritev(fd, [b"ab", b"", b"cd"], 3) == 4
    buffers = [bytearray(3), bytearray(3)]
    assert os.preadv(fd, buffers, 2) == 6
    assert bytes(buffers[0] + buffers[1]) == expected[2:3] + b"abcd" + expected[7:8]
    os.close(fd)


def test_read_and_write_without_a_byte(ground: str) -> None:
    write("a", b"data")
    fd = os.open("a", os.O_RDWR)
    before = os.fstat(fd)
    assert os.write(fd, b"") == 0
    assert os.pread(fd, 0, 0) == b""
    assert os.pwrite(fd, b"", 100) == 0
    assert os.fstat(fd) == before
    os.close(fd)


# Sizes --------------------------------------------------------------------------------------------
SIZES = (0, 1, 3, 4, 5, 4095, 4096, 4097, 1_234_567)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["truncate", "ftruncate", "ftruncate unlinked"])
def test_truncate(ground: str, way: str, size: int) -> None:
    write("a", b"data" * 1025)
    fd = os.open("a", os.O_RDWR)
    if way == "truncate":
        os.truncate("a", size)
        fd, old = os.open("a", os.O_RDWR), fd
        os.close(old)
    else:
        if way == "ftruncate unlinked":
            os.unlink("a")
        os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == size
    content = (b"data" * 1025)[:size]
    assert os.pread(fd, size + 10, 0) == content + bytes(size - len(content))
    os.close(fd)


def test_truncate_shorter_and_longer_shows_zeros(ground: str) -> None:
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 10_000)
    os.ftruncate(fd, 100)
    os.ftruncate(fd, 10_000)
    assert os.pread(fd, 20_000, 0) == b"x" * 100 + bytes(9_900)
    os.close(fd)
    assert read("a") == b"x" * 100 + bytes(9_900)


@needs_root
def test_truncate_needs_writing(ground: str) -> None:
    write("a", b"data")
    assert as_user(lambda: os.truncate("a", 0)) == "EACCES"
    assert read("a") == b"data"


def write_past_the_limit() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    fd = os.open("a", os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, bytes(10_000)) == 8192
    assert outcome(lambda: os.ftruncate(fd, 9000)) == "EFBIG"
    assert outcome(lambda: os.truncate("a", 9000)) == "EFBIG"
    os.write(fd, b"x")


@needs_root
def test_write_past_the_limit_of_a_process(ground: str) -> None:
    assert as_user(write_past_the_limit) == "EFBIG"
    assert os.stat("a").st_size == 8192


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 8192), (2, 1), (4, 9000), (70_000, 1)])
def test_posix_fallocate(ground: str, offset: int, length: int) -> None:
    write("a", b"data")
    assert on_open(os.O_RDWR, lambda fd: os.posix_fallocate(fd, offset, length)) == OK
    size = max(4, offset + length)
    assert read("a") == b"data" + bytes(size - 4)


KEEP, PUNCH, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32


@pytest.mark.parametrize("mode", [0, KEEP, PUNCH | KEEP, COLLAPSE, ZERO, INSERT])
def test_fallocate_is_refused_in_the_mount(ground: str, mode: int) -> None:
    write("a", b"data" * 4096)
    result = on_open(os.O_RDWR, lambda fd: fallocate(fd, mode, 0, 4096))
    assert result == ("EOPNOTSUPP" if ground == "mount" else OK)
    if ground == "mount":
        assert read("a") == b"data" * 4096


# Holes --------------------------------------------------------------------------------------------
def test_lseek_data_and_hole(ground: str) -> None:
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x", 4 * MIB)
    size = 4 * MIB + 1
    if ground == "plain":
        assert os.lseek(fd, 0, os.SEEK_DATA) == 4 * MIB
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    else:  # what POSIX lets a file system say that keeps no account of holes
        assert os.lseek(fd, 5, os.SEEK_DATA) == 5
        assert os.lseek(fd, 5, os.SEEK_HOLE) == size
    assert os.lseek(fd, 4 * MIB, os.SEEK_HOLE) == size
    assert outcome(lambda: os.lseek(fd, size, os.SEEK_DATA)) == "ENXIO"
    assert outcome(lambda: os.lseek(fd, size, os.SEEK_HOLE)) == "ENXIO"
    os.close(fd)


def test_sparse_files_read_as_zeros_and_are_copied(ground: str) -> None:
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 3 * MIB)
    os.pwrite(fd, b"mid", MIB)
    os.close(fd)
    expected = bytes(MIB) + b"mid" + bytes(2 * MIB - 3)
    assert read("a") == expected
    subprocess.run(["cp", "--sparse=always", "a", "b"], check=True)
    subprocess.run(["cp", "--sparse=never", "a", "c"], check=True)
    assert read("b") == read("c") == expected


# Mappings -----------------------------------------------------------------------------------------
def test_mmap_shared_is_seen_by_others_at_once(ground: str) -> None:
    write("a", bytes(16_384))
    fd, other = os.open("a", os.O_RDWR), os.open("a", os.O_RDWR)
    with mmap.mmap(fd, 16_384) as first, mmap.mmap(other, 16_384) as second:
        first[5000:5003] = b"one"
        assert second[5000:5003] == b"one"
        assert os.pread(other, 3, 5000) == b"one"
        os.pwrite(other, b"two", 9000)
        assert first[9000:9003] == b"two"
    os.close(fd)
    os.close(other)
    assert read("a")[5000:5003] == b"one"


def write_mapped(path: str) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[100:105] = b"child"


def test_mmap_shared_between_processes(ground: str) -> None:
    write("a", bytes(8192))
    fd = os.open("a", os.O_RDWR)
    with mmap.mmap(fd, 8192) as mapped:
        worker = get_context("fork").Process(target=write_mapped, args=("a",))
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
        assert mapped[100:105] == b"child"
        mapped[200:206] = b"parent"
    os.close(fd)
    assert read("a")[100:105] + read("a")[200:206] == b"childparent"


def test_mmap_shared_synchronised_and_not(ground: str) -> None:
    for name, flushes in (("flushed", True), ("unmapped", False)):
        fd = os.open(name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 2 * MIB + 100)
        mapped = mmap.mmap(fd, 2 * MIB + 100)
        os.close(fd)  # the mapping is all that is left
        mapped[MIB - 2 : MIB + 2] = b"edge"
        mapped[-4:] = b"last"
        if flushes:
            mapped.flush()
        mapped.close()
        data = read(name)
        assert (len(data), data[MIB - 2 : MIB + 2], data[-4:]) == (2 * MIB + 100, b"edge", b"last")


def test_mmap_private_changes_nothing(ground: str) -> None:
    write("a", b"data" * 2048)
    fd = os.open("a", os.O_RDWR)
    with mmap.mmap(fd, 8192, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[:4] = b"DATA"
        assert os.pread(fd, 4, 0) == b"data"
        os.pwrite(fd, b"more", 4096)
        assert mapped[4096:4100] == b"more"  # a page that was not copied
    os.close(fd)
    assert read("a")[:4] == b"data"


def test_mmap_of_an_unlinked_file(ground: str) -> None:
    write("a", b"data" * 2048)
    fd = os.open("a", os.O_RDWR)
    mapped = mmap.mmap(fd, 8192)
    os.unlink("a")
    os.close(fd)
    mapped[:4] = b"DATA"
    assert mapped[:8] == b"DATAdata"
    mapped.close()


def test_mmap_past_the_end_is_sigbus(ground: str) -> None:
    write("a", b"x" * 4097)
    code = (
        "import mmap, os; fd = os.open('a', os.O_RDWR); m = mmap.mmap(fd, 4097);"
        "os.ftruncate(fd, 10); assert m[10:4096] == bytes(4086); m[4096]"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGBUS


# Versions -----------------------------------------------------------------------------------------
REWRITES: dict[str, Callable[[], object]] = {
    "rewrite by truncating": lambda: write("a", b"new"),
    "rewrite in place": lambda: on_open(os.O_WRONLY, lambda fd: os.pwrite(fd, b"new", 0)),
    "rewrite by appending": lambda: on_open(
        os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"+")
    ),
    "rewrite by cutting": lambda: os.truncate("a", 1),
    "rewrite by mapping": lambda: write_mapped("a"),
}


@pytest.mark.parametrize("way", REWRITES)
def test_a_rewrite_leaves_readers_their_version(ground: str, way: str) -> None:
    old = b"old " * 100
    write("a", old)
    reader = os.open("a", os.O_RDONLY)
    REWRITES[way]()
    new = read("a")
    assert new != old
    # On a plain disk a reader sees the bytes change; here each open keeps its own.
    assert os.pread(reader, 1000, 0) == (old if ground == "mount" else new)
    os.close(reader)
    assert read("a") == new


# fsync --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sync", [os.fsync, os.fdatasync])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_fsync(ground: str, sync: Callable[[int], None], flags: int) -> None:
    write("a", b"data")
    assert on_open(flags, sync) == OK
    fd = os.open("b", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"data")
    sync(fd)
    os.unlink("b")
    os.write(fd, b"more")
    sync(fd)
    os.close(fd)
    fd = os.open(".", os.O_RDONLY)
    sync(fd)
    os.close(fd)
