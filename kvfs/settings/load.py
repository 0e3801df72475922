"""From what a person wrote to what a node is told.

A configuration is a TOML file; every key has a default, an unknown key is an error. Sizes are as
`kvfs.settings.sizes.parse_size` takes them; `max_bytes` and `min_free` may also be a share ("5%").
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfs.config import READ_AHEAD_KIB_MAX
from kvfs.errors import InvalidInput
from kvfs.home import CONFIG_NAME, check_directory, default_store
from kvfs.settings.cluster import parse_cluster
from kvfs.settings.file import read_table
from kvfs.settings.keys import MOUNT_KEYS, TOP_KEYS, parse_switch, refuse_unknown
from kvfs.settings.prefetch import parse_prefetch
from kvfs.settings.rules import parse_tier_rules
from kvfs.settings.sizes import parse_size_or_share
from kvfs.settings.tiers import check_places, parse_tiers
from kvfs.settings.words import Config, DirectoryConfig, MountConfig


def load_config(
    file: Path | None = None, stores: Sequence[Path] = (), *, max_bytes: str | None = None
) -> Config:
    """Read a configuration. `stores` (from the command line) replace the file's directories, and
    `max_bytes` its limits. Raises `InvalidInput`, naming file and key; nothing is created."""
    if file is None:
        return parse_config({}, stores, max_bytes=max_bytes)
    try:
        table = read_table(file)
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
        table = read_table(own)
    except FileNotFoundError:
        return load_config(None, paths, max_bytes=max_bytes)
    if "store" in table:
        listed = [item.path for item in _parse_of(own, table, (), None).directories]
        if listed[:1] != [home]:
            raise InvalidInput(str(own), f"must name {home} as its first store, not {listed[0]}")
        paths += [path for path in listed if path not in paths]
    return _parse_of(own, table, paths, max_bytes)


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


def parse_config(
    table: Mapping[str, Any], stores: Sequence[Path] = (), *, max_bytes: str | None = None
) -> Config:
    """Check a parsed TOML table and give it types; see `load_config`."""
    refuse_unknown(table, TOP_KEYS, "")
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
    refuse_unknown(mount, MOUNT_KEYS, "mount.")
    return Config(
        directories=tuple(directories),
        fsync=parse_switch(table, "fsync"),
        idle_exit_s=_parse_idle(table.get("idle_exit_s")),
        socket_mode=_parse_socket_mode(table.get("socket_mode", 0o600)),
        mount=MountConfig(
            allow_other=parse_switch(mount, "allow_other", "mount."),
            passthrough=parse_switch(mount, "passthrough", "mount.", usual=True),
            symlink=parse_switch(mount, "symlink", "mount."),
            read_ahead_kib=_parse_read_ahead(mount.get("read_ahead_kib", 1024)),
        ),
        cluster=parse_cluster(table["cluster"]) if "cluster" in table else None,
        tiers=tiers,
        tier_rules=parse_tier_rules(table.get("tier_copies", [])),
        prefetch=parse_prefetch(table.get("prefetch", {})),
    )


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
    refuse_unknown(item, {"path", "max_bytes", "min_free"}, "store.")
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
