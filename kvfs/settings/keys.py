"""The keys that a configuration may have, and the plain values of them."""

from collections.abc import Mapping
from typing import Any

from kvfs.config import COUNT_MAX
from kvfs.errors import InvalidInput
from kvfs.settings.prefetch import KEYS as PREFETCH_KEYS

TOP_KEYS = {
    "store", "max_bytes", "min_free", "fsync", "idle_exit_s", "socket_mode", "mount", "cluster",
    "tiers", "tier_copies", "prefetch",
}  # fmt: skip
MOUNT_KEYS = {"allow_other", "passthrough", "read_ahead_kib", "symlink"}
CLUSTER_KEYS = {
    "metadata", "metadata_file", "name", "listen", "bulk_port", "insecure", "encrypt_bulk",
    "copy_after", "copies",
}  # fmt: skip


def refuse_unknown(table: Mapping[str, Any], known: set[str], prefix: str) -> None:
    """Raise `InvalidInput` for a key that is not known, saying where it belongs."""
    for key in table:
        if key not in known:
            place = _place_of(key)
            hint = f"; this one belongs {place}" if place else ""
            raise InvalidInput(
                f"{prefix}{key}", f"unknown key; known are {', '.join(sorted(known))}{hint}"
            )


def _place_of(key: str) -> str | None:
    """Where a key may stand: people add lines at the end, below the last table."""
    if key in TOP_KEYS:
        return "above the first [table]"
    if key in CLUSTER_KEYS:
        return "below [cluster]"
    if key in PREFETCH_KEYS:
        return "below [prefetch]"
    return "below [mount]" if key in MOUNT_KEYS else None


def parse_switch(
    table: Mapping[str, Any], key: str, prefix: str = "", *, usual: bool = False
) -> bool:
    """What is written of a switch, else what is usual. Raises `InvalidInput`."""
    value = table.get(key, usual)
    if not isinstance(value, bool):
        raise InvalidInput(prefix + key, f"{value!r:.80} is neither true nor false; write one")
    return value


def parse_count(value: object, key: str) -> int:
    """A whole number from 0 to `COUNT_MAX`. Raises `InvalidInput`."""
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise InvalidInput(key, f"{value!r:.80} is no number from 0 to {COUNT_MAX}")
    return value
