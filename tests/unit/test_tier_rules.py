"""To which tiers a blob is copied, and what leaves a tier first."""

import pytest

from kvfs.config import TIERS_MAX
from kvfs.errors import InvalidInput
from kvfs.settings.load import parse_config
from kvfs.settings.rules import parse_tier_rules
from kvfs.settings.words import TierRule
from kvfs.tiering.policy import Resident, missing_tiers, plan_removal, rule_of, wanted_more

RULES = (TierRule(b"kv/", 2), TierRule(b"kv/m/", 0), TierRule(b"tmp", 1, second_use=True))


@pytest.mark.parametrize(
    ("paths", "copies", "second_use"),
    [
        ([], 0, False),
        ([b"a"], TIERS_MAX, False),
        ([b"kv/n/x"], 2, False),
        ([b"kv/m/x"], 0, False),
        ([b"tmp/x"], 1, True),
        ([b"kv/m/x", b"tmp/x"], 1, True),
        ([b"kv/m/x", b"a"], TIERS_MAX, False),
    ],
)
def test_the_longest_prefix_counts_and_of_several_paths_the_most(
    paths: list[bytes], copies: int, second_use: bool
) -> None:
    rule = rule_of(RULES, paths)
    assert (rule.copies, rule.second_use) == (copies, second_use)


def test_a_rule_that_does_not_wait_beats_one_that_does() -> None:
    rules = (TierRule(b"a", 1, second_use=True), TierRule(b"b", 1))
    assert not rule_of(rules, [b"a", b"b"]).second_use


def test_copies_are_counted_over_the_tiers_that_are_configured() -> None:
    order = [5, 0, 2]
    assert wanted_more(TIERS_MAX, order, 0b000100) == 2
    assert wanted_more(1, order, 0b000100) == 0
    assert wanted_more(1, order, 0b001000) == 1  # of a tier that is not there any more
    assert missing_tiers(1, order, 0b000100) == [5, 0]
    assert missing_tiers(0, order, 0) == []


def resident(name: bytes, used_ns: int | None, *, last: bool, pinned: bool = False) -> Resident:
    return Resident(name, 10, used_ns, is_last=last, is_pinned=pinned)


def test_what_nobody_holds_goes_first_and_last_copies_go_last() -> None:
    residents = [
        resident(b"last", 1, last=True),
        resident(b"hot", 9, last=False),
        resident(b"cold", 2, last=False),
        resident(b"unnamed", None, last=True),
        resident(b"pinned", 0, last=True, pinned=True),
    ]
    order = [b"unnamed", b"cold", b"hot", b"last"]
    for count in range(5):
        chosen = plan_removal(residents, count * 10, 1.0)
        assert [one.digest for one in chosen] == order[:count]
    assert len(plan_removal(residents, 1000, 0.5)) == 2
    assert len(plan_removal(residents, 1000, 0.01)) == 1


def test_rules_are_read_from_a_configuration() -> None:
    tables = [
        {"prefix": "/kv/", "copies": "all"},
        {"prefix": "b", "copies": "never"},
        {"prefix": "c", "copies": 3, "second_use": True},
        {"prefix": ""},
    ]
    expected = (
        TierRule(b"kv/", TIERS_MAX),
        TierRule(b"b", 0),
        TierRule(b"c", 3, second_use=True),
        TierRule(b"", TIERS_MAX),
    )
    assert parse_tier_rules(tables) == expected
    assert parse_config({"tier_copies": tables}).tier_rules == expected


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"copies": 1}, "prefix: is missing"),
        ({"prefix": "a", "copies": "some"}, "'some' is neither all nor never"),
        ({"prefix": "a", "copies": -1}, "number of tiers from 0"),
        ({"prefix": "a", "copies": True}, "number of tiers from 0"),
        ({"prefix": "a", "second_use": 1}, "neither true nor false"),
        ({"prefix": "a\0"}, "begins no path"),
        ({"prefix": "a", "tiers": []}, "tiers: unknown key"),
    ],
)
def test_a_wrong_rule_is_refused_precisely(table: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        parse_tier_rules([table])
    with pytest.raises(InvalidInput, match="is named twice"):
        parse_tier_rules([{"prefix": "a"}, {"prefix": "/a"}])
