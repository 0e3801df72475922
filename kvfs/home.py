"""A store's home directory as seen from outside: where it is, and what a person wrote there.

A configuration is a TOML file; every key has a default, an unknown key is an error. Sizes are as
`kvfs.config.parse_size` takes them; `max_bytes` and `min_free` may also be a share ("5%").
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfs.config import Config, DirectoryConfig, MountConfig, Share, parse_size
from kvfs.errors import InvalidInput

STORE_MARK = "store.json"  # version and id of a store
CONFIG_NAME = "kvfs.toml"  # a store's own configuration
LOG_NAME = "node.log"
NOT_FOREIGN = frozenset({CONFIG_NAME, LOG_NAME, "lost+found"})  # may lie where a store is made

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def default_store() -> Path:
    """Where a store lies when nobody says: /var/lib/kvfs for root, else the XDG data directory."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvfs")
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "kvfs"


def is_store(directory: Path) -> bool:
    """Whether a directory was made by `kvfs init`, `kvfs mount` or `kvfs serve`."""
    return any((directory / mark).exists() for mark in (STORE_MARK, CONFIG_NAME))


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
    `max_bytes` its limits. Raises `InvalidInput`, naming the key; nothing is created."""
    table: Mapping[str, Any] = {}
    if file is not None:
        import tomllib  # here: engines and most commands read no file

        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(str(file), f"is no TOML: {error}") from error
    return parse_config(table, stores, max_bytes=max_bytes)


_TOP_KEYS = {"store", "max_bytes", "min_free", "fsync", "idle_exit_s", "socket_mode", "mount"}


def parse_config(
    table: Mapping[str, Any], stores: Sequence[Path] = (), *, max_bytes: str | None = None
) -> Config:
    """Check a parsed TOML table and give it types; see `load_config`."""
    _refuse_unknown(table, _TOP_KEYS, "")
    common = DirectoryConfig(
        Path(),
        _parse_size_or_share(table["max_bytes"], "max_bytes") if "max_bytes" in table else None,
        _parse_size_or_share(table["min_free"], "min_free") if "min_free" in table else None,
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
        limit = _parse_size_or_share(max_bytes, "--max-bytes")
        directories = [replace(d, max_bytes=limit) for d in directories]
    if len({d.path for d in directories}) != len(directories):
        raise InvalidInput("store", "a directory is named twice")
    mount = table.get("mount", {})
    if not isinstance(mount, dict):
        raise InvalidInput("mount", "must be a table: [mount]")
    _refuse_unknown(mount, {"allow_other", "read_ahead_kib"}, "mount.")
    idle = table.get("idle_exit_s")
    return Config(
        directories=tuple(directories),
        fsync=_typed(table, "fsync", bool, False),
        idle_exit_s=None if idle is None else float(_typed(table, "idle_exit_s", (int, float), 0)),
        socket_mode=_typed(table, "socket_mode", int, 0o600),
        mount=MountConfig(
            allow_other=_typed(mount, "allow_other", bool, False),
            read_ahead_kib=_typed(mount, "read_ahead_kib", int, 1024),
        ),
    )


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
        _parse_size_or_share(item["max_bytes"], "store.max_bytes")
        if "max_bytes" in item
        else common.max_bytes,
        _parse_size_or_share(item["min_free"], "store.min_free")
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
            raise InvalidInput(
                f"{prefix}{key}", f"unknown key; known are {', '.join(sorted(known))}"
            )


def _typed(table: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidInput(key, f"{value!r} has the wrong type")
    return value


def _parse_size_or_share(value: object, key: str) -> int | Share:
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_size(value, key)
    if not 0 <= float(match[1]) <= 100:
        raise InvalidInput(key, f"{value!r} is not between 0% and 100%")
    return Share(float(match[1]) / 100)
