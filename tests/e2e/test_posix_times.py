"""POSIX, times: which call changes which of them, and what utimensat sets."""

import ctypes
import os
import stat
import time
from collections.abc import Callable

import pytest

from tests.e2e.posix_ground import OK, USER, as_user, needs_root, outcome, read, write

_libc = ctypes.CDLL(None, use_errno=True)


def changed(paths: list[str], call: Callable[[], object]) -> list[str]:
    """Which times of which files a call changes: "a" + "amc" of what moved."""
    for path in paths:
        os.utime(path, ns=(10**18 + 1, 10**18 + 2), follow_symlinks=False)
    before = [os.lstat(path) for path in paths]
    time.sleep(0.012)  # a kernel's clock for files has ticks of up to 10 ms
    call()
    return [_moved(old, os.lstat(path)) for path, old in zip(paths, before, strict=True)]


def _moved(old: os.stat_result, new: os.stat_result) -> str:
    names = {"a": "st_atime_ns", "m": "st_mtime_ns", "c": "st_ctime_ns"}
    assert all(getattr(new, name) >= getattr(old, name) for name in names.values())
    return "".join(
        letter for letter, name in names.items() if getattr(new, name) != getattr(old, name)
    )


def _append() -> None:
    with open("d/a", "ab") as file:
        file.write(b"more")


def _open_truncating() -> None:
    os.close(os.open("d/a", os.O_WRONLY | os.O_TRUNC))


TIMES: dict[str, tuple[list[str], Callable[[], object], list[str]]] = {
    "chmod": (["d/a", "d"], lambda: os.chmod("d/a", 0o600), ["c", ""]),
    "chown": (["d/a", "d"], lambda: os.chown("d/a", 1, 1), ["c", ""]),
    "write": (["d/a", "d"], _append, ["mc", ""]),
    "truncate": (["d/a", "d"], lambda: os.truncate("d/a", 1), ["mc", ""]),
    "truncate longer": (["d/a", "d"], lambda: os.truncate("d/a", 9), ["mc", ""]),
    "open truncating": (["d/a"], _open_truncating, ["mc"]),
    "open creating": (["d"], lambda: write("d/b", b""), ["mc"]),
    "open existing": (["d/a", "d"], lambda: os.close(os.open("d/a", os.O_RDWR)), ["", ""]),
    "link": (["d/a", "d", "e"], lambda: os.link("d/a", "e/l"), ["c", "", "mc"]),
    "unlink": (["d/a2", "d"], lambda: os.unlink("d/a"), ["c", "mc"]),
    "rename": (["d", "e"], lambda: os.rename("d/a", "e/a"), ["mc", "mc"]),
    "rename within": (["d"], lambda: os.rename("d/a", "d/b"), ["mc"]),
    "rename over": (["d", "e/a2"], lambda: os.rename("d/f", "e/a"), ["mc", "c"]),
    "mkdir": (["d"], lambda: os.mkdir("d/new"), ["mc"]),
    "mkfifo": (["d"], lambda: os.mkfifo("d/new"), ["mc"]),
    "mknod": (["d"], lambda: os.mknod("d/new", stat.S_IFREG), ["mc"]),
    "symlink": (["d"], lambda: os.symlink("x", "d/new"), ["mc"]),
    "rmdir": (["d"], lambda: os.rmdir("d/sub"), ["mc"]),
    "utimensat": (["d/a"], lambda: os.utime("d/a", ns=(5, 6)), ["amc"]),
    "stat": (["d/a", "d"], lambda: (os.stat("d/a"), os.access("d/a", 4)), ["", ""]),
}


@pytest.mark.parametrize("name", TIMES)
@needs_root
def test_times(ground: str, name: str) -> None:
    os.makedirs("d/sub")
    os.mkdir("e")
    for path in ("d/a", "d/f", "e/a"):
        write(path, b"data")
    if name == "unlink":
        os.link("d/a", "d/a2")
    if name == "rename over":
        os.link("e/a", "e/a2")
    paths, call, expected = TIMES[name]
    if name == "utimensat":  # it sets older ones
        old = os.stat("d/a")
        time.sleep(0.012)
        call()
        new = os.stat("d/a")
        assert (new.st_atime_ns, new.st_mtime_ns) == (5, 6)
        assert new.st_ctime_ns > old.st_ctime_ns
        return
    assert changed(paths, call) == expected


FAILING: dict[str, Callable[[], object]] = {
    "chmod": lambda: os.chmod("d/a", 0o777),
    "chown": lambda: os.chown("d/a", USER, USER),
    "truncate": lambda: os.truncate("d/a", 1),
    "unlink": lambda: os.unlink("d/a"),
    "rename": lambda: os.rename("d/a", "d/b"),
    "link": lambda: os.link("d/a", "d/b"),
    "mkdir": lambda: os.mkdir("d/new"),
    "utimensat": lambda: os.utime("d/a", ns=(5, 5)),
}


@pytest.mark.parametrize("name", FAILING)
@needs_root
def test_what_fails_changes_no_time(ground: str, name: str) -> None:
    os.mkdir("d")
    write("d/a", b"data")
    os.chmod("d/a", 0o644)
    assert changed(["d/a", "d"], lambda: as_user(FAILING[name])) == ["", ""]


def test_reading_moves_no_access_time_in_the_mount(ground: str) -> None:
    write("a", b"data")
    os.utime("a", ns=(10**9, 10**18))
    read("a")
    moved = os.stat("a").st_atime_ns != 10**9
    assert moved == (ground == "plain")  # the mount is as mounted with noatime


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


NOW, OMIT = 2**30 - 1, 2**30 - 2


def utimensat(path: str, access: int, change: int) -> None:
    """utimensat(2) with nanoseconds that may be NOW or OMIT, and seconds of 0."""
    times = (_Timespec * 2)(_Timespec(0, access), _Timespec(0, change))
    if _libc.utimensat(-100, os.fsencode(path), times, 0):
        raise OSError(ctypes.get_errno(), "utimensat")


def test_utimensat_now_and_omit(ground: str) -> None:
    write("a", b"data")
    os.utime("a", ns=(1, 2))
    utimensat("a", OMIT, 77)
    assert (os.stat("a").st_atime_ns, os.stat("a").st_mtime_ns) == (1, 77)
    utimensat("a", 88, OMIT)
    assert (os.stat("a").st_atime_ns, os.stat("a").st_mtime_ns) == (88, 77)
    begin_ns = time.time_ns() - 20_000_000
    utimensat("a", NOW, 99)
    assert begin_ns < os.stat("a").st_atime_ns <= time.time_ns()
    assert os.stat("a").st_mtime_ns == 99
    utimensat("a", NOW, NOW)
    assert begin_ns < os.stat("a").st_mtime_ns <= time.time_ns()
    before = os.stat("a")
    utimensat("a", OMIT, OMIT)
    assert os.stat("a") == before
    assert outcome(lambda: utimensat("a", 10**9, 0)) == "EINVAL"


@pytest.mark.parametrize(
    ("mode", "way", "expected"),
    [
        (0o666, "now", OK),
        (0o644, "now", "EACCES"),
        (0o666, "set", "EPERM"),
        (0o644, "set", "EPERM"),
        (0o666, "mixed", "EPERM"),
    ],
)
@needs_root
def test_utimensat_of_anothers_file(ground: str, mode: int, way: str, expected: str) -> None:
    write("a", b"data")
    os.chmod("a", mode)
    ways: dict[str, Callable[[], object]] = {
        "now": lambda: os.utime("a"),
        "set": lambda: os.utime("a", ns=(1, 1)),
        "mixed": lambda: utimensat("a", NOW, 1),
    }
    assert as_user(ways[way]) == expected


@pytest.mark.parametrize("seconds", [0, 1, 2**31 - 1, 2**31, 2**32, 2**33])
def test_utimensat_far_times(ground: str, seconds: int) -> None:
    write("a", b"data")
    times = (seconds * 10**9 + 1, seconds * 10**9 + 999_999_999)
    os.utime("a", ns=times)
    assert (os.stat("a").st_atime_ns, os.stat("a").st_mtime_ns) == times


def test_utimensat_before_1970(ground: str) -> None:
    write("a", b"data")
    os.utime("a", ns=(-(10**9), -(10**9)))
    assert os.stat("a").st_mtime_ns == -(10**9)
