"""What POSIX users expect of names and directories: real system calls on a real mount."""

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.e2e.calls import fails_with, rename_with
from tests.mounts import MountProcess


def test_the_temporary_file_pattern(place: Path, mounted: MountProcess) -> None:
    (place / "a").write_bytes(b"old")
    with open(place / "a", "rb") as reader:
        for number in range(20):
            with open(place / "a.tmp", "wb") as file:
                file.write(b"new %d" % number)
            os.rename(place / "a.tmp", place / "a")
            assert (place / "a").read_bytes() == b"new %d" % number
            assert os.stat(place / "a").st_size == len(b"new %d" % number)
        assert reader.read() == b"old"
    assert os.listdir(place) == ["a"]
    with Client(mounted.store) as client:
        assert client.lookup([f"{place.name}/a".encode()]) == [6]


def test_rename_rules(place: Path) -> None:
    (place / "file").write_bytes(b"1")
    (place / "other").write_bytes(b"2")
    (place / "dir" / "sub").mkdir(parents=True)
    (place / "empty").mkdir()
    with fails_with(errno.ENOENT):
        os.rename(place / "none", place / "x")
    with fails_with(errno.EISDIR):
        os.rename(place / "file", place / "dir")
    with fails_with(errno.ENOTDIR):
        os.rename(place / "dir", place / "file")
    with fails_with(errno.ENOTEMPTY):
        os.rename(place / "empty", place / "dir")
    with fails_with(errno.EINVAL):
        os.rename(place / "dir", place / "dir" / "sub" / "x")
    os.rename(place / "dir", place / "empty")
    assert sorted(os.listdir(place)) == ["empty", "file", "other"]
    assert os.listdir(place / "empty") == ["sub"]
    os.rename(place / "file", place / "empty" / "sub" / "moved")
    assert (place / "empty" / "sub" / "moved").read_bytes() == b"1"
    assert not (place / "file").exists()


def test_rename_without_replacing_and_exchange(place: Path) -> None:
    (place / "a").write_bytes(b"1")
    (place / "b").write_bytes(b"2")
    with fails_with(errno.EEXIST):
        rename_with(place / "a", place / "b", 1)
    rename_with(place / "a", place / "b", 2)
    assert ((place / "a").read_bytes(), (place / "b").read_bytes()) == (b"2", b"1")
    rename_with(place / "a", place / "c", 1)
    assert sorted(os.listdir(place)) == ["b", "c"]


def test_unlinked_and_renamed_while_open(place: Path) -> None:
    (place / "a").write_bytes(b"a" * 10_000)
    reader = os.open(place / "a", os.O_RDONLY)
    writer = os.open(place / "w", os.O_RDWR | os.O_CREAT)
    os.unlink(place / "a")
    os.write(writer, b"1")
    os.rename(place / "w", place / "moved")
    os.write(writer, b"2")
    assert os.read(reader, 20_000) == b"a" * 10_000
    assert os.fstat(reader).st_nlink == 0
    assert (place / "moved").read_bytes() == b"12"
    os.unlink(place / "moved")
    os.write(writer, b"3")
    assert os.pread(writer, 10, 0) == b"123"
    os.close(writer)
    os.close(reader)
    assert os.listdir(place) == []


def test_hard_links(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.link(place / "a", place / "b")
    assert os.stat(place / "a").st_nlink == os.stat(place / "b").st_nlink == 2
    assert os.path.samefile(place / "a", place / "b")
    (place / "b").write_bytes(b"changed")
    assert (place / "a").read_bytes() == b"changed"
    assert os.stat(place / "a").st_size == 7
    with fails_with(errno.EEXIST):
        os.link(place / "a", place / "b")
    os.unlink(place / "a")
    assert os.stat(place / "b").st_nlink == 1
    assert (place / "b").read_bytes() == b"changed"


def test_hard_link_of_a_file_that_is_read_and_overwritten(place: Path) -> None:
    (place / "a").write_bytes(b"old")
    assert (place / "a").read_bytes() == b"old"
    os.link(place / "a", place / "b")
    with open(place / "a", "rb") as reader:
        (place / "b").write_bytes(b"newer")
        assert os.stat(place / "a").st_size == 5
        assert (place / "a").read_bytes() == b"newer"
        assert reader.read() == b"old"
    assert (place / "a").read_bytes() == (place / "b").read_bytes() == b"newer"


def test_symbolic_links(place: Path) -> None:
    (place / "a").write_bytes(b"data")
    os.symlink("a", place / "l")
    os.symlink("nowhere", place / "dangling")
    assert os.readlink(place / "l") == "a"
    assert (place / "l").read_bytes() == b"data"
    assert stat.S_ISLNK(os.lstat(place / "l").st_mode)
    with fails_with(errno.ENOENT):
        os.stat(place / "dangling")
    (place / "dangling").write_bytes(b"x")
    assert (place / "nowhere").read_bytes() == b"x"


def test_directories(place: Path) -> None:
    os.mkdir(place / "d", 0o750)
    assert stat.S_IMODE(os.stat(place / "d").st_mode) == 0o750
    with fails_with(errno.EEXIST):
        os.mkdir(place / "d")
    (place / "d" / "f").write_bytes(b"")
    with fails_with(errno.ENOTEMPTY):
        os.rmdir(place / "d")
    with fails_with(errno.ENOTDIR):
        os.rmdir(place / "d" / "f")
    with pytest.raises(IsADirectoryError):
        os.unlink(place / "d")
    os.unlink(place / "d" / "f")
    os.rmdir(place / "d")
    assert not (place / "d").exists()


def test_directory_times_and_links(place: Path) -> None:
    before = os.stat(place)
    (place / "d").mkdir()
    after = os.stat(place)
    assert after.st_nlink == before.st_nlink + 1
    assert after.st_mtime_ns > before.st_mtime_ns


def test_names_as_lmcache_writes_them(place: Path) -> None:
    names = [
        "org-SEP-model@1@0@-3f%2Fe.data",
        "-starts-with-dash",
        "n" * 255,
        "tab\tnewline\n",
        "\udcff\udcfe",
        "blank ",
        "ü" * 127,
    ]
    for name in names:
        (place / name).write_bytes(os.fsencode(name))
    assert sorted(os.listdir(place)) == sorted(names)
    for name in names:
        assert (place / name).read_bytes() == os.fsencode(name)
    with fails_with(errno.ENAMETOOLONG):
        (place / ("n" * 256)).write_bytes(b"")


def test_a_large_directory_lists_every_name_once(place: Path) -> None:
    names = {f"file-{number:05}" for number in range(3000)}
    for name in names:
        os.mknod(place / name)
    assert sorted(os.listdir(place)) == sorted(names)
    seen = []
    with os.scandir(place) as entries:
        for entry in entries:
            seen.append(entry.name)
            if len(seen) == 1000:
                for name in sorted(names)[:500] + sorted(names)[-500:]:
                    os.unlink(place / name)
                (place / "aaa-new").write_bytes(b"")
    kept = sorted(names)[500:-500]
    assert len(seen) == len(set(seen))
    assert set(kept) <= set(seen)
    dots = subprocess.run(["ls", "-a", place], capture_output=True, text=True, check=True).stdout
    assert dots.split()[:2] == [".", ".."]


def test_rewinding_and_seeking_in_a_directory(place: Path) -> None:
    import ctypes

    for number in range(600):
        os.mknod(place / f"{number:03}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir64.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    pointer = ctypes.c_void_p(libc.opendir(os.fsencode(place)))

    def read_name() -> bytes:
        entry = libc.readdir64(pointer)
        return ctypes.string_at(entry + 19) if entry else b""

    first = [read_name() for _ in range(300)]
    position = ctypes.c_long(libc.telldir(pointer))
    rest = [read_name() for _ in range(100)]
    libc.seekdir(pointer, position)
    assert [read_name() for _ in range(100)] == rest
    libc.rewinddir(pointer)
    assert [read_name() for _ in range(300)] == first
    libc.closedir(pointer)
