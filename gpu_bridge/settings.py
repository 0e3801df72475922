"""What a person may set for the bridge: the `kvfs.` keys of the engine's configuration. Pure."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.config import BRIDGE_DEADLINE_S, BRIDGE_THREADS
from kvfs.errors import InvalidInput
from kvfs.home import default_store
from kvfs.settings.sizes import parse_size

PREFIX = "kvfs."
_THREADS_MAX = 64


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """See the table in docs/vllm.md. None: let the bridge choose."""

    store: Path
    chunk_tokens: int | None = None
    threads: int = BRIDGE_THREADS
    staging_bytes: int | None = None
    store_token_ids: bool = True
    load: bool = True
    save: bool = True
    deadline_s: float = BRIDGE_DEADLINE_S
    start_node: bool = True


def parse_settings(extra: Mapping[str, Any]) -> BridgeSettings:
    """Read the `kvfs.` keys of the engine's extra configuration; others are not ours, and left
    alone. Raises `InvalidInput`, naming the key."""
    given = {key.removeprefix(PREFIX): extra[key] for key in extra if key.startswith(PREFIX)}
    for key in given:
        if key not in _PARSERS:
            known = ", ".join(f"{PREFIX}{name}" for name in _PARSERS)
            raise InvalidInput(f"{PREFIX}{key}", f"unknown key; known are {known}")
    values: dict[str, Any] = {
        key: _PARSERS[key](f"{PREFIX}{key}", value) for key, value in given.items()
    }
    values.setdefault("store", default_store())
    return BridgeSettings(**values)


def _parse_path(key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidInput(key, f"{value!r} is no path; name the store's first directory")
    return Path(os.path.abspath(os.path.expanduser(value)))


def _parse_count(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(key, f"{value!r} must be a whole number of at least 1")
    return value


def _parse_threads(key: str, value: Any) -> int:
    count = _parse_count(key, value)
    if count > _THREADS_MAX:
        raise InvalidInput(key, f"{count} must be at most {_THREADS_MAX}")
    return count


def _parse_bytes(key: str, value: Any) -> int:
    size = parse_size(value, key)
    if size < 1:
        raise InvalidInput(key, "must be more than nothing")
    return size


def _parse_flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(key, f"{value!r} must be true or false")
    return value


def _parse_seconds(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 3600:
        raise InvalidInput(key, f"{value!r} must be a number of seconds, above 0 and at most 3600")
    return float(value)


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "store": _parse_path,
    "chunk_tokens": _parse_count,
    "threads": _parse_threads,
    "staging_bytes": _parse_bytes,
    "store_token_ids": _parse_flag,
    "load": _parse_flag,
    "save": _parse_flag,
    "deadline_s": _parse_seconds,
    "start_node": _parse_flag,
}
