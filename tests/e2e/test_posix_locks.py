"""POSIX, locks: flock and fcntl between two processes."""

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.posix_ground import outcome, write
from tests.processes import wait_until

NOWAIT = fcntl.LOCK_NB
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64 bits


@contextmanager
def holder(statement: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that has `fd` of "a" open for both, ran a statement, and waits."""
    code = f"""
import fcntl, os, sys
fd = os.open("a", os.O_RDWR | os.O_CREAT)
{statement}
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def fd(ground: str) -> Iterator[int]:
    write("a", b"0123456789")
    descriptor = os.open("a", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


FLOCK = [
    ("EX", fcntl.LOCK_EX, "EAGAIN"),
    ("EX", fcntl.LOCK_SH, "EAGAIN"),
    ("SH", fcntl.LOCK_EX, "EAGAIN"),
    ("SH", fcntl.LOCK_SH, "ok"),
]


@pytest.mark.parametrize(("theirs", "ours", "expected"), FLOCK)
def test_flock_between_processes(fd: int, theirs: str, ours: int, expected: str) -> None:
    with holder(f"fcntl.flock(fd, fcntl.LOCK_{theirs})"):
        assert outcome(lambda: fcntl.flock(fd, ours | NOWAIT)) == expected
    fcntl.flock(fd, fcntl.LOCK_EX | NOWAIT)  # killed: it is free


def test_flock_belongs_to_an_open(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX)
    copy = os.dup(fd)
    other = os.open("a", os.O_RDWR)
    assert outcome(lambda: fcntl.flock(other, fcntl.LOCK_SH | NOWAIT)) == "EAGAIN"
    fcntl.flock(copy, fcntl.LOCK_EX | NOWAIT)
    fcntl.flock(copy, fcntl.LOCK_UN)
    fcntl.flock(other, fcntl.LOCK_SH | NOWAIT)
    os.close(copy)
    os.close(other)


def test_flock_waits(fd: int) -> None:
    with holder("fcntl.flock(fd, fcntl.LOCK_EX)") as process:
        code = 'import fcntl, os; fcntl.flock(os.open("a", os.O_RDWR), fcntl.LOCK_EX); print("got")'
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.5)
            process.kill()
            assert waiting.communicate(timeout=20)[0] == b"got\n"


FCNTL = [
    ("LOCK_EX, 5, 0", (fcntl.LOCK_EX, 5, 0), "EAGAIN"),
    ("LOCK_EX, 5, 0", (fcntl.LOCK_EX, 5, 5), "ok"),
    ("LOCK_EX, 5, 0", (fcntl.LOCK_SH, 1, 4), "EAGAIN"),
    ("LOCK_SH, 5, 0", (fcntl.LOCK_SH, 0, 0), "ok"),
    ("LOCK_SH, 5, 0", (fcntl.LOCK_EX, 0, 0), "EAGAIN"),
    ("LOCK_EX, 0, 1000", (fcntl.LOCK_EX, 1, 999), "ok"),
    ("LOCK_EX, 0, 1000", (fcntl.LOCK_EX, 1, 10**9), "EAGAIN"),
]


@pytest.mark.parametrize(("theirs", "ours", "expected"), FCNTL)
def test_fcntl_between_processes(
    fd: int, theirs: str, ours: tuple[int, int, int], expected: str
) -> None:
    kind, length, start = ours
    with holder(f"fcntl.lockf(fd, fcntl.{theirs})"):
        assert outcome(lambda: fcntl.lockf(fd, kind | NOWAIT, length, start)) == expected
    fcntl.lockf(fd, fcntl.LOCK_EX | NOWAIT)


def test_fcntl_says_who_holds(fd: int) -> None:
    with holder("fcntl.lockf(fd, fcntl.LOCK_EX, 5, 2)") as process:
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, question)
        kind, _, start, length, pid = _FLOCK.unpack(answer)
        assert (kind, start, length, pid) == (fcntl.F_WRLCK, 2, 5, process.pid)


def test_fcntl_ends_with_any_close_of_the_file(fd: int) -> None:
    statement = 'fcntl.lockf(fd, fcntl.LOCK_EX); os.close(os.open("a", os.O_RDWR))'
    with holder(statement):
        fcntl.lockf(fd, fcntl.LOCK_EX | NOWAIT)


def test_fcntl_needs_the_right_open(ground: str) -> None:
    write("a", b"data")
    reader, writer = os.open("a", os.O_RDONLY), os.open("a", os.O_WRONLY)
    assert outcome(lambda: fcntl.lockf(reader, fcntl.LOCK_EX)) == "EBADF"
    assert outcome(lambda: fcntl.lockf(writer, fcntl.LOCK_SH)) == "EBADF"
    os.close(reader)
    os.close(writer)


def test_fcntl_locks_of_an_open(fd: int) -> None:
    set_lock = 37  # F_OFD_SETLK, which Python's module does not name here
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(fd, set_lock, request)
    other = os.open("a", os.O_RDWR)
    assert outcome(lambda: fcntl.fcntl(other, set_lock, request)) == "EAGAIN"
    os.close(other)


def test_fcntl_finds_a_deadlock(fd: int) -> None:
    statement = """
fcntl.lockf(fd, fcntl.LOCK_EX, 1, 1)
print("held", flush=True)
fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
"""
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
    with holder(statement) as process:
        wait_blocked(process.pid)
        assert outcome(lambda: fcntl.lockf(fd, fcntl.LOCK_EX, 1, 1)) == "EDEADLK"


def wait_blocked(pid: int) -> None:
    """Until a process waits for a lock, as /proc/locks shows it."""

    def is_blocked() -> bool:
        with open("/proc/locks", encoding="ascii") as table:
            return any("->" in line and f" {pid} " in line for line in table)

    wait_until(is_blocked)


def test_locks_of_a_reader_and_of_a_writer_that_came_later(ground: str) -> None:
    write("a", b"data")
    reader = os.open("a", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    writer = os.open("a", os.O_RDWR)
    result = outcome(lambda: fcntl.flock(writer, fcntl.LOCK_EX | NOWAIT))
    # In the mount the writer has a version, and so an inode, of its own: see docs/posix.md.
    assert result == ("ok" if ground == "mount" else "EAGAIN")
    os.close(writer)
    os.close(reader)
