"""Directories of a store that can take nothing, and what to do about each. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.config import PAGE_BYTES
from kvfs.shell.render import size_text


@dataclass(frozen=True, slots=True)
class Full:
    """Why a directory takes no file, and what makes it take some."""

    found: str
    advice: str


def full_disk(free_bytes: int, evictable_bytes: int, min_free_bytes: int) -> Full | None:
    """Whether `min_free` lets nothing be stored, even when all that may go has gone."""
    if free_bytes + evictable_bytes - min_free_bytes >= PAGE_BYTES:
        return None
    and_stored = f" and {size_text(evictable_bytes)} to evict" if evictable_bytes else ""
    return Full(
        f"takes no file: its disk has {size_text(free_bytes)} free{and_stored},"
        f" and min_free keeps {size_text(min_free_bytes)}",
        "lower min_free in kvfs.toml and restart the node, or free the disk",
    )


def full_directory(item: Mapping[str, Any]) -> Full | None:
    """The same of a directory that is there, as its node describes it, with its other limits."""
    evictable_bytes = item["blob_bytes"] + item["trash_bytes"]
    full = full_disk(item["disk_free_bytes"], evictable_bytes, item["min_free_bytes"])
    if full is not None:
        return full
    limit_bytes, fixed_bytes = item["max_bytes"], item["used_bytes"] - evictable_bytes
    if limit_bytes is not None and limit_bytes - fixed_bytes < PAGE_BYTES:
        return Full(
            f"takes no file: metadata and files that are written take {size_text(fixed_bytes)},"
            f" and max_bytes is {size_text(limit_bytes)}",
            "raise max_bytes",
        )
    refused_bytes = item.get("refused_bytes", 0)  # a node of an earlier version does not say
    if refused_bytes > item["room_bytes"]:
        return Full(
            f"had no room for {size_text(refused_bytes)}, and nothing to evict: what is stored is"
            " pinned or in use",
            "unpin what may go (`kvfs unpin`), raise max_bytes, or lower min_free or free the disk",
        )
    return None
