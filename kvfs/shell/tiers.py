"""The part of `kvfs status` about tiers, and what comes from them ahead of its readers."""

from collections.abc import Iterator
from typing import Any

from kvfs.shell.render import count_text, facts, size_text, table


def tier_lines(tiering: dict[str, Any]) -> Iterator[str]:
    """What a node says of its tiers (`kvfs.tiering.describe`), for people."""
    head = ["tier", "kind", "state", "holds", "limit", "free", "reads", "share", "now", "seen"]
    rows = [head, *map(_row, tiering["tiers"])]
    yield from table(rows, right=tuple(range(3, len(head))))
    for tier in tiering["tiers"]:
        if tier["trouble"]:
            yield f"tier {tier['name']}: {tier['trouble']}"
    behind, reading, evicted = tiering["behind"], tiering["reading"], tiering["evicted"]
    hedges = sum(tier["hedges_won"] for tier in tiering["tiers"])
    lost = sum(tier["hedges_lost"] for tier in tiering["tiers"])
    yield from facts(
        [
            (
                "copied to tiers",
                f"{count_text(behind['copied_files'], 'file')},"
                f" {size_text(behind['copied_bytes'])}; {behind['waiting']:,} waiting,"
                f" {behind['dropped_files']:,} dropped, {behind['demoted_files']:,} demoted",
            ),
            (
                "read from tiers",
                f"{count_text(reading['brought_files'], 'file')},"
                f" {size_text(reading['brought_bytes'])}; {reading['under_way']:,} under way,"
                f" {reading['failed_files']:,} failed; {hedges:,} reads repeated with gain,"
                f" {lost:,} without",
            ),
            (
                "evicted from tiers",
                f"{count_text(evicted['blobs'], 'blob')}, {size_text(evicted['bytes'])};"
                f" {evicted['moved_blobs']:,} of them put to another tier first",
            ),
        ]
    )


def ahead_lines(prefetch: dict[str, Any]) -> Iterator[str]:
    """What a node brought before it was asked for (`kvfs.prefetch.runner`), for people."""
    causes = prefetch["causes"].values()
    arrived, size_bytes, used, wasted, cancelled = (
        sum(cause[name] for cause in causes)
        for name in ("arrived", "arrived_bytes", "used", "wasted", "cancelled")
    )
    yield from facts(
        [
            (
                "brought ahead",
                f"{count_text(arrived, 'file')}, {size_text(size_bytes)}; {used:,} used,"
                f" {wasted:,} evicted unread, {cancelled:,} cancelled; {prefetch['under_way']:,}"
                f" under way, {prefetch['waiting']:,} waiting",
            )
        ]
    )


def _row(tier: dict[str, Any]) -> list[str]:
    return [
        tier["name"],
        tier["kind"],
        _state(tier),
        f"{tier['blobs']:,} of {size_text(tier['size_bytes'])}",
        "none" if tier["max_bytes"] is None else size_text(tier["max_bytes"]),
        "-" if tier["free_bytes"] is None else size_text(tier["free_bytes"]),
        f"{tier['hits']:,}",
        f"{100 * tier['read_share']:.0f}%",
        f"{size_text(tier['read_bytes_per_s'])}/s",
        f"{size_text(tier['read_bytes_per_s_max'])}/s",
    ]


def _state(tier: dict[str, Any]) -> str:
    if not tier["is_open"]:
        return "not open"
    state = str(tier["health"])
    if tier["trouble"] and state == "up":
        state = "failing"
    return f"{state}, full" if tier["is_full"] else state
