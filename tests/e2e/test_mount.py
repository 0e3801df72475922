"""What POSIX users expect of the bytes of files, by calls and by mappings: on a real mount."""

import errno
import mmap
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.e2e.calls import fails_with
from tests.files import store_at
from tests.mounts import MountProcess

MIB = 1024 * 1024


# Bytes --------------------------------------------------------------------------------------------
def test_a_closed_file_is_whole_at_once_for_clients(place: Path, mounted: MountProcess) -> None:
    data = os.urandom(3 * MIB + 17)
    (place / "a").write_bytes(data)
    with Client(mounted.store) as client:
        path = f"{place.name}/a".encode()
        assert client.lookup([path]) == [len(data)]
        (opened,) = client.open([path])
        assert opened is not None
        with opened:
            assert os.pread(opened.fd, len(data) + 1, 0) == data
    assert (place / "a").read_bytes() == data


def test_an_open_file_is_there_but_no_client_sees_it(place: Path, mounted: MountProcess) -> None:
    with open(place / "a", "wb", buffering=0) as file, Client(mounted.store) as client:
        file.write(b"half")
        assert os.listdir(place) == ["a"]
        assert os.stat(place / "a").st_size == 4
        assert (place / "a").read_bytes() == b"half"
        assert client.lookup([f"{place.name}/a".encode()]) == [None]


def test_what_a_client_publishes_is_there_at_once(place: Path, mounted: MountProcess) -> None:
    name = place / "from-client"
    assert not name.exists()
    store_at(mounted.store, f"{place.name}/from-client".encode(), b"one")
    assert name.read_bytes() == b"one"
    assert os.listdir(place) == ["from-client"]


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, MIB, MIB + 1, 9 * MIB + 5])
def test_sizes(place: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (place / "a").write_bytes(data)
    assert os.stat(place / "a").st_size == size_bytes
    assert (place / "a").read_bytes() == data


def test_pread_and_pwrite_anywhere(place: Path) -> None:
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    try:
        assert os.pwrite(fd, b"abc", 10_000) == 3
        assert os.pwrite(fd, b"xyz", 5) == 3
        assert os.pread(fd, 20_000, 0) == bytes(5) + b"xyz" + bytes(9_992) + b"abc"
        assert os.pread(fd, 10, 10_002) == b"c"
        assert os.pread(fd, 10, 10_003) == b""
    finally:
        os.close(fd)
    assert os.stat(place / "a").st_size == 10_003


def test_one_large_write_is_never_short(place: Path) -> None:
    data = os.urandom(40 * MIB + 3)
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    try:
        assert os.write(fd, data) == len(data)
    finally:
        os.close(fd)
    fd = os.open(place / "a", os.O_RDONLY)
    try:
        assert os.read(fd, len(data)) == data
    finally:
        os.close(fd)


def test_offsets_above_4_gib_in_a_sparse_file(place: Path) -> None:
    far = 5 * 1024 * MIB + 1
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, b"far", far)
        os.pwrite(fd, b"near", 0)
        assert os.fstat(fd).st_size == far + 3
        assert os.pread(fd, 8, far - 1) == b"\0far"
        assert os.pread(fd, 8, far // 2) == bytes(8)
        os.unlink(place / "a")  # so that 5 GiB need not be hashed
    finally:
        os.close(fd)


def test_a_sparse_file_keeps_its_holes_as_zeros(place: Path) -> None:
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 64 * MIB)
    os.pwrite(fd, b"end", 64 * MIB - 3)
    os.close(fd)
    with open(place / "a", "rb") as file:
        assert file.read(4096) == bytes(4096)
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"end"


def test_o_direct(place: Path) -> None:
    buffer = mmap.mmap(-1, 4 * MIB)
    buffer.write(os.urandom(4 * MIB))
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        assert os.write(fd, buffer) == 4 * MIB
    finally:
        os.close(fd)
    back = mmap.mmap(-1, 4 * MIB)
    fd = os.open(place / "a", os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(fd, [back], 0) == 4 * MIB
        assert back[:] == buffer[:]
        assert os.preadv(fd, [back], 3 * MIB) == MIB
        assert back[:MIB] == buffer[3 * MIB :]
    finally:
        os.close(fd)
    assert (place / "a").read_bytes() == buffer[:]


def test_o_direct_and_buffered_readers_see_one_file(place: Path) -> None:
    (place / "a").write_bytes(b"1" * 8192)
    assert (place / "a").read_bytes() == b"1" * 8192
    buffer = mmap.mmap(-1, 4096)
    buffer.write(b"2" * 4096)
    fd = os.open(place / "a", os.O_RDWR | os.O_DIRECT)
    os.pwrite(fd, buffer, 4096)
    assert (place / "a").read_bytes() == b"1" * 4096 + b"2" * 4096
    os.close(fd)
    assert (place / "a").read_bytes() == b"1" * 4096 + b"2" * 4096


def test_who_reads_while_another_only_writes_sees_what_is_written(place: Path) -> None:
    writer = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    os.pwrite(writer, b"0" * 16384, 0)
    reader = os.open(place / "a", os.O_RDONLY)
    view = mmap.mmap(reader, 16384, prot=mmap.PROT_READ)
    for number in range(1, 60):
        written = b"%02d" % number * 4096
        assert os.pread(reader, 16384, 0) == view[:]  # so that the kernel has pages to be wrong
        os.pwrite(writer, written, 4096)
        assert os.pread(reader, 8192, 4096) == written
        assert view[4096:12288] == written
    os.close(writer)
    assert (place / "a").read_bytes() == b"0" * 4096 + written + b"0" * 4096
    view.close()
    os.close(reader)


def test_pages_read_during_a_write_do_not_outlive_it(place: Path) -> None:
    writer = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    os.pwrite(writer, bytes(4 * MIB), 0)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with open(place / "a", "rb", buffering=0) as file:
                file.read()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    try:
        for number in range(40):
            os.pwrite(writer, bytes([number]) * (4 * MIB), 0)
    finally:
        stop.set()
        for thread in readers:
            thread.join(30)
    os.close(writer)
    assert (place / "a").read_bytes() == bytes([39]) * (4 * MIB)
    with open(place / "a", "rb") as file:
        assert mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:] == bytes([39]) * (4 * MIB)


def test_append_from_two_descriptors(place: Path) -> None:
    first = os.open(place / "a", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    second = os.open(place / "a", os.O_WRONLY | os.O_APPEND)
    for number in range(100):
        os.write(first if number % 2 else second, b"%02d" % number)
    os.close(first)
    os.close(second)
    assert (place / "a").read_bytes() == b"".join(b"%02d" % n for n in range(100))
    with open(place / "a", "ab") as file:
        file.write(b"end")
    assert (place / "a").read_bytes().endswith(b"9899end")


def test_truncate_down_and_up(place: Path) -> None:
    (place / "a").write_bytes(b"0123456789" * 1000)
    os.truncate(place / "a", 5)
    assert (place / "a").read_bytes() == b"01234"
    os.truncate(place / "a", 8192)
    assert (place / "a").read_bytes() == b"01234" + bytes(8187)
    with open(place / "a", "r+b") as file:
        file.truncate(3)
        file.seek(1)
        file.write(b"X")
    assert (place / "a").read_bytes() == b"0X2"
    os.truncate(place / "a", 0)
    assert os.stat(place / "a").st_size == 0


def test_truncating_to_its_own_size_changes_nothing(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.truncate(place / "a", 4)
    assert (place / "a").read_bytes() == b"data"


def test_open_flags(place: Path) -> None:
    with fails_with(errno.ENOENT):
        os.open(place / "a", os.O_WRONLY)
    os.close(os.open(place / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
    assert stat.S_IMODE(os.stat(place / "a").st_mode) == 0o640
    with fails_with(errno.EEXIST):
        os.open(place / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    (place / "a").write_bytes(b"data")
    os.close(os.open(place / "a", os.O_WRONLY | os.O_CREAT))
    assert (place / "a").read_bytes() == b"data"
    os.close(os.open(place / "a", os.O_RDONLY | os.O_TRUNC))
    assert (place / "a").read_bytes() == b""
    with fails_with(errno.EISDIR):
        os.open(place, os.O_WRONLY)
    with fails_with(errno.ENOTDIR):
        os.open(place / "a" / "b", os.O_RDONLY)
    (place / "a").write_bytes(b"data")
    fd = os.open(place / "a", os.O_RDONLY)
    with fails_with(errno.EBADF):
        os.write(fd, b"x")
    os.close(fd)


def test_a_dup_that_is_closed_first_does_not_end_the_file(place: Path) -> None:
    fd = os.open(place / "a", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"one")
    os.close(os.dup(fd))
    assert (place / "a").read_bytes() == b"one"
    os.write(fd, b"two")
    os.close(fd)
    assert (place / "a").read_bytes() == b"onetwo"


def test_shell_redirection(place: Path) -> None:
    script = "(echo one; echo two) > out; echo three >> out; cat out; sed -i s/two/2/ out; cat out"
    done = subprocess.run(["sh", "-c", script], cwd=place, capture_output=True, check=True)
    assert done.stdout == b"one\ntwo\nthree\none\n2\nthree\n"


def test_fsync(place: Path) -> None:
    with open(place / "a", "wb") as file:
        file.write(b"data")
        file.flush()
        os.fsync(file.fileno())
        os.fdatasync(file.fileno())
    with open(place / "a", "rb") as file:
        os.fsync(file.fileno())
    directory = os.open(place, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    os.sync()
    assert (place / "a").read_bytes() == b"data"


def test_copy_file_range_sendfile_and_fallocate(place: Path) -> None:
    data = os.urandom(2 * MIB)
    (place / "a").write_bytes(data)
    with open(place / "a", "rb") as source, open(place / "b", "w+b") as target:
        while os.copy_file_range(source.fileno(), target.fileno(), 16 * MIB):
            pass
        os.posix_fallocate(target.fileno(), 0, 3 * MIB)
    assert (place / "b").read_bytes() == data + bytes(MIB)
    with open(place / "a", "rb") as source, open(place / "c", "wb") as target:
        assert os.sendfile(target.fileno(), source.fileno(), 0, len(data)) == len(data)
    assert (place / "c").read_bytes() == data


# Mappings -----------------------------------------------------------------------------------------
def test_a_mapping_writes_a_new_file(place: Path) -> None:
    with open(place / "a", "w+b") as file:
        file.truncate(3 * MIB)
        with mmap.mmap(file.fileno(), 3 * MIB) as mapped:
            mapped[0:5] = b"begin"
            mapped[MIB : MIB + 3] = b"mid"
            mapped[-3:] = b"end"
            mapped.flush()
    data = (place / "a").read_bytes()
    assert (data[:5], data[MIB : MIB + 3], data[-3:]) == (b"begin", b"mid", b"end")
    assert len(data) == 3 * MIB
    assert not any(data[5:MIB])


def test_a_mapping_outlives_its_descriptor(place: Path, mounted: MountProcess) -> None:
    fd = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 8192)
    mapped = mmap.mmap(fd, 8192)
    os.close(fd)
    mapped[4096:4100] = b"late"
    mapped.close()
    assert (place / "a").read_bytes() == bytes(4096) + b"late" + bytes(4092)


def test_private_mappings_change_nothing(place: Path) -> None:
    (place / "a").write_bytes(b"abcdefgh" * 1024)
    with open(place / "a", "rb") as file:
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        with mmap.mmap(file.fileno(), 8192, flags=flags, prot=prot) as mapped:
            assert mapped[:8] == b"abcdefgh"
            mapped[:8] = b"ABCDEFGH"
            assert mapped[:8] == b"ABCDEFGH"
    assert (place / "a").read_bytes() == b"abcdefgh" * 1024


def test_programs_run_from_the_mount(place: Path) -> None:
    (place / "true").write_bytes(Path("/bin/true").read_bytes())
    os.chmod(place / "true", 0o755)
    assert subprocess.run([place / "true"], check=False).returncode == 0


def test_fifos_and_special_files(place: Path) -> None:
    os.mkfifo(place / "fifo", 0o600)
    assert stat.S_ISFIFO(os.stat(place / "fifo").st_mode)
    writer = subprocess.Popen(["sh", "-c", f"echo through > '{place}/fifo'"])
    assert (place / "fifo").read_bytes() == b"through\n"
    assert writer.wait(10) == 0
    os.mknod(place / "regular", stat.S_IFREG | 0o600)
    assert (place / "regular").read_bytes() == b""
    (place / "regular").write_bytes(b"x")
    assert (place / "regular").read_bytes() == b"x"
