"""A store's home directory as seen from outside: where it is, and what a person wrote there.

A configuration is a TOML file; every key has a default, an unknown key is an error. Sizes are as
`kvfs.config.parse_size` takes them; `max_bytes` and `min_free` may also be a share ("5%").
"""

import errno
import json
import math
import os
import re
import select
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfs.config import (
    CONFIG_WAIT_S,
    COUNT_MAX,
    READ_AHEAD_KIB_MAX,
    ClusterConfig,
    Config,
    DirectoryConfig,
    MountConfig,
    Share,
    parse_size_or_share,
)
from kvfs.errors import InvalidInput
from kvfs.meta.url import parse_url
from kvfs.peers.address import PORT_MAX, parse_address
from kvfs.prefetch.settings import KEYS as PREFETCH_KEYS
from kvfs.prefetch.settings import parse_prefetch
from kvfs.replicate import parse_rules
from kvfs.tier_settings import check_places, parse_tier_rules, parse_tiers

STORE_MARK = "store.json"  # version and id of a store
PART_MARK = "part.json"  # in a directory that belongs to the store of another
TIER_MARK = "tier.json"  # in a directory that is a tier, and may have many users
CONFIG_NAME = "kvfs.toml"  # a store's own configuration
LOG_NAME = "node.log"
SOCKET_NAME = "node.sock"
PARTS = ("blobs", "staging", "quarantine")  # directories that every directory of a store has
NOT_FOREIGN = frozenset({CONFIG_NAME, LOG_NAME, "lost+found"})  # may lie where a store is made

_CONFIG_BYTES_MAX = 1024 * 1024


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


# Configuration ------------------------------------------------------------------------------------
def load_config(
    file: Path | None = None, stores: Sequence[Path] = (), *, max_bytes: str | None = None
) -> Config:
    """Read a configuration. `stores` (from the command line) replace the file's directories, and
    `max_bytes` its limits. Raises `InvalidInput`, naming file and key; nothing is created."""
    if file is None:
        return parse_config({}, stores, max_bytes=max_bytes)
    try:
        table = _read_table(file)
    except FileNotFoundError as error:
        raise InvalidInput(str(file), "is not there; name a file that is") from error
    return _parse_of(file, table, stores, max_bytes)


def load_config_of_store(stores: Sequence[Path] = (), *, max_bytes: str | None = None) -> Config:
    """The configuration that the first store has in its own `kvfs.toml`, or the default one.

    `stores` come first, in their order; then what the file names besides. Limits of each are those
    of its `[[store]]` table, else those at the top of the file. Raises as `load_config`, and when
    the file names another store first.
    """
    paths = [Path(os.path.abspath(store)) for store in stores] or [default_store()]
    home = paths[0]
    check_directory(home)
    own = home / CONFIG_NAME
    try:
        table = _read_table(own)
    except FileNotFoundError:
        return load_config(None, paths, max_bytes=max_bytes)
    if "store" in table:
        listed = [item.path for item in _parse_of(own, table, (), None).directories]
        if listed[:1] != [home]:
            raise InvalidInput(str(own), f"must name {home} as its first store, not {listed[0]}")
        paths += [path for path in listed if path not in paths]
    return _parse_of(own, table, paths, max_bytes)


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
    STORE_MARK, PART_MARK, CONFIG_NAME, LOG_NAME, f"{LOG_NAME}.1",
    "meta/running", "meta/directories.json", "meta/data.mdb", "meta/lock.mdb",
    "meta/cluster", "meta/joining", "peer.key",
)  # fmt: skip
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def _check_own_files(directory: Path) -> None:
    """Opening a FIFO would wait for ever, and reading a device has no end."""
    for name in _OWN_FILES:
        kind = _kind_of(directory / name)
        if kind is None or kind == stat.S_IFREG:
            continue
        if name == LOG_NAME and kind == stat.S_IFCHR:  # as /dev/null is, and /dev/stderr
            continue
        lost = "; kvfs init then makes it again" if name == STORE_MARK else ""
        raise InvalidInput(
            str(directory / name), f"is {_KINDS[kind]} and no file; move it away{lost}"
        )
    for name in (*PARTS, "meta"):
        if _kind_of(directory / name) not in (None, stat.S_IFDIR):
            raise InvalidInput(str(directory / name), "is no directory; move it away")
    if _kind_of(directory / SOCKET_NAME) == stat.S_IFDIR:
        raise InvalidInput(
            str(directory / SOCKET_NAME), "is a directory and no socket; move it away"
        )


def _kind_of(path: Path) -> int | None:
    """The type of what a path leads to; None for nothing, and for what cannot be looked at."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
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


def _read_table(file: Path) -> Mapping[str, Any]:
    """Raises `InvalidInput`; FileNotFoundError is for the caller to tell."""
    import tomllib  # here: engines and most commands read no file

    try:
        raw = _read_words(file)
        if len(raw) > _CONFIG_BYTES_MAX:
            raise InvalidInput(str(file), f"is no configuration: above {_CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 or an endless number
        raise InvalidInput(str(file), f"is no TOML: {error}") from error


def _read_words(file: Path) -> bytes:
    """What a file begins with, or what comes through a pipe, for whose writer it waits so long and
    no longer. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as opened:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFIFO):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')} and no file")
        words = bytearray()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        end_s = time.monotonic() + CONFIG_WAIT_S
        while len(words) <= _CONFIG_BYTES_MAX:
            if kind == stat.S_IFIFO and not ready.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise OSError(
                    errno.ETIMEDOUT,
                    f"it is a FIFO, and nobody wrote all into it in {CONFIG_WAIT_S:g} s",
                )
            read = opened.read(_CONFIG_BYTES_MAX + 1 - len(words))
            if read == b"":
                break
            words += read or b""
        return bytes(words)


def _parse_of(
    file: Path, table: Mapping[str, Any], stores: Sequence[Path], max_bytes: str | None
) -> Config:
    """As `parse_config`; what the file has wrong names it, what the command line has does not."""
    try:
        return parse_config(table, stores, max_bytes=max_bytes)
    except InvalidInput as error:
        if error.subject.startswith("--"):
            raise
        raise InvalidInput(f"{file}: {error.subject}", error.reason) from error


_TOP_KEYS = {
    "store", "max_bytes", "min_free", "fsync", "idle_exit_s", "socket_mode", "mount", "cluster",
    "tiers", "tier_copies", "prefetch",
}  # fmt: skip
_MOUNT_KEYS = {"allow_other", "passthrough", "read_ahead_kib", "symlink"}
_CLUSTER_KEYS = {
    "metadata", "metadata_file", "name", "listen", "bulk_port", "insecure", "encrypt_bulk",
    "copy_after", "copies",
}  # fmt: skip
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_config(
    table: Mapping[str, Any], stores: Sequence[Path] = (), *, max_bytes: str | None = None
) -> Config:
    """Check a parsed TOML table and give it types; see `load_config`."""
    _refuse_unknown(table, _TOP_KEYS, "")
    common = DirectoryConfig(
        Path(),
        parse_size_or_share(table["max_bytes"], "max_bytes") if "max_bytes" in table else None,
        parse_size_or_share(table["min_free"], "min_free") if "min_free" in table else None,
    )
    directories = [_parse_directory(item, common) for item in _as_list(table.get("store", []))]
    if stores:
        named = {d.path: d for d in directories}
        directories = [
            named.get(path, replace(common, path=path))
            for path in (Path(os.path.abspath(store)) for store in stores)
        ]
    if not directories:
        directories = [replace(common, path=default_store())]
    if max_bytes is not None:
        limit = parse_size_or_share(max_bytes, "--max-bytes")
        directories = [replace(d, max_bytes=limit) for d in directories]
    if len({d.path for d in directories}) != len(directories):
        raise InvalidInput(
            "--store" if stores else "store", "a directory is named twice; name it once"
        )
    tiers = parse_tiers(table.get("tiers", []))
    check_places(tiers, [directory.path for directory in directories])
    mount = table.get("mount", {})
    if not isinstance(mount, dict):
        raise InvalidInput("mount", "is no table; write [mount]")
    _refuse_unknown(mount, _MOUNT_KEYS, "mount.")
    return Config(
        directories=tuple(directories),
        fsync=_parse_switch(table, "fsync"),
        idle_exit_s=_parse_idle(table.get("idle_exit_s")),
        socket_mode=_parse_socket_mode(table.get("socket_mode", 0o600)),
        mount=MountConfig(
            allow_other=_parse_switch(mount, "allow_other", "mount."),
            passthrough=_parse_switch(mount, "passthrough", "mount.", usual=True),
            symlink=_parse_switch(mount, "symlink", "mount."),
            read_ahead_kib=_parse_read_ahead(mount.get("read_ahead_kib", 1024)),
        ),
        cluster=_parse_cluster(table["cluster"]) if "cluster" in table else None,
        tiers=tiers,
        tier_rules=parse_tier_rules(table.get("tier_copies", [])),
        prefetch=parse_prefetch(table.get("prefetch", {})),
    )


def _parse_cluster(table: object) -> ClusterConfig:
    if not isinstance(table, dict):
        raise InvalidInput("cluster", "is no table; write [cluster]")
    _refuse_unknown(table, _CLUSTER_KEYS, "cluster.")
    for key in ("metadata", "metadata_file", "name", "listen"):
        if not isinstance(table.get(key, ""), str):
            raise InvalidInput(f"cluster.{key}", f"{table[key]!r:.80} is no text")
    url, key = table.get("metadata", ""), "cluster.metadata"
    if "metadata_file" in table:
        if "metadata" in table:
            raise InvalidInput("cluster.metadata_file", "is written beside metadata; write one")
        url, key = _read_url(Path(table["metadata_file"])), "cluster.metadata_file"
    return join_cluster(
        ClusterConfig(
            url,
            table.get("name", "kvfs"),
            table.get("listen", ""),
            _parse_port(table["bulk_port"], "cluster.bulk_port") if "bulk_port" in table else None,
            _parse_switch(table, "insecure", "cluster."),
            _parse_switch(table, "encrypt_bulk", "cluster."),
            _parse_count(table.get("copy_after", 2), "cluster.copy_after"),
            parse_rules(table.get("copies", [])),
        ),
        url,
        key,
    )


def _read_url(file: Path) -> str:
    """A URL with a password in it, which others may read neither in a configuration nor in a list
    of processes: the only line of a file."""
    try:
        return _read_words(file).decode("utf-8").strip()
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror}"
        raise InvalidInput("cluster.metadata_file", reason) from error
    except ValueError as error:
        raise InvalidInput("cluster.metadata_file", f"{file} is no text: {error}") from error


def join_cluster(cluster: ClusterConfig | None, url: str, key: str) -> ClusterConfig:
    """A cluster's configuration with this URL of its metadata. Raises `InvalidInput`."""
    if not url:
        raise InvalidInput(key, "is missing; write where the names are: redis://host:6379")
    cluster = replace(cluster or ClusterConfig(url), metadata=url)
    parse_url(url, key)
    if _CLUSTER_NAME.fullmatch(cluster.name) is None:
        raise InvalidInput(
            "cluster.name",
            f"{cluster.name!r:.80} must begin with a letter or digit, and have those and ._- only",
        )
    if cluster.listen and not parse_address(cluster.listen).is_numeric:
        raise InvalidInput(
            "cluster.listen", f"{cluster.listen!r:.80} must have an IP address, as 10.0.0.7:7400"
        )
    if cluster.listen:
        port = parse_address(cluster.listen).port
        if port and cluster.bulk_port == port:
            raise InvalidInput("cluster.bulk_port", "is the port of listen; write another one")
        if port == PORT_MAX and cluster.bulk_port is None:
            raise InvalidInput(
                "cluster.listen", "is the last port, and bytes go by the next one; write bulk_port"
            )
    if cluster.insecure and cluster.encrypt_bulk:
        raise InvalidInput("cluster.encrypt_bulk", "needs keys; take insecure = true away")
    return cluster


def _parse_switch(
    table: Mapping[str, Any], key: str, prefix: str = "", *, usual: bool = False
) -> bool:
    value = table.get(key, usual)
    if not isinstance(value, bool):
        raise InvalidInput(prefix + key, f"{value!r:.80} is neither true nor false; write one")
    return value


def _parse_count(value: object, key: str) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise InvalidInput(key, f"{value!r:.80} is no number from 0 to {COUNT_MAX}")
    return value


def _parse_port(value: object, key: str) -> int:
    if type(value) is not int or not 0 <= value <= PORT_MAX:
        raise InvalidInput(key, f"{value!r:.80} is no port from 0 (any) to {PORT_MAX}")
    return value


def _parse_idle(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInput("idle_exit_s", f"{value!r:.80} is no number of seconds above 0")
    return float(value)


def _parse_socket_mode(value: object) -> int:
    """A mode that its own user can read and write with, and no more than a mode."""
    if isinstance(value, str):
        raise InvalidInput("socket_mode", f"{value!r:.80} is text; write 0o660, without quotes")
    if type(value) is not int or value & ~0o777 or value & 0o600 != 0o600:
        shown = oct(value) if type(value) is int else repr(value)[:80]
        raise InvalidInput(
            "socket_mode", f"{shown} keeps its own user out or is no mode; write 0o600 or 0o660"
        )
    return value


def _parse_read_ahead(value: object) -> int:
    if type(value) is not int or not 0 <= value <= READ_AHEAD_KIB_MAX:
        raise InvalidInput(
            "mount.read_ahead_kib", f"{value!r:.80} is no number from 0 to {READ_AHEAD_KIB_MAX}"
        )
    return value


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _parse_directory(item: object, common: DirectoryConfig) -> DirectoryConfig:
    if isinstance(item, str):
        return replace(common, path=_absolute(item))
    if not isinstance(item, dict) or not isinstance(item.get("path"), str):
        raise InvalidInput(
            "store", "write a path, a list of paths, or [[store]] tables with `path`"
        )
    _refuse_unknown(item, {"path", "max_bytes", "min_free"}, "store.")
    return DirectoryConfig(
        _absolute(item["path"]),
        parse_size_or_share(item["max_bytes"], "store.max_bytes")
        if "max_bytes" in item
        else common.max_bytes,
        parse_size_or_share(item["min_free"], "store.min_free")
        if "min_free" in item
        else common.min_free,
    )


def _absolute(path: str) -> Path:
    if "\0" in path or not path:
        raise InvalidInput("store", f"{path!r} is no path")
    return Path(os.path.abspath(os.path.expanduser(path)))


def _refuse_unknown(table: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            place = _place_of(key)
            hint = f"; this one belongs {place}" if place else ""
            raise InvalidInput(
                f"{prefix}{key}", f"unknown key; known are {', '.join(sorted(known))}{hint}"
            )


def _place_of(key: str) -> str | None:
    """Where a key may stand: people add lines at the end, below the last table."""
    if key in _TOP_KEYS:
        return "above the first [table]"
    if key in _CLUSTER_KEYS:
        return "below [cluster]"
    if key in PREFETCH_KEYS:
        return "below [prefetch]"
    return "below [mount]" if key in _MOUNT_KEYS else None


def parse_limit(value: object, key: str) -> int | Share | None:
    """What `show_limit` wrote. Raises `InvalidInput`."""
    return None if value is None else parse_size_or_share(value, key)


def show_limit(limit: int | Share | None) -> int | str | None:
    """A limit as a file may hold it."""
    return f"{100 * limit.of_capacity:.9f}%" if isinstance(limit, Share) else limit
