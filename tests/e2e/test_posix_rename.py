"""POSIX, rename: every kind over every kind, directories, flags, sticky directories, open files."""

import ctypes
import os

import pytest

from tests.e2e.calls import rename_with
from tests.e2e.posix_ground import (
    KINDS,
    OK,
    OTHER,
    USER,
    as_user,
    make,
    needs_root,
    outcome,
    read,
    write,
)

NO_REPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
_AT_SYMLINK_FOLLOW = 0x400
DIRECTORIES = ("dir", "full")
_libc = ctypes.CDLL(None, use_errno=True)


def link_open(fd: int, new: str) -> None:
    """Give an open file another name; Python's os.link does not follow links."""
    old = f"/proc/self/fd/{fd}".encode()
    if _libc.linkat(-100, old, -100, os.fsencode(new), _AT_SYMLINK_FOLLOW):
        raise OSError(ctypes.get_errno(), "linkat")


def rule(source: str, target: str) -> str:
    """What POSIX says of a rename of one kind over another."""
    if target == "none":
        return OK
    if source in DIRECTORIES:
        return {"dir": OK, "full": "ENOTEMPTY"}.get(target, "ENOTDIR")
    return "EISDIR" if target in DIRECTORIES else OK


@pytest.mark.parametrize("place", ["same", "other"])
@pytest.mark.parametrize("target", ["none", *KINDS])
@pytest.mark.parametrize("source", KINDS)
@needs_root
def test_rename_a_kind_over_a_kind(ground: str, source: str, target: str, place: str) -> None:
    os.mkdir("there")
    make(source, "a")
    new = "b" if place == "same" else "there/b"
    make(target, new)
    moved = os.lstat("a")
    expected = rule(source, target)
    assert outcome(lambda: os.rename("a", new)) == expected
    if expected == OK:
        assert os.path.samestat(os.lstat(new), moved)
        assert not os.path.lexists("a")
        assert os.lstat(new).st_nlink == moved.st_nlink
        assert os.listdir("b" if place == "same" else "there/b") if source == "full" else True
    else:
        assert os.path.samestat(os.lstat("a"), moved)
        assert os.path.lexists(new)


@pytest.mark.parametrize("target", ["none", "file", "dir", "full", "link"])
@pytest.mark.parametrize("source", ["file", "dir", "full", "link"])
@pytest.mark.parametrize(
    "flags", [NO_REPLACE, EXCHANGE], ids=["rename noreplace", "rename exchange"]
)
@needs_root
def test_rename_with_flags(ground: str, flags: int, source: str, target: str) -> None:
    make(source, "a")
    make(target, "b")
    first = os.lstat("a")
    second = None if target == "none" else os.lstat("b")
    result = outcome(lambda: rename_with("a", "b", flags))
    if flags == NO_REPLACE:
        assert result == (OK if target == "none" else "EEXIST")
    else:
        assert result == ("ENOENT" if target == "none" else OK)
        if second is not None:
            assert os.path.samestat(os.lstat("a"), second)
            assert os.path.samestat(os.lstat("b"), first)


def test_rename_whiteouts_are_refused(ground: str) -> None:
    write("a", b"data")
    result = outcome(lambda: rename_with("a", "b", WHITEOUT))
    assert result == ("EINVAL" if ground == "mount" else OK)  # ext4 knows them, for overlayfs
    assert read("a" if ground == "mount" else "b") == b"data"


WAYS = {
    "into itself": ("d", "d/x", "EINVAL"),
    "below itself": ("d", "d/e/x", "EINVAL"),
    "over its child": ("d", "d/e", "EINVAL"),
    "over its parent": ("d/e", "d", "ENOTEMPTY"),
    "over the parent of its parent": ("d/e/f", "d", "ENOTEMPTY"),
    "a file over its directory": ("d/file", "d", "ENOTEMPTY"),
    "to itself": ("d", "d", OK),
    "to itself by another path": ("d", "d/../d", OK),
    "a file to itself": ("a", "a", OK),
    "of dot": ("d/.", "x", "EBUSY"),
    "of dot dot": ("d/..", "x", "EBUSY"),
    "to dot": ("d", "e/.", "EBUSY"),
    "to dot dot": ("d", "e/..", "EBUSY"),
    "a file with a slash": ("a/", "x", "ENOTDIR"),
    "a file to a name with a slash": ("a", "x/", "ENOTDIR"),
    "a directory with slashes": ("d/", "x/", OK),
    "to a name of 256 bytes": ("a", "n" * 256, "ENAMETOOLONG"),
    "a link to a directory with a slash": ("to", "x/", "ENOTDIR"),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"rename {way}")
def test_rename_ways(ground: str, way: str) -> None:
    os.makedirs("d/e/f")
    os.mkdir("e")
    write("d/file", b"deep")
    write("a", b"data")
    os.symlink("e", "to")
    old, new, expected = WAYS[way]
    assert outcome(lambda: os.rename(old, new)) == expected
    if expected != OK:
        assert sorted(os.listdir()) == ["a", "d", "e", "to"]
        assert sorted(os.listdir("d")) == ["e", "file"]


def test_rename_over_a_link_of_the_same_file_does_nothing(ground: str) -> None:
    write("a", b"data")
    os.link("a", "b")
    os.rename("a", "b")
    assert sorted(os.listdir()) == ["a", "b"]
    assert os.stat("a").st_nlink == 2


def test_rename_moves_dot_dot_and_counts(ground: str) -> None:
    for name in ("a", "b", "a/d"):
        os.mkdir(name)
    os.rename("a/d", "b/d")
    assert os.path.samefile("b/d/..", "b")
    assert (os.stat("a").st_nlink, os.stat("b").st_nlink) == (2, 3)
    os.mkdir("a/d")
    os.rename("a/d", "b/d")
    assert (os.stat("a").st_nlink, os.stat("b").st_nlink) == (2, 3)


@needs_root
def test_rename_of_a_directory_to_another_needs_writing_in_it(ground: str) -> None:
    for name in ("a", "b"):
        os.mkdir(name)
        os.chmod(name, 0o777)
    os.mkdir("a/d", 0o755)
    assert as_user(lambda: os.rename("a/d", "b/d")) == "EACCES"
    assert as_user(lambda: os.rename("a/d", "a/e")) == OK


# Who may take a name from a sticky directory, as USER: owner of the directory, owner of the file.
STICKY = [
    (USER, USER, OK),
    (USER, 0, OK),
    (USER, OTHER, OK),
    (0, USER, OK),
    (OTHER, USER, OK),
    (0, 0, "EPERM"),
    (0, OTHER, "EPERM"),
    (OTHER, OTHER, "EPERM"),
    (OTHER, 0, "EPERM"),
]
TAKING = {
    "unlink sticky": lambda: os.unlink("sticky/a"),
    "rename sticky from": lambda: os.rename("sticky/a", "free/b"),
    "rename sticky over": lambda: os.rename("free/mine", "sticky/a"),
    "rename sticky within": lambda: os.rename("sticky/a", "sticky/b"),
}


@pytest.mark.parametrize(("directory", "file", "expected"), STICKY)
@pytest.mark.parametrize("way", TAKING)
@needs_root
def test_sticky_directories(
    ground: str, way: str, directory: int, file: int, expected: str
) -> None:
    os.mkdir("free")
    os.chmod("free", 0o777)
    write("free/mine", b"mine")
    os.chown("free/mine", USER, USER)
    os.mkdir("sticky")
    write("sticky/a", b"data")
    os.chown("sticky/a", file, file)
    os.chown("sticky", directory, directory)
    os.chmod("sticky", 0o1777)
    assert as_user(TAKING[way]) == expected


@pytest.mark.parametrize(("directory", "file", "expected"), STICKY)
@needs_root
def test_rmdir_in_sticky_directories(ground: str, directory: int, file: int, expected: str) -> None:
    os.makedirs("sticky/d")
    os.chown("sticky/d", file, file)
    os.chown("sticky", directory, directory)
    os.chmod("sticky", 0o1777)
    assert as_user(lambda: os.rmdir("sticky/d")) == expected


# Open files ---------------------------------------------------------------------------------------
def test_rename_over_an_open_file_leaves_its_reader(ground: str) -> None:
    write("a", b"old")
    write("b", b"new")
    reader = os.open("a", os.O_RDONLY)
    os.rename("b", "a")
    assert os.pread(reader, 9, 0) == b"old"
    assert os.fstat(reader).st_nlink == 0
    assert read("a") == b"new"
    os.close(reader)


def test_rename_over_a_file_that_is_written(ground: str) -> None:
    write("b", b"new")
    writer = os.open("a", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"written")
    os.rename("b", "a")
    os.write(writer, b" on")
    assert os.pread(writer, 20, 0) == b"written on"
    os.close(writer)
    assert read("a") == b"new"
    assert os.listdir() == ["a"]


def test_rename_of_a_file_that_is_written(ground: str) -> None:
    writer = os.open("a", os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"one")
    os.rename("a", "b")
    os.write(writer, b"two")
    os.close(writer)
    assert read("b") == b"onetwo"
    assert not os.path.exists("a")


def test_rename_of_a_directory_with_open_files(ground: str) -> None:
    os.makedirs("d/e")
    writer = os.open("d/e/a", os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"one")
    os.rename("d", "moved")
    os.write(writer, b"two")
    os.close(writer)
    assert read("moved/e/a") == b"onetwo"


def test_unlink_while_open(ground: str) -> None:
    writer = os.open("a", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"data")
    os.unlink("a")
    assert os.fstat(writer).st_nlink == 0
    assert os.listdir() == []
    write("a", b"another")
    os.write(writer, b" more")
    os.ftruncate(writer, 7)
    assert os.pread(writer, 20, 0) == b"data mo"
    os.fchmod(writer, 0o600)
    os.fsync(writer)
    os.close(writer)
    assert read("a") == b"another"


def test_unlink_keeps_other_links(ground: str) -> None:
    write("a", b"data")
    os.link("a", "b")
    os.link("b", "c")
    assert os.stat("a").st_nlink == 3
    os.unlink("b")
    assert os.stat("a").st_nlink == os.stat("c").st_nlink == 2
    os.unlink("a")
    assert os.stat("c").st_nlink == 1
    assert read("c") == b"data"


def test_link_of_an_open_unlinked_file_is_refused(ground: str) -> None:
    write("a", b"data")
    fd = os.open("a", os.O_RDONLY)
    os.unlink("a")
    assert outcome(lambda: link_open(fd, "b")) == "ENOENT"
    os.close(fd)


def test_rmdir_of_a_directory_that_is_in_use(ground: str) -> None:
    os.mkdir("d")
    fd = os.open("d", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir("d")
    assert os.listdir(fd) == []
    assert outcome(lambda: os.mkdir("x", dir_fd=fd)) == "ENOENT"
    assert outcome(lambda: os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd))) == "ENOENT"
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


RMDIR = {
    "dot": ("d/.", "EINVAL"),
    "dot dot": ("d/e/..", "ENOTEMPTY"),
    "a slash behind": ("d/e/", OK),
    "a link with a slash": ("to/", "ENOTDIR"),
    "nothing": ("none", "ENOENT"),
}


@pytest.mark.parametrize("way", RMDIR, ids=lambda way: f"rmdir {way}")
def test_rmdir_ways(ground: str, way: str) -> None:
    os.makedirs("d/e")
    os.symlink("d/e", "to")
    path, expected = RMDIR[way]
    assert outcome(lambda: os.rmdir(path)) == expected
