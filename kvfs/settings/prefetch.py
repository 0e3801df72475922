"""The `[prefetch]` of a configuration: what a person may write there, and what it means."""

from kvfs.errors import InvalidInput
from kvfs.settings.sizes import Share, parse_size_or_share
from kvfs.settings.words import PrefetchConfig

SWITCHES = ("expected", "children", "successors")
KEYS = (*SWITCHES, "full_at")


def parse_prefetch(table: object) -> PrefetchConfig:
    """Check the table and give it types. Raises `InvalidInput`."""
    if not isinstance(table, dict):
        raise InvalidInput("prefetch", "is no table; write [prefetch]")
    for key, value in table.items():
        if key not in KEYS:
            known = ", ".join(sorted(KEYS))
            raise InvalidInput(f"prefetch.{key}", f"unknown key; known are {known}")
        if key in SWITCHES and not isinstance(value, bool):
            raise InvalidInput(
                f"prefetch.{key}", f"{value!r:.80} is neither true nor false; write one"
            )
    written = table.get("full_at", "90%")
    is_share = isinstance(written, str) and written.rstrip().endswith("%")
    full_at = parse_size_or_share(written, "prefetch.full_at") if is_share else None
    if not isinstance(full_at, Share):
        raise InvalidInput(
            "prefetch.full_at", f'{written!r:.80} is no share of the store; write for example "90%"'
        )
    switches = {key: table[key] for key in SWITCHES if key in table}
    return PrefetchConfig(**switches, full_at=full_at.of_capacity)
