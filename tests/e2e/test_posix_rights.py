"""POSIX, rights: modes, owners, and who may do what."""

import ctypes
import mmap
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.posix_ground import (
    OK,
    OTHER,
    USER,
    as_user,
    make,
    mode_of,
    needs_root,
    outcome,
    owner_of,
    read,
    write,
)

MODES = (0o000, 0o111, 0o222, 0o444, 0o640, 0o755, 0o1777, 0o2755, 0o4711, 0o6755, 0o7777)
_libc = ctypes.CDLL(None, use_errno=True)


# chmod --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"chmod {mode:o}")
@pytest.mark.parametrize("kind", ["file", "dir", "fifo", "socket", "char"])
@needs_root
def test_chmod(ground: str, kind: str, mode: int) -> None:
    make(kind, "a")
    os.chmod("a", mode)
    assert mode_of("a") == mode
    os.symlink("a", "to")
    os.chmod("to", 0o700)
    assert mode_of("a") == 0o700


@needs_root
def test_chmod_of_an_open_file(ground: str) -> None:
    write("a", b"data")
    os.chown("a", USER, USER)
    fd = os.open("a", os.O_RDWR)
    os.fchmod(fd, 0)
    assert as_user(lambda: os.open("a", os.O_RDONLY)) == "EACCES"
    assert os.pread(fd, 9, 0) == b"data"
    os.pwrite(fd, b"more", 0)
    os.close(fd)
    assert read("a") == b"more"


def chmod_result(uid: int, groups: tuple[int, ...], mode: int) -> int:
    """The mode after its owner USER sets one on a file of group `uid`."""
    write("a", b"data")
    os.chown("a", USER, uid)
    assert as_user(lambda: os.chmod("a", mode), groups=groups) == OK
    return mode_of("a")


@needs_root
def test_chmod_setgid_needs_the_group(ground: str) -> None:
    assert chmod_result(OTHER, (), 0o2755) == 0o755
    assert chmod_result(OTHER, (OTHER,), 0o2755) == 0o2755
    assert chmod_result(USER, (), 0o2755) == 0o2755


@needs_root
def test_chmod_of_anothers_file(ground: str) -> None:
    write("a", b"data", 0o666)
    before = mode_of("a")
    assert as_user(lambda: os.chmod("a", 0o777)) == "EPERM"
    assert mode_of("a") == before


# chown --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["file", "dir", "fifo", "socket", "char"])
@needs_root
def test_chown(ground: str, kind: str) -> None:
    make(kind, "a")
    os.chown("a", 123, 456)
    assert owner_of("a") == (123, 456)
    os.chown("a", -1, 7)
    os.chown("a", 8, -1)
    assert owner_of("a") == (8, 7)
    os.chown("a", 2**32 - 2, 2**32 - 2)
    assert owner_of("a") == (2**32 - 2, 2**32 - 2)


@needs_root
def test_chown_of_a_link_and_through_it(ground: str) -> None:
    make("link", "to")
    os.chown("to", 1, 1, follow_symlinks=False)
    assert (owner_of("to"), owner_of("to.target")) == ((1, 1), (0, 0))
    os.chown("to", 2, 2)
    assert (owner_of("to"), owner_of("to.target")) == ((1, 1), (2, 2))


CHOWN_AS_USER = [
    ("to itself", (USER, -1), (), OK),
    ("to a group of its own", (-1, OTHER), (OTHER,), OK),
    ("to its main group", (-1, USER), (), OK),
    ("to a group that it is not in", (-1, OTHER), (), "EPERM"),
    ("to another user", (OTHER, -1), (OTHER,), "EPERM"),
    ("to root", (0, 0), (), "EPERM"),
]


@pytest.mark.parametrize("case", CHOWN_AS_USER, ids=lambda case: f"chown {case[0]}")
@needs_root
def test_chown_as_a_user(
    ground: str, case: tuple[str, tuple[int, int], tuple[int, ...], str]
) -> None:
    _, (uid, gid), groups, expected = case
    write("a", b"data")
    os.chown("a", USER, USER)
    assert as_user(lambda: os.chown("a", uid, gid), groups=groups) == expected
    assert as_user(lambda: os.chown("a", uid, gid), uid=OTHER, groups=groups) == "EPERM"


@pytest.mark.parametrize(
    ("before", "after"), [(0o6755, 0o755), (0o4755, 0o755), (0o2755, 0o755), (0o2745, 0o2745)]
)
@pytest.mark.parametrize("who", ["chown by its owner", "chown by root"])
@needs_root
def test_chown_clears_setuid(ground: str, who: str, before: int, after: int) -> None:
    write("a", b"data")
    os.chown("a", USER, USER)
    os.chmod("a", before)
    if who == "chown by root":
        os.chown("a", OTHER, OTHER)
        assert mode_of("a") == after
    else:
        assert as_user(lambda: os.chown("a", -1, OTHER), groups=(OTHER,)) == OK
        assert mode_of("a") & 0o4000 == 0


CHANGES: dict[str, Callable[[], object]] = {
    "write": lambda: Path("a").write_bytes(b"other"),
    "truncate": lambda: os.truncate("a", 1),
    "open truncating": lambda: os.close(os.open("a", os.O_WRONLY | os.O_TRUNC)),
}


@pytest.mark.parametrize("way", CHANGES)
@needs_root
def test_changing_bytes_clears_setuid(ground: str, way: str) -> None:
    write("a", b"data")
    os.chmod("a", 0o6777)
    assert as_user(CHANGES[way]) == OK
    assert mode_of("a") == 0o777


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
@needs_root
def test_writing_what_one_made_clears_setuid(ground: str, flags: int) -> None:
    def write_aligned() -> None:
        fd = os.open("new", os.O_WRONLY | os.O_CREAT | flags)
        os.fchmod(fd, 0o6777)
        with mmap.mmap(-1, 4096) as page:
            assert os.write(fd, page) == 4096
        assert mode_of("new") == 0o777
        os.close(fd)

    assert as_user(write_aligned) == OK
    assert mode_of("new") == 0o777


# Who may do what ----------------------------------------------------------------------------------
ACTORS = {"owner": (USER, ()), "group": (OTHER, (4321,)), "others": (OTHER, ())}


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("actor", ACTORS)
@needs_root
def test_open_needs_the_bit_of_its_class(ground: str, actor: str, bits: int) -> None:
    shift = {"owner": 6, "group": 3, "others": 0}[actor]
    mode = 0o777 & ~(7 << shift) | bits << shift  # everybody else has every right
    write("a", b"data")
    os.chown("a", USER, 4321)
    os.chmod("a", mode)
    uid, groups = ACTORS[actor]
    needed = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6, os.O_WRONLY | os.O_TRUNC: 2}
    for flags, bit in needed.items():
        expected = OK if bits & bit == bit else "EACCES"
        assert as_user(lambda f=flags: os.open("a", f), uid, OTHER, groups) == expected, flags
    for bit in (4, 2, 1):
        expected = OK if bits & bit else "EACCES"
        assert as_user(lambda b=bit: check_access("a", b), uid, OTHER, groups) == expected


def check_access(path: str, bit: int) -> None:
    """access(2), as an error."""
    if _libc.access(os.fsencode(path), bit):
        raise OSError(ctypes.get_errno(), "access")


DIRECTORY_CALLS: list[tuple[str, int, Callable[[], object]]] = [
    ("stat listdir", 4, lambda: os.listdir("d")),
    ("stat", 1, lambda: os.stat("d/a")),
    ("open reading", 1, lambda: os.open("d/a", os.O_RDONLY)),
    ("open creating", 3, lambda: os.open("d/b", os.O_WRONLY | os.O_CREAT)),
    ("open tolerant", 1, lambda: os.open("d/a", os.O_WRONLY | os.O_CREAT)),
    ("mkdir", 3, lambda: os.mkdir("d/c")),
    ("mkfifo", 3, lambda: os.mkfifo("d/f")),
    ("symlink", 3, lambda: os.symlink("x", "d/s")),
    ("link to", 3, lambda: os.link("mine", "d/l")),
    ("rename to", 3, lambda: os.rename("mine", "d/m")),
    ("unlink", 3, lambda: os.unlink("d/a")),
    ("rename from", 3, lambda: os.rename("d/a", "taken")),
    ("rmdir", 3, lambda: os.rmdir("d/e")),
]


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("case", DIRECTORY_CALLS, ids=lambda case: case[0])
@needs_root
def test_a_directory_needs_bits(
    ground: str, case: tuple[str, int, Callable[[], object]], bits: int
) -> None:
    _, needed, call = case
    os.makedirs("d/e")
    write("d/a", b"data")
    os.chmod("d/a", 0o666)
    write("mine", b"mine")
    os.chown("mine", USER, USER)
    os.chmod("d", 0o770 | bits)
    assert as_user(call) == (OK if bits & needed == needed else "EACCES")


@needs_root
def test_open_creating_gives_what_the_mode_does_not(ground: str) -> None:
    def create() -> None:
        fd = os.open("a", os.O_RDWR | os.O_CREAT, 0)
        assert os.write(fd, b"data") == 4
        assert os.pread(fd, 9, 0) == b"data"
        os.close(fd)

    assert as_user(create) == OK
    assert mode_of("a") == 0
    assert as_user(lambda: os.open("a", os.O_RDONLY)) == "EACCES"
    assert read("a") == b"data"


@pytest.mark.parametrize("bits", [0o777, 0o077, 0o022, 0], ids=lambda bits: f"umask {bits:o}")
@needs_root
def test_umask(ground: str, bits: int) -> None:
    os.umask(bits)
    os.close(os.open("a", os.O_WRONLY | os.O_CREAT, 0o666))
    os.mkdir("d", 0o777)
    os.mkfifo("f", 0o666)
    os.mknod("n", stat.S_IFREG | 0o666)
    assert [mode_of(name) for name in "adfn"] == [
        mode & ~bits for mode in (0o666, 0o777, 0o666, 0o666)
    ]


@needs_root
def test_new_files_belong_to_who_makes_them(ground: str) -> None:
    for name in ("file", "dir", "fifo", "socket", "link"):
        assert as_user(lambda n=name: make(n, n), USER, OTHER) == OK
        assert owner_of(name) == (USER, OTHER)


@needs_root
def test_a_setgid_directory_gives_its_group(ground: str) -> None:
    os.mkdir("d")
    os.chown("d", 0, 4321)
    os.chmod("d", 0o2777)
    for name in ("file", "dir", "fifo", "link"):
        assert as_user(lambda n=name: make(n, f"d/{n}")) == OK
        assert owner_of(f"d/{name}") == (USER, 4321)
    assert mode_of("d/dir") & stat.S_ISGID
    assert not mode_of("d/file") & stat.S_ISGID
    assert as_user(lambda: os.mkdir("d/dir/below")) == OK
    assert owner_of("d/dir/below") == (USER, 4321)


def test_a_program_that_runs_is_not_written(ground: str) -> None:
    write("sleep", Path("/bin/sleep").read_bytes(), 0o755)
    with subprocess.Popen(["./sleep", "30"]) as program:
        try:
            assert outcome(lambda: os.open("sleep", os.O_WRONLY)) == "ETXTBSY"
        finally:
            program.kill()


def test_a_file_that_is_written_is_not_run(ground: str) -> None:
    write("true", Path("/bin/true").read_bytes(), 0o755)
    fd = os.open("true", os.O_WRONLY)
    assert outcome(lambda: subprocess.run(["./true"], check=True)) == "ETXTBSY"
    os.close(fd)
    subprocess.run(["./true"], check=True)
