"""A store's home directory as seen from outside: where it is, and what it may hold."""

import contextlib
import json
import os
import stat
from pathlib import Path

from kvfs.errors import InvalidInput

STORE_MARK = "store.json"  # version and id of a store
PART_MARK = "part.json"  # in a directory that belongs to the store of another
TIER_MARK = "tier.json"  # in a directory that is a tier, and may have many users
CONFIG_NAME = "kvfs.toml"  # a store's own configuration
LOG_NAME = "node.log"
SOCKET_NAME = "node.sock"
PARTS = ("blobs", "staging", "quarantine")  # directories that every directory of a store has
NOT_FOREIGN = frozenset({CONFIG_NAME, LOG_NAME, "lost+found"})  # may lie where a store is made


def default_store() -> Path:
    """Where a store lies when nobody says: /var/lib/kvfs for root, else the XDG data directory."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvfs")
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "kvfs"


def is_store(directory: Path) -> bool:
    """Whether a directory was made by `kvfs init`, `kvfs mount` or `kvfs serve`."""
    return any((directory / mark).exists() for mark in (STORE_MARK, CONFIG_NAME))


def has_lost_mark(directory: Path) -> bool:
    """Whether a directory holds what a store keeps, but no `store.json`."""
    return not any((directory / mark).exists() for mark in (STORE_MARK, TIER_MARK)) and all(
        (directory / part).is_dir() for part in PARTS
    )


def log_of(home: Path) -> Path | None:
    """The store's log, its directory made if it is missing; None for one that can't be used, or
    that is no store and must not become one."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = is_store(home) or set(os.listdir(home)) <= NOT_FOREIGN
    except OSError:
        return None
    return home / LOG_NAME if is_ours else None


def check_directory(path: Path) -> None:
    """Refuse what is there and is no directory, what a mount of kvfs shows, a tier, and what has
    something else in place of a store's own files, with `InvalidInput`."""
    if path.exists() and not path.is_dir():
        raise InvalidInput(str(path), "is no directory; name one that is, or a new one")
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if file_system_of(there) == "fuse.kvfs":
        raise InvalidInput(str(path), "lies in a mount of kvfs; name a directory on a disk")
    if (path / TIER_MARK).exists():
        raise InvalidInput(str(path), "is a tier, which others may use too; name another directory")
    _check_own_files(path)


_OWN_FILES = (
    STORE_MARK, PART_MARK, "part.new", LOG_NAME, f"{LOG_NAME}.1",
    "meta/running", "meta/directories.json", "meta/directories.new", "meta/data.mdb",
    "meta/lock.mdb", "meta/distrusted", "meta/data.mdb.distrusted", "meta/cluster",
    "meta/cluster.new", "meta/joining", "meta/joining.new", "meta/alone/data.mdb",
    "meta/alone/lock.mdb",
)  # fmt: skip
_GIVEN_FILES = (CONFIG_NAME, "peer.key")  # a person's, which a node only reads: wherever they lie
FILE_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def _check_own_files(directory: Path) -> None:
    """Opening a FIFO would wait for ever, and reading a device has no end. What is written through
    a symbolic link changes what the store does not own."""
    for name in (*_OWN_FILES, *_GIVEN_FILES):
        _check_own_file(directory / name, name)
    for name in (*PARTS, "meta"):
        if _kind_of(directory / name) not in (None, stat.S_IFDIR):
            raise InvalidInput(str(directory / name), "is no directory; move it away")
    kind = _kind_of(directory / SOCKET_NAME, follow=False)
    if kind not in (None, stat.S_IFSOCK):
        raise InvalidInput(
            str(directory / SOCKET_NAME), f"is {FILE_KINDS[kind]} and no socket; move it away"
        )


def _check_own_file(path: Path, name: str) -> None:
    kind = _kind_of(path)
    if kind is None or (kind == stat.S_IFREG and (name in _GIVEN_FILES or not path.is_symlink())):
        return
    if kind == stat.S_IFCHR and name == LOG_NAME:  # as /dev/null is, and /dev/stderr
        return
    if kind == stat.S_IFREG:
        reason = "is a symbolic link, which no node follows; put the file itself in its place"
    elif kind == stat.S_IFLNK:
        mended = ", or let it lead to one" if name in _GIVEN_FILES else ""
        reason = f"is a symbolic link to no file; remove it{mended}"
    else:
        reason = f"is {FILE_KINDS[kind]} and no file; move it away"
        reason += "; kvfs init then makes it again" if name == STORE_MARK else ""
    raise InvalidInput(str(path), reason)


def _kind_of(path: Path, *, follow: bool = True) -> int | None:
    """The type of what a path leads to, which is a symbolic link where that leads nowhere; None for
    nothing, and for what cannot be looked at."""
    try:
        if follow:
            with contextlib.suppress(OSError):
                return stat.S_IFMT(os.stat(path).st_mode)
        return stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return None


def refuse_part(home: Path) -> None:
    """Raise `InvalidInput` when a directory is one of another store's, and so none by itself."""
    mark = home / PART_MARK
    try:
        store = json.loads(mark.read_text(encoding="utf-8"))["store"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        store = "a store that the damaged mark does not name"
    raise InvalidInput(
        str(home),
        f"is a part of {store}; name that first, or remove {PART_MARK} from here to give up what"
        " the other keeps in this directory",
    )


def file_system_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds a path, which is there: `ext4`."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in mountinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [wanted] and right.split():
            found = right.split()[0]
    return found
