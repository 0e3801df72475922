"""POSIX, names: every call on every kind of file, and on every kind of wrong path.

A case's id begins with its area, as the areas of pjdfstest are called.
"""

import os
import stat
from collections.abc import Callable

import pytest

from tests.e2e.posix_ground import (
    KINDS,
    OK,
    as_user,
    make,
    needs_root,
    outcome,
    read,
    write,
)

Call = Callable[[str], object]


def _open(flags: int) -> Call:
    return lambda path: os.close(os.open(path, flags, 0o644))


# Calls on a path that must be there, and on one that they make.
ON_EXISTING: dict[str, Call] = {
    "chmod": lambda path: os.chmod(path, 0o640),
    "chown": lambda path: os.chown(path, -1, -1),
    "chown lchown": lambda path: os.chown(path, -1, -1, follow_symlinks=False),
    "link from": lambda path: os.link(path, "linked", follow_symlinks=False),
    "open reading": _open(os.O_RDONLY | os.O_NONBLOCK),
    "open nofollow": _open(os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW),
    "open directory": _open(os.O_RDONLY | os.O_DIRECTORY),
    "open truncating": _open(os.O_WRONLY | os.O_NONBLOCK | os.O_TRUNC),
    "rename from": lambda path: os.rename(path, "renamed"),
    "rmdir": os.rmdir,
    "truncate": lambda path: os.truncate(path, 2),
    "unlink": os.unlink,
    "utimensat": lambda path: os.utime(path, ns=(1, 1)),
    "utimensat nofollow": lambda path: os.utime(path, ns=(1, 1), follow_symlinks=False),
    "stat": os.stat,
    "stat lstat": os.lstat,
    "stat listdir": os.listdir,
    "symlink readlink": os.readlink,
    "stat chdir": lambda path: os.close(os.open(path, os.O_PATH | os.O_DIRECTORY)),
}
MAKING: dict[str, Call] = {
    "link to": lambda path: os.link("something", path),
    "mkdir": os.mkdir,
    "mkfifo": os.mkfifo,
    "mknod": lambda path: os.mknod(path, stat.S_IFREG | 0o600),
    "mknod device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    "open exclusive": _open(os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "symlink": lambda path: os.symlink("something", path),
}
RENAMING: dict[str, Call] = {"rename to": lambda path: os.rename("something", path)}
ALL = ON_EXISTING | MAKING | RENAMING

# What a call does to a kind, where it is not "ok". `mount:` where the mount differs: it is mounted
# nodev, as libfuse does, so devices cannot be opened.
_NOT_A_DIRECTORY = dict.fromkeys(("file", "fifo", "socket", "char", "block", "link"), "ENOTDIR")
_DANGLING = {"dangling": "ENOENT"}
_SPECIAL_EINVAL = dict.fromkeys(("fifo", "socket", "char", "block"), "EINVAL")
_DEVICES = {"block": "ENXIO", "mount:char": "EACCES", "mount:block": "EACCES"}
ON_KIND: dict[str, dict[str, str]] = {
    "chmod": _DANGLING,
    "chown": _DANGLING,
    "link from": {"dir": "EPERM", "full": "EPERM"},
    "open reading": {"socket": "ENXIO", **_DANGLING, **_DEVICES},
    "open nofollow": {"socket": "ENXIO", "link": "ELOOP", "dangling": "ELOOP", **_DEVICES},
    "open directory": {**_NOT_A_DIRECTORY, **_DANGLING},
    "open truncating": {
        "dir": "EISDIR", "full": "EISDIR", "fifo": "ENXIO", "socket": "ENXIO",
        **_DANGLING, **_DEVICES,
    },
    "rmdir": {**_NOT_A_DIRECTORY, "dangling": "ENOTDIR", "full": "ENOTEMPTY"},
    "truncate": {"dir": "EISDIR", "full": "EISDIR", **_SPECIAL_EINVAL, **_DANGLING},
    "unlink": {"dir": "EISDIR", "full": "EISDIR"},
    "utimensat": _DANGLING,
    "stat": _DANGLING,
    "stat listdir": {**_NOT_A_DIRECTORY, **_DANGLING},
    "stat chdir": {**_NOT_A_DIRECTORY, **_DANGLING},
    "symlink readlink": {
        "file": "EINVAL", "dir": "EINVAL", "full": "EINVAL", **_SPECIAL_EINVAL,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ON_EXISTING)
@needs_root
def test_on_every_kind(ground: str, name: str, kind: str) -> None:
    make(kind, "a")
    table = ON_KIND.get(name, {})
    expected = table.get(kind, OK)
    if ground == "mount":
        expected = table.get(f"mount:{kind}", expected)
    assert outcome(lambda: ON_EXISTING[name]("a")) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKING)
@needs_root
def test_nothing_is_made_over_what_is_there(ground: str, name: str, kind: str) -> None:
    make(kind, "a")
    write("something", b"something")
    before = os.lstat("a")
    assert outcome(lambda: MAKING[name]("a")) == "EEXIST"
    assert os.path.samestat(os.lstat("a"), before)
    assert os.lstat("something").st_nlink == 1


@pytest.mark.parametrize("name", MAKING)
@needs_root
def test_what_is_made_is_there_and_listed(ground: str, name: str) -> None:
    write("something", b"something")
    MAKING[name]("a")
    assert sorted(os.listdir()) == ["a", "something"]
    status = os.lstat("a")
    assert status.st_nlink == {"link to": 2, "mkdir": 2}.get(name, 1)
    assert stat.S_IFMT(status.st_mode) == {
        "mkdir": stat.S_IFDIR,
        "mkfifo": stat.S_IFIFO,
        "mknod device": stat.S_IFCHR,
        "symlink": stat.S_IFLNK,
    }.get(name, stat.S_IFREG)
    if name == "mknod device":
        assert status.st_rdev == os.makedev(1, 3)


# Wrong paths --------------------------------------------------------------------------------------
WRONG_PATHS = {
    "empty": ("", "ENOENT"),
    "below a file": ("something/x", "ENOTDIR"),
    "below nothing": ("none/x", "ENOENT"),
    "below a dangling link": ("dangling/x", "ENOENT"),
    "below a loop": ("loop/x", "ELOOP"),
    "name of 256 bytes": ("n" * 256, "ENAMETOOLONG"),
    "below a name of 256 bytes": ("n" * 256 + "/x", "ENAMETOOLONG"),
    "256 bytes in 2-byte letters": ("ü" * 128, "ENAMETOOLONG"),
    "path of 4096 bytes": ("./" * 2047 + "xx", "ENAMETOOLONG"),
}


@pytest.mark.parametrize("wrong", WRONG_PATHS)
@pytest.mark.parametrize("name", ALL)
@needs_root
def test_wrong_paths(ground: str, name: str, wrong: str) -> None:
    path, expected = WRONG_PATHS[wrong]
    write("something", b"something")
    os.symlink("nowhere", "dangling")
    os.symlink("loop", "loop")
    before = sorted(os.listdir())
    assert outcome(lambda: ALL[name](path)) == expected
    assert sorted(os.listdir()) == before


_FOLLOWING = (
    "chmod", "chown", "open reading", "open directory", "open truncating", "truncate", "utimensat",
    "stat", "stat listdir", "stat chdir",
)  # fmt: skip


@pytest.mark.parametrize("name", _FOLLOWING)
def test_a_loop_of_links_is_eloop(ground: str, name: str) -> None:
    os.symlink("b", "a")
    os.symlink("a", "b")
    assert outcome(lambda: ALL[name]("a")) == "ELOOP"


@pytest.mark.parametrize("length", [1, 254, 255])
@pytest.mark.parametrize("name", MAKING)
@needs_root
def test_names_up_to_255_bytes(ground: str, name: str, length: int) -> None:
    write("something", b"something")
    MAKING[name]("n" * length)
    assert sorted(os.listdir()) == sorted(["n" * length, "something"])


@pytest.mark.parametrize("name", ["mkdir", "open exclusive", "symlink"])
def test_a_path_of_4095_bytes(ground: str, name: str) -> None:
    write("something", b"something")
    MAKING[name]("./" * 2047 + "x")
    assert os.path.lexists("x")


ODD_NAMES = [
    b"\xff\xfe\x80", b"\xc3\x28", b"tab\tnew\nline", b" ", b"...", b"-rf", b"a\\b", b'"', b"'",
    b"\x01\x7f", b"%s%n", "é".encode("latin-1"), "e\u0301".encode(), "\u00e9".encode(),
    "模型".encode(), "模".encode() * 85, bytes(range(1, 47)) + bytes(range(48, 256)), b".kvfs.x",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_NAMES, ids=lambda odd: f"open name {odd[:12]!r}")
def test_names_in_any_encoding(ground: str, odd: bytes) -> None:
    name = os.fsdecode(odd)
    write(name, odd)
    assert os.listdir(b".") == [odd]
    assert read(name) == odd
    os.rename(name, "plain")
    os.rename("plain", name)
    os.link(name, "second")
    os.unlink(name)
    assert os.listdir(b".") == [b"second"]
    os.mkdir(name)
    write(f"{name}/{name}", b"deep")
    assert read(f"{name}/{name}") == b"deep"
    os.symlink(name, "to")
    assert os.fsencode(os.readlink("to")) == odd


def test_names_that_differ_in_form_only_are_two(ground: str) -> None:
    names = [b"A", b"a", "\u00e9".encode(), "e\u0301".encode()]
    for name in names:
        write(os.fsdecode(name), name)
    assert sorted(os.listdir(b".")) == sorted(names)
    for name in names:
        assert read(os.fsdecode(name)) == name


# As another user ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*ON_EXISTING, *MAKING, *RENAMING])
@needs_root
def test_a_directory_that_may_not_be_entered(ground: str, name: str) -> None:
    os.mkdir("locked")
    write("locked/a", b"data", 0o666)
    write("something", b"something", 0o666)
    os.chown("something", 65534, 65534)
    os.chmod("locked", 0o600)
    assert as_user(lambda: ALL[name]("locked/a")) == "EACCES"


@pytest.mark.parametrize("name", [*MAKING, *RENAMING, "rename from", "rmdir", "unlink"])
@needs_root
def test_a_directory_that_may_not_be_changed(ground: str, name: str) -> None:
    os.mkdir("fixed", 0o755)
    makes = name in MAKING or name in RENAMING
    if name == "rmdir":
        os.mkdir("fixed/a")
    elif not makes:
        write("fixed/a", b"data")
    write("something", b"something")
    os.chown("something", 65534, 65534)
    expected = "EACCES"
    if name == "mknod device":
        expected = "EPERM"  # whatever the directory says: devices are for root
        os.chmod("fixed", 0o777)
    assert as_user(lambda: ALL[name]("fixed/a")) == expected


@pytest.mark.parametrize("name", ["chmod", "chown", "utimensat"])
@needs_root
def test_what_only_an_owner_may_do(ground: str, name: str) -> None:
    write("a", b"data", 0o666)
    os.chmod("a", 0o666)
    calls: dict[str, Call] = {**ALL, "chown": lambda path: os.chown(path, 65534, -1)}
    assert as_user(lambda: calls[name]("a")) == "EPERM"
