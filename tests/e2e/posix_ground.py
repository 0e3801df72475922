"""The ground that POSIX cases stand on: a directory in a mount, and the same on a plain disk.

Every case runs on both, so that one which asks for more than a local file system gives is found to
be wrong itself. Where the mount may differ, the case says what it does instead, and `docs/posix.md`
says why. Cases use short relative names: the working directory is their ground, also for those that
run as another user, who could not walk down to it.
"""

import errno
import itertools
import os
import signal
import socket
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounts import MountProcess

USER = 65534
OTHER = 65533
OK = "ok"
_BROKEN = 255  # the child's exit code when a case itself went wrong
_CHILD_DEADLINE_S = 30
_POSIX_NAMES = {errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EDEADLK: "EDEADLK"}
_numbers = itertools.count()

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture(scope="module")
def open_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountProcess]:
    """A mount that other users may enter, shared by the tests of a module."""
    base: Path = tmp_path_factory.mktemp("posix")
    store = base / "store"
    config = base / "kvfs.toml"
    config.write_text("[mount]\nallow_other = true\n")
    arguments = ["--store", str(store), "--config", str(config)]
    mount = MountProcess(store, base / "mnt", arguments, base / "mount.log", None)
    try:
        mount.wait_serving()
        yield mount
    finally:
        mount.close()


@pytest.fixture(params=["mount", "plain"])
def ground(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty working directory that everyone may write in, in the mount or on a plain disk; its
    kind."""
    kind: str = request.param
    if kind == "mount":
        mount: MountProcess = request.getfixturevalue("open_mount")
        directory = mount.mountpoint / f"ground-{next(_numbers)}"
    else:
        directory = tmp_path / "plain"
    directory.mkdir()
    directory.chmod(0o777)
    monkeypatch.chdir(directory)
    before = os.umask(0o022)
    yield kind
    os.umask(before)


def outcome(call: Callable[[], object]) -> str:
    """ "ok", or the name of the errno that a call fails with."""
    try:
        call()
    except OSError as error:
        return name_of(error.errno or 0)
    return OK


def name_of(code: int) -> str:
    """An errno's name, the one that POSIX has where there are two."""
    return _POSIX_NAMES.get(code) or errno.errorcode[code]


def as_user(
    call: Callable[[], object],
    uid: int = USER,
    gid: int | None = None,
    groups: tuple[int, ...] = (),
) -> str:
    """The `outcome` of a call by another user, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        code = _BROKEN
        try:
            signal.alarm(_CHILD_DEADLINE_S)
            os.setgroups(groups)
            os.setresgid(*[uid if gid is None else gid] * 3)
            os.setresuid(uid, uid, uid)
            code = 0
            call()
        except OSError as error:
            code = error.errno or _BROKEN
        except BaseException:  # noqa: BLE001  the child must not go on as a second test run
            traceback.print_exc()
            code = _BROKEN
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert 0 <= code < _BROKEN, f"the child ended with {code}"
    return name_of(code) if code else OK


# Files of every kind ------------------------------------------------------------------------------
KINDS = ("file", "dir", "full", "fifo", "socket", "char", "block", "link", "dangling")


def make(kind: str, name: str) -> None:
    """Make something of a kind; `link` points to a file beside it, `full` is a directory."""
    match kind:
        case "file":
            write(name, b"data")
        case "dir":
            os.mkdir(name)
        case "full":
            os.makedirs(f"{name}/inner")
        case "fifo":
            os.mkfifo(name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
        case "char":
            os.mknod(name, stat.S_IFCHR | 0o644, os.makedev(1, 3))
        case "block":
            os.mknod(name, stat.S_IFBLK | 0o644, os.makedev(240, 250))
        case "link":
            write(f"{name}.target", b"target")
            os.symlink(f"{name}.target", name)
        case "dangling":
            os.symlink("nowhere", name)
        case "none":
            pass
        case _:
            raise ValueError(kind)


def write(name: str, data: bytes, mode: int = 0o644) -> None:
    """Make a whole file."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        assert os.write(fd, data) == len(data)
    finally:
        os.close(fd)


def read(name: str) -> bytes:
    """All bytes of a file."""
    with open(name, "rb") as file:
        return file.read()


def mode_of(name: str) -> int:
    return stat.S_IMODE(os.lstat(name).st_mode)


def owner_of(name: str) -> tuple[int, int]:
    status = os.lstat(name)
    return status.st_uid, status.st_gid
