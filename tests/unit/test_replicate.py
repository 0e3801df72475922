"""Which nodes keep copies: the same answer everywhere, spread, and little moved by a change."""

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from kvfs.replicate import (
    Shortage,
    Standing,
    find_shortage,
    is_in_charge,
    rank,
    wanted_copies,
)
from kvfs.settings.rules import parse_copy_rules
from kvfs.settings.words import CopyRule

DIGEST = b"d" * 16
NODES = tuple(bytes([n]) * 16 for n in range(1, 9))

node_ids = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=16, max_size=16)


def seen_by(me: bytes, staying: set[bytes], just_gone: set[bytes] | None = None) -> Standing:
    return Standing(me, frozenset(staying), frozenset(staying | (just_gone or set())))


# The order ----------------------------------------------------------------------------------------
@given(digests, st.sets(node_ids, max_size=12), st.randoms())
def test_the_order_is_the_same_however_the_nodes_are_named(
    digest: bytes, nodes: set[bytes], chance: object
) -> None:
    listed = sorted(nodes)
    chance.shuffle(listed)  # type: ignore[attr-defined]  # Hypothesis's own Random
    assert rank(digest, listed) == rank(digest, nodes)
    assert sorted(rank(digest, nodes)) == sorted(nodes)


@given(digests, st.sets(node_ids, min_size=1, max_size=12), node_ids)
def test_who_comes_or_goes_changes_the_place_of_no_other(
    digest: bytes, nodes: set[bytes], other: bytes
) -> None:
    assume(other not in nodes)
    with_other = rank(digest, nodes | {other})
    assert tuple(n for n in with_other if n != other) == rank(digest, nodes)


def test_first_places_are_spread_evenly() -> None:
    firsts = Counter(rank(n.to_bytes(16, "big"), NODES)[0] for n in range(8000))
    assert set(firsts) == set(NODES)
    assert min(firsts.values()) > 850 and max(firsts.values()) < 1150


# Decisions ----------------------------------------------------------------------------------------
@given(
    digests,
    st.sets(node_ids, min_size=1, max_size=10),
    st.sets(node_ids, max_size=3),
    st.integers(1, 12),
    st.data(),
)
def test_one_holder_sees_to_what_is_missing_and_then_all_is_well(
    digest: bytes, staying: set[bytes], gone: set[bytes], wanted: int, data: st.DataObject
) -> None:
    gone -= staying
    holders = data.draw(st.sets(st.sampled_from(sorted(staying)), min_size=1))
    holders |= data.draw(st.sets(st.sampled_from(sorted(gone)))) if gone else set()
    found = {
        me: shortage
        for me in holders & staying
        if (shortage := find_shortage(digest, wanted, holders, seen_by(me, staying))) is not None
    }
    enough = len(holders & staying) >= min(wanted, len(staying))
    assert len(found) == (0 if enough else 1)
    for shortage in found.values():
        assert not set(shortage.targets) & holders
        assert set(shortage.targets) <= staying
        assert len(set(shortage.targets)) == len(shortage.targets) >= shortage.missing
        holders |= set(shortage.targets[: shortage.missing])
        assert len(holders & staying) == min(wanted, len(staying))
        for me in holders & staying:
            assert find_shortage(digest, wanted, holders, seen_by(me, staying)) is None


def test_one_copy_is_what_there_is() -> None:
    assert find_shortage(DIGEST, 1, [NODES[0]], seen_by(NODES[0], set(NODES))) is None


def test_alone_there_is_nobody_to_ask() -> None:
    assert find_shortage(DIGEST, 3, [NODES[0]], seen_by(NODES[0], {NODES[0]})) is None


def test_who_has_no_copy_sees_to_nothing() -> None:
    first = rank(DIGEST, NODES)[0]
    others = [n for n in NODES if n != first][:1]
    assert find_shortage(DIGEST, 3, others, seen_by(first, set(NODES))) is None
    assert not is_in_charge(DIGEST, [], seen_by(first, set(NODES)))


def test_a_node_that_went_just_now_counts_still() -> None:
    a, b, c = NODES[:3]
    assert find_shortage(DIGEST, 2, [a, b], seen_by(a, {a, c}, {b})) is None
    assert find_shortage(DIGEST, 2, [a, b], seen_by(a, {a, c})) == Shortage(1, (c,))


def test_the_copy_of_a_node_that_is_leaving_does_not_count() -> None:
    a, b, c = NODES[:3]
    assert find_shortage(DIGEST, 2, [a, b], seen_by(a, {a, c})) == Shortage(1, (c,))
    assert find_shortage(DIGEST, 2, [a, b], seen_by(b, {a, c})) is None


# Rules --------------------------------------------------------------------------------------------
def test_the_longest_prefix_counts() -> None:
    rules = parse_copy_rules(
        [
            {"prefix": "kv/", "copies": 2},
            {"prefix": "/kv/llama@", "copies": 3},
            {"prefix": "kv/llama@old/", "copies": 1},
        ]
    )
    assert rules[1] == CopyRule(b"kv/llama@", 3)
    paths = [b"kv/x", b"kv/llama@ab/f", b"kv/llama@old/f", b"kv/llama@older/f", b"other", b""]
    assert [wanted_copies(rules, path) for path in paths] == [2, 3, 1, 3, 1, 1]
    assert wanted_copies((), b"kv/x") == 1
    assert wanted_copies(parse_copy_rules([{"prefix": "", "copies": 2}]), b"any") == 2
