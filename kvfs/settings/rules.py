"""Rules of a configuration, by the beginning of paths: how many copies files are to have."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvfs.config import (
    CLUSTER_NODES_MAX,
    COPY_RULES_MAX,
    PATH_BYTES_MAX,
    TIER_RULES_MAX,
    TIERS_MAX,
)
from kvfs.errors import InvalidInput
from kvfs.settings.words import CopyRule, TierRule

_NODES, _TIERS = "cluster.copies", "tier_copies"  # where they are written
_COPIES_WORDS = {"all": TIERS_MAX, "never": 0}
_Rule = TypeVar("_Rule", CopyRule, TierRule)


def parse_copy_rules(value: object) -> tuple[CopyRule, ...]:
    """The `[[cluster.copies]]` of a configuration. Raises `InvalidInput`."""
    return _parse(value, _NODES, COPY_RULES_MAX, _parse_copy_rule)


def parse_tier_rules(value: object) -> tuple[TierRule, ...]:
    """The `[[tier_copies]]` of a configuration. Raises `InvalidInput`."""
    return _parse(value, _TIERS, TIER_RULES_MAX, _parse_tier_rule)


def _parse(
    value: object, key: str, count_max: int, parse: Callable[[Mapping[str, Any]], _Rule]
) -> tuple[_Rule, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInput(key, f"is no list of tables; write [[{key}]] above each rule")
    if len(value) > count_max:
        raise InvalidInput(key, f"are {len(value)} rules; {count_max} are the limit")
    rules = tuple(parse(item) for item in value)
    prefixes = [rule.prefix for rule in rules]
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            shown = prefix.decode(errors="replace")
            raise InvalidInput(f"{key}.prefix", f"{shown!r:.80} is named twice; name it once")
    return rules


def _parse_prefix(table: Mapping[str, Any], key: str, known: tuple[str, ...]) -> bytes:
    """The prefix of a rule that has no keys but the `known` ones."""
    for word in table:
        if word not in known:
            raise InvalidInput(f"{key}.{word}", f"unknown key; known are {', '.join(known)}")
    prefix = table.get("prefix")
    if not isinstance(prefix, str):
        raise InvalidInput(f"{key}.prefix", "is missing or no text; write how the paths begin")
    packed = prefix.encode().lstrip(b"/")
    if len(packed) > PATH_BYTES_MAX or b"\0" in packed:
        raise InvalidInput(f"{key}.prefix", f"{prefix!r:.80} begins no path")
    return packed


def _parse_copy_rule(table: Mapping[str, Any]) -> CopyRule:
    prefix = _parse_prefix(table, _NODES, ("copies", "prefix"))
    copies = table.get("copies")
    if type(copies) is not int or not 1 <= copies <= CLUSTER_NODES_MAX:
        shown = "nothing" if copies is None else f"{copies!r:.80}"
        raise InvalidInput(
            f"{_NODES}.copies", f"{shown} is no number of nodes from 1 to {CLUSTER_NODES_MAX}"
        )
    return CopyRule(prefix, copies)


def _parse_tier_rule(table: Mapping[str, Any]) -> TierRule:
    prefix = _parse_prefix(table, _TIERS, ("copies", "prefix", "second_use"))
    copies = table.get("copies", "all")
    if isinstance(copies, str):
        copies = _COPIES_WORDS.get(copies)
    if type(copies) is not int or not 0 <= copies <= TIERS_MAX:
        shown = f"{table['copies']!r:.80} is neither all nor never"
        raise InvalidInput(
            f"{_TIERS}.copies", f"{shown}, and no number of tiers from 0 to {TIERS_MAX}"
        )
    second_use = table.get("second_use", False)
    if not isinstance(second_use, bool):
        raise InvalidInput(
            f"{_TIERS}.second_use", f"{second_use!r:.80} is neither true nor false; write one"
        )
    return TierRule(prefix, copies, second_use)
