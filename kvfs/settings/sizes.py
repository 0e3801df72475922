"""Sizes as people write them: bytes, text with a unit ("200GiB", "1.5TB"), a share ("5%")."""

import re
from dataclasses import dataclass

from kvfs.config import GIB, KIB, MIB, SIZE_BYTES_MAX
from kvfs.errors import InvalidInput

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "pib": 1024 * 1024 * GIB,
}  # fmt: skip
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object, key: str) -> int:
    """Bytes from an integer or text with a unit. Raises `InvalidInput`."""
    size: float
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        size = value
    elif match is not None and match[2].lower() in _UNITS:
        size = float(match[1]) * _UNITS[match[2].lower()]
    else:
        raise InvalidInput(key, f"{value!r:.80} is no size; write for example 200GiB")
    if size > SIZE_BYTES_MAX:
        raise InvalidInput(
            key, f"{value!r:.80} is more than any disk has; write for example 200GiB"
        )
    return int(size)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a file system's capacity, 0 to 1."""

    of_capacity: float


def parse_size_or_share(value: object, key: str) -> int | Share:
    """Bytes as `parse_size` takes them, or a share of a file system ("5%"). Raises
    `InvalidInput`."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is not None and not 0 <= float(match[1]) <= 100:
        raise InvalidInput(key, f"{value!r} is not between 0% and 100%")
    limit = parse_size(value, key) if match is None else Share(float(match[1]) / 100)
    if key.endswith(("max_bytes", "--max-bytes")) and limit in (0, Share(0.0)):
        raise InvalidInput(key, "0 lets nothing be stored; leave it out to set no limit")
    return limit


def least_free_bytes(min_free: int | Share | None, capacity_bytes: int) -> int:
    """What must stay free on a file system; None: 5% of it, at most 1 GiB."""
    match min_free:
        case None:
            return min(GIB, capacity_bytes // 20)
        case Share(of_capacity):
            return int(of_capacity * capacity_bytes)
        case fixed:
            return fixed


def parse_limit(value: object, key: str) -> int | Share | None:
    """What `show_limit` wrote. Raises `InvalidInput`."""
    return None if value is None else parse_size_or_share(value, key)


def show_limit(limit: int | Share | None) -> int | str | None:
    """A limit as a file may hold it."""
    return f"{100 * limit.of_capacity:.9f}%" if isinstance(limit, Share) else limit
