"""POSIX, names at random: a mount and a plain directory must answer and look alike.

Each seed is one sequence of calls on names, by root and by two other users; every errno is compared
at once, and the whole tree (kinds, modes, owners, links, sizes, targets, bytes) from time to time.
"""

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.calls import rename_with
from tests.e2e.posix_ground import OTHER, USER, name_of, needs_root
from tests.mounts import MountProcess

OPERATIONS = 1500
NAMES = ("a", "b", "c", "d")


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """File system rights of another user, in this thread (the test's only one)."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class Chance:
    """Random calls, each a function of the directory that it works in."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def path(self) -> str:
        depth = self._random.choice((1, 1, 2, 2, 3))
        return "/".join(self._random.choice(NAMES) for _ in range(depth))

    def mode(self) -> int:
        kept = 0o700 if self._random.random() < 0.9 else 0  # mostly usable trees
        mode = self._random.randrange(0o10000) | kept
        # FUSE leaves S_ISGID to a file that its group may not run, where ext4 takes it.
        return mode | 0o010 if mode & 0o2000 else mode

    def user(self) -> int:
        return self._random.choice((0, 0, USER, OTHER))

    def call(self) -> tuple[str, Callable[[str], object]]:
        one, two = self.path(), self.path()
        mode, data = self.mode(), self._random.randbytes(self._random.choice((0, 3, 5000)))
        size, flags = self._random.choice((0, 2, 9000)), self._random.choice((0, 0, 1, 2))
        owner = self._random.choice((-1, 0, USER, OTHER)), self._random.choice((-1, 0, USER, OTHER))
        time_ns = self._random.randrange(10**18)
        calls: dict[str, Callable[[str], object]] = {
            f"mkdir {one} {mode:o}": lambda at: os.mkdir(f"{at}/{one}", mode),
            f"mkdir again {one}": lambda at: os.mkdir(f"{at}/{one}", 0o777),
            f"mkfifo {one} {mode:o}": lambda at: os.mkfifo(f"{at}/{one}", mode),
            f"symlink {two} {one}": lambda at: os.symlink(two, f"{at}/{one}"),
            f"write {one} {len(data)}": lambda at: overwrite(f"{at}/{one}", data, mode),
            f"append {one} {len(data)}": lambda at: append(f"{at}/{one}", data),
            f"truncate {one} {size}": lambda at: os.truncate(f"{at}/{one}", size),
            f"link {one} {two}": lambda at: os.link(f"{at}/{one}", f"{at}/{two}"),
            f"rename {one} {two} {flags}": lambda at: rename_with(
                f"{at}/{one}", f"{at}/{two}", flags
            ),
            f"unlink {one}": lambda at: os.unlink(f"{at}/{one}"),
            f"rmdir {one}": lambda at: os.rmdir(f"{at}/{one}"),
            f"chmod {one} {mode:o}": lambda at: os.chmod(f"{at}/{one}", mode),
            f"chown {one} {owner}": lambda at: os.chown(f"{at}/{one}", *owner),
            f"lchown {one} {owner}": lambda at: os.lchown(f"{at}/{one}", *owner),
            f"utime {one}": lambda at: os.utime(f"{at}/{one}", ns=(time_ns, time_ns)),
            f"open {one}": lambda at: os.close(os.open(f"{at}/{one}", os.O_RDONLY | os.O_NONBLOCK)),
        }
        return self._random.choice(list(calls.items()))


def overwrite(path: str, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    fd = os.open(path, flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def append(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def answer(call: Callable[[str], object], at: Path, user: int) -> str:
    """The errno's name, or "ok", when a user makes a call in a directory."""
    before = os.getcwd()
    os.chdir(at)
    try:
        with acting_as(user):
            call(".")
    except OSError as error:
        return name_of(error.errno or 0)
    finally:
        os.chdir(before)
    return "ok"


def look(at: Path) -> dict[str, tuple[object, ...]]:
    """All that a tree shows, except times that a clock made and sizes of directories."""
    shown = {}
    for folder, folders, names in os.walk(at):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content: object = None
            if kind == stat.S_IFREG:
                content = Path(path).read_bytes()
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            size = None if kind == stat.S_IFDIR else status.st_size
            shown[os.path.relpath(path, at)] = (
                oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink, size, content,
            )  # fmt: skip
    return shown


@pytest.mark.parametrize("seed", range(1, 7))
@needs_root
def test_random_calls_on_names(open_mount: MountProcess, tmp_path: Path, seed: int) -> None:
    ours, plain = open_mount.mountpoint / f"twin-{seed}", tmp_path / "plain"
    for directory in (ours, plain):
        directory.mkdir()
        directory.chmod(0o1777)
    chance, history = Chance(seed), []
    for number in range(OPERATIONS):
        user = chance.user()
        words, call = chance.call()
        answers = answer(call, plain, user), answer(call, ours, user)
        history.append(f"{user}: {words}: {answers[0]}")
        said = f"seed {seed}, call {number}; the last: {history[-12:]}"
        assert answers[1] == answers[0], said
        if number % 50 == 49:
            assert look(ours) == look(plain), said
    assert look(ours) == look(plain)
