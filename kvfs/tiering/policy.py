"""To which tiers a blob is copied, and what leaves a tier first: pure decisions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvfs.config import TIERS_MAX
from kvfs.settings.words import TierRule

_USUAL = TierRule(b"", TIERS_MAX)


def rule_of(rules: Sequence[TierRule], paths: Iterable[bytes]) -> TierRule:
    """What holds for a blob with these paths: of each path the rule with the longest prefix, of
    these the one that asks for most. Without paths no copy is wanted."""
    found = [_rule_of_path(rules, path) for path in paths]
    return max(found, key=lambda r: (r.copies, not r.second_use), default=TierRule(b"", 0))


def _rule_of_path(rules: Sequence[TierRule], path: bytes) -> TierRule:
    fitting = (rule for rule in rules if path.startswith(rule.prefix))
    return max(fitting, key=lambda rule: len(rule.prefix), default=_USUAL)


def missing_tiers(copies: int, order: Sequence[int], mask: int) -> list[int]:
    """The tiers, by their numbers in the order of the configuration, that are to get a blob which
    those of the mask have. The first that have it not come first; who takes none is passed over by
    the caller, up to the number that is still wanted (`wanted_more`)."""
    return [number for number in order if not mask >> number & 1] if copies else []


def wanted_more(copies: int, order: Sequence[int], mask: int) -> int:
    """How many more tiers are to have a blob."""
    held = sum(mask >> number & 1 for number in order)
    return max(0, min(copies, len(order)) - held)


@dataclass(frozen=True, slots=True)
class Resident:
    """A blob in a tier that has too much."""

    digest: bytes
    size_bytes: int
    used_ns: int | None  # when a file that holds it was used last; None: no file does
    is_last: bool  # no other place is known to have it
    is_pinned: bool = False


def plan_removal(residents: Iterable[Resident], need_bytes: int, share: float) -> list[Resident]:
    """What leaves a tier: at most a share of those that were looked at, so that the coldest of all
    are met first over time. What no file holds goes first, then the coldest that are elsewhere as
    well, and last copies last; of what is pinned no last copy goes."""
    ranked = sorted(
        (one for one in residents if not (one.is_pinned and one.is_last)),
        key=lambda one: (
            one.used_ns is not None and one.is_last,
            one.used_ns is not None,
            one.used_ns or 0,
        ),
    )
    chosen: list[Resident] = []
    for one in ranked[: max(1, int(len(ranked) * share))]:
        if need_bytes <= 0:
            break
        chosen.append(one)
        need_bytes -= one.size_bytes
    return chosen
