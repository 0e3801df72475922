"""The `[[tiers]]` of a configuration: what a person may write of a tier, and what it means."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvfs.config import (
    TIER_CONCURRENCY_MAX,
    TIER_DEADLINE_S_MAX,
    TIER_NAME_MAX,
    TIERS_MAX,
)
from kvfs.errors import InvalidInput
from kvfs.settings.sizes import parse_size, parse_size_or_share
from kvfs.settings.words import TIER_LIMITS, TierConfig, TierKind, TierLimits

_KEY = "tiers"
_NAME = re.compile(f"[A-Za-z0-9][A-Za-z0-9._-]{{0,{TIER_NAME_MAX - 1}}}")
_SCHEMES = ("s3", "gs", "az", "file")
_COST_MAX = 3600.0
_KINDS = tuple(kind.value for kind in TierKind if kind is not TierKind.PEER)
_LIMIT_KEYS = {
    "reads_max", "writes_max", "read_deadline_s", "write_deadline_s", "cost_per_request",
    "cost_per_gib", "max_bytes",
}  # fmt: skip
_DIRECTORY_KEYS = {"path", "min_free", "fsync"}
_OBJECT_KEYS = {"url", "endpoint", "region"}


def parse_tiers(value: object) -> tuple[TierConfig, ...]:
    """Check the tables and give them types. Raises `InvalidInput`; nothing is opened."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInput(_KEY, "is no list of tables; write [[tiers]] above each tier")
    if len(value) > TIERS_MAX:
        raise InvalidInput(_KEY, f"are {len(value)}; {TIERS_MAX} are the limit")
    tiers = tuple(_parse_tier(item) for item in value)
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(f"{_KEY}.name", f"{name!r} is there twice; give each its own")
    return tiers


def check_places(tiers: Sequence[TierConfig], stores: Sequence[Path]) -> None:
    """Refuse a tier's directory that is, holds or lies in a store's or another tier's, with
    `InvalidInput`: each takes the other's files for its own, or for garbage."""
    places = [(path, f"the store {path}") for path in stores]
    for tier in tiers:
        if tier.path is None:
            continue
        for path, what in places:
            if tier.path == path or path in tier.path.parents or tier.path in path.parents:
                raise InvalidInput(
                    f"{_KEY}.path", f"{tier.path} is not apart from {what}; name another directory"
                )
        places.append((tier.path, f"tier {tier.name} at {tier.path}"))


def _parse_tier(table: Mapping[str, Any]) -> TierConfig:
    name = table.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        shown = "is missing" if name is None else f"{name!r:.80} is none"
        raise InvalidInput(
            f"{_KEY}.name", f"{shown}; begin with a letter or digit, and use those and ._- only"
        )
    kind = _parse_kind(table.get("kind"), name)
    own, others = _DIRECTORY_KEYS, _OBJECT_KEYS
    if kind is TierKind.OBJECT:
        own, others = others, own
    known = {"name", "kind"} | own | _LIMIT_KEYS
    for key in table:
        if key in others:
            raise _wrong(name, key, f"is not for kind {kind}; take it out")
        if key not in known:
            raise _wrong(name, key, f"unknown key; known are {', '.join(sorted(known))}")
    limits = _parse_limits(table, name, TIER_LIMITS[kind])
    if kind is TierKind.OBJECT:
        return _parse_object(table, name, limits)
    fsync = table.get("fsync", False)
    if not isinstance(fsync, bool):
        raise _wrong(name, "fsync", f"{fsync!r:.80} is neither true nor false; write one")
    return TierConfig(
        name,
        kind,
        limits,
        path=_parse_path(table.get("path"), name),
        min_free=parse_size_or_share(table["min_free"], f"{_KEY}.min_free of {name}")
        if "min_free" in table
        else None,
        max_bytes=_parse_max(table, name),
        fsync=fsync,
    )


def _parse_max(table: Mapping[str, Any], name: str) -> int | None:
    if "max_bytes" not in table:
        return None
    size = parse_size(table["max_bytes"], f"{_KEY}.max_bytes of {name}")
    if not size:
        raise _wrong(name, "max_bytes", "0 lets nothing be stored; leave it out to set no limit")
    return size


def _parse_kind(value: object, name: str) -> TierKind:
    if value == TierKind.PEER:
        raise _wrong(name, "kind", "peer is not configured: other nodes are found by [cluster]")
    if not isinstance(value, str) or value not in _KINDS:
        shown = "is missing" if value is None else f"{value!r:.80} is none"
        raise _wrong(name, "kind", f"{shown}; write one of {', '.join(_KINDS)}")
    return TierKind(value)


def _parse_path(value: object, name: str) -> Path:
    if not isinstance(value, str) or "\0" in value:
        shown = "is missing" if value is None else f"{value!r:.80} is no path"
        raise _wrong(name, "path", f"{shown}; write the tier's directory")
    path = Path(os.path.expanduser(value))
    if not path.is_absolute():
        raise _wrong(name, "path", f"{value!r:.80} must begin with /")
    return Path(os.path.normpath(path))


def _parse_object(table: Mapping[str, Any], name: str, limits: TierLimits) -> TierConfig:
    for key in sorted(_OBJECT_KEYS):
        if not isinstance(table.get(key, ""), str):
            raise _wrong(name, key, f"{table[key]!r:.80} is no text")
    url, endpoint, region = (table.get(key, "") for key in ("url", "endpoint", "region"))
    scheme = _check_url(url, name, "url", _SCHEMES, "s3://bucket/prefix")
    if scheme == "file" and not urlsplit(url).path.strip("/"):
        raise _wrong(name, "url", "names no directory; write file:///directory")
    if endpoint:
        _check_url(endpoint, name, "endpoint", ("http", "https"), "https://host:9000")
        if scheme == "file":
            raise _wrong(name, "endpoint", "is not for file: URLs; take it out")
    if region and scheme != "s3":
        raise _wrong(name, "region", "is for s3: URLs only; take it out")
    return TierConfig(
        name,
        TierKind.OBJECT,
        limits,
        max_bytes=_parse_max(table, name),
        url=url,
        endpoint=endpoint.rstrip("/"),
        region=region,
    )


def _check_url(text: str, name: str, key: str, schemes: Sequence[str], example: str) -> str:
    """The scheme of a URL that names a place and nothing else. What may be secret is not shown."""
    if not text:
        raise _wrong(name, key, f"is missing; write for example {example}")
    try:
        parts = urlsplit(text)
        is_odd = parts.username is not None or parts.query or parts.fragment or "@" in parts.netloc
        _ = parts.port
    except ValueError as error:
        raise _wrong(name, key, f"is no URL: {error}") from error
    if parts.scheme not in schemes:
        raise _wrong(name, key, f"must begin with one of {', '.join(f'{s}://' for s in schemes)}")
    if is_odd:
        raise _wrong(
            name,
            key,
            "may hold neither credentials nor options; credentials come from the provider's own"
            " variables, such as AWS_ACCESS_KEY_ID",
        )
    if not text.startswith(f"{parts.scheme}://") or (parts.scheme != "file" and not parts.netloc):
        raise _wrong(name, key, f"names no place; write for example {example}")
    if parts.scheme == "file" and parts.netloc:
        raise _wrong(name, key, "must have three slashes: file:///directory")
    return parts.scheme


def _parse_limits(table: Mapping[str, Any], name: str, usual: TierLimits) -> TierLimits:
    return TierLimits(
        _parse_number(table, name, "reads_max", usual.reads_max),
        _parse_number(table, name, "writes_max", usual.writes_max),
        _parse_real(table, name, "read_deadline_s", usual.read_deadline_s, TIER_DEADLINE_S_MAX),
        _parse_real(table, name, "write_deadline_s", usual.write_deadline_s, TIER_DEADLINE_S_MAX),
        _parse_real(table, name, "cost_per_request", usual.cost_per_request, _COST_MAX, least=0.0),
        _parse_real(table, name, "cost_per_gib", usual.cost_per_gib, _COST_MAX, least=0.0),
    )


def _parse_number(table: Mapping[str, Any], name: str, key: str, usual: int) -> int:
    value = table.get(key, usual)
    if type(value) is not int or not 1 <= value <= TIER_CONCURRENCY_MAX:
        raise _wrong(name, key, f"{value!r:.80} is no number from 1 to {TIER_CONCURRENCY_MAX}")
    return value


def _parse_real(
    table: Mapping[str, Any],
    name: str,
    key: str,
    usual: float,
    most: float,
    *,
    least: float = 0.001,
) -> float:
    value = table.get(key, usual)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise _wrong(name, key, f"{value!r:.80} is no number of seconds from {least:g} to {most:g}")
    return float(value)


def _wrong(name: str, key: str, reason: str) -> InvalidInput:
    return InvalidInput(f"{_KEY}.{key} of {name}", reason)
