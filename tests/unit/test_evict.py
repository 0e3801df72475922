"""Eviction decisions over a small view: order, prefixes, pins, shared blobs, directories."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import evict
from kvfs.config import EVICTION_WINDOW
from kvfs.evict import Decision
from kvfs.meta.contract import Candidate


@dataclass
class Store:
    """Files and which chunk continues which; counts what is asked of it."""

    files: dict[int, Candidate] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    questions: int = 0

    def add(self, ino: int, used_ns: int, parent: int = 0, **fields: object) -> None:
        made = Candidate(ino, used_ns, bytes([ino % 256]) * 16, 0, 10, 1)
        self.files[ino] = replace(made, **fields)  # type: ignore[arg-type]  # a test's own words
        if parent:
            self.parents[ino] = parent

    def coldest(
        self, limit: int, after: tuple[int, int] = (0, 0), directory: int | None = None
    ) -> list[Candidate]:
        found = [
            c
            for c in self.files.values()
            if not c.is_pinned and directory in (None, c.directory) and (c.used_ns, c.ino) > after
        ]
        return sorted(found, key=lambda c: (c.used_ns, c.ino))[:limit]

    def continuations(self, ino: int, after: int, limit: int) -> list[Candidate]:
        self.questions += 1
        found = [self.files[c] for c, p in sorted(self.parents.items()) if p == ino and c > after]
        return [c for c in found if c.ino in self.files][:limit]

    def newest_used_ns(self) -> int:
        return max((c.used_ns for c in self.files.values() if not c.is_pinned), default=0)

    def apply(self, decision: Decision) -> None:
        for ino, used_ns in decision.restamp:
            self.files[ino] = replace(self.files[ino], used_ns=used_ns)
        for ino in decision.evict:
            gone = self.files.pop(ino)
            self.parents.pop(ino, None)
            for other in self.files.values():
                if other.digest == gone.digest:
                    left = replace(other, references=other.references - 1)
                    self.files[other.ino] = left


def test_plain_files_go_least_recently_used_first() -> None:
    store = Store()
    for ino, used_ns in [(1, 30), (2, 10), (3, 20), (4, 10)]:
        store.add(ino, used_ns)
    assert evict.plan(store, 25, 9) == Decision((2, 4, 3), (), 30)
    assert evict.plan(store, 25, 2) == Decision((2, 4), (), 20)
    assert evict.plan(store, 0, 9) == Decision((), (), 0)
    assert evict.plan(Store(), 5, 9) == Decision((), (), 0)


def test_a_suffix_goes_before_its_prefix() -> None:
    store = Store()
    store.add(1, 10)
    store.add(2, 20, parent=1)
    store.add(3, 30, parent=2)
    store.add(9, 25)
    assert evict.plan(store, 40, 9) == Decision((9, 3, 2, 1), (), 40)
    decision = evict.plan(store, 10, 9)
    assert (decision.evict, dict(decision.restamp)) == ((9,), {1: 32, 2: 31, 3: 30})


def test_a_pinned_or_kept_file_stays_and_so_do_its_ancestors() -> None:
    store = Store()
    store.add(1, 10)
    store.add(2, 20, parent=1)
    store.add(3, 30, parent=2, is_pinned=True)
    store.add(4, 40, parent=1)
    store.add(5, 50)
    decision = evict.plan(store, 99, 9)
    assert (decision.evict, decision.freed_bytes) == ((4, 5), 20)
    assert dict(decision.restamp) == {2: 51, 1: 52}
    store.files[3] = replace(store.files[3], is_pinned=False)
    decision = evict.plan(store, 99, 9, kept={3: 1}.keys())
    assert (decision.evict, decision.freed_bytes) == ((4, 5), 20)
    assert set(dict(decision.restamp)) == {1, 2, 3}


def test_nothing_to_evict_is_an_empty_decision() -> None:
    store = Store()
    store.add(1, 10)
    store.add(2, 20, parent=1)
    assert evict.plan(store, 5, 9, kept=(2,)) == Decision((), (), 0)


def test_a_shared_blob_is_freed_with_its_last_file() -> None:
    store = Store()
    for ino in (1, 2, 3):
        store.add(ino, ino * 10, digest=b"s" * 16, references=2 if ino < 3 else 1)
    store.files[3] = replace(store.files[3], digest=b"t" * 16)
    assert evict.plan(store, 5, 9) == Decision((1, 2), (), 10)


def test_only_one_directory_gives_way() -> None:
    store = Store()
    store.add(1, 10, directory=1)
    store.add(2, 20, directory=0)
    store.add(3, 5, directory=1, parent=2)
    store.add(4, 30, directory=0)
    assert evict.plan(store, 99, 9, directory=0) == Decision((3, 2, 4), (), 20)


def test_a_long_chain_in_the_wrong_order_costs_its_length_once() -> None:
    store = Store()
    length = 300
    for ino in range(1, length + 1):
        store.add(ino, ino * 10, parent=ino - 1)
    decision = evict.plan(store, 20, 9)
    assert decision.evict == (length, length - 1)
    assert store.questions <= 2 * length
    store.apply(decision)
    store.questions = 0
    assert evict.plan(store, 20, 9).evict == (length - 2, length - 3)
    assert store.questions < 10


def test_more_continuations_than_one_look_shows() -> None:
    store = Store()
    store.add(1, 1)
    for ino in range(2, 202):
        store.add(ino, 500 - ino, parent=1)
    decision = evict.plan(store, 10**9, 10**9)
    assert decision.evict[-1] == 1
    assert len(decision.evict) == 201


@st.composite
def stores(draw: st.DrawFn) -> Store:
    store = Store()
    for ino in range(1, draw(st.integers(1, 14)) + 1):
        store.add(
            ino,
            draw(st.integers(1, 30)),
            parent=draw(st.integers(0, ino - 1)),
            digest=bytes([draw(st.integers(0, 20))]) * 16,
            is_pinned=draw(st.integers(0, 6)) == 0,
        )
    shared = [c.digest for c in store.files.values()]
    for ino, candidate in store.files.items():
        digest = candidate.digest
        store.files[ino] = replace(
            candidate, references=shared.count(digest), directory=digest[0] % 2
        )
    return store


def staying(store: Store, kept: set[int]) -> set[int]:
    """Files that may not go: pinned, kept, and what they continue."""
    found = set()
    for ino, candidate in store.files.items():
        if candidate.is_pinned or ino in kept:
            above = ino
            while above:
                found.add(above)
                above = store.parents.get(above, 0)
    return found


@given(stores(), st.integers(1, 60), st.integers(1, 5), st.sets(st.integers(1, 14), max_size=2))
def test_evicting_step_by_step(store: Store, need_bytes: int, limit: int, kept: set[int]) -> None:
    stay = staying(store, kept)
    weights: dict[bytes, int] = {c.digest: 10 for c in store.files.values()}
    held = {store.files[ino].digest for ino in stay}
    possible = sum(weight for digest, weight in weights.items() if digest not in held)
    freed = 0
    while freed < need_bytes:
        decision = evict.plan(store, need_bytes - freed, limit, kept=kept)
        if not decision.evict:
            assert decision == Decision((), (), 0)
            break
        assert len(decision.evict) <= limit
        left = dict(store.parents)
        for ino in decision.evict:
            assert ino not in stay
            assert ino not in left.values(), "a prefix went before its suffix"
            left.pop(ino, None)
        digests_before = {c.digest for c in store.files.values()}
        store.apply(decision)
        gone = digests_before - {c.digest for c in store.files.values()}
        assert decision.freed_bytes == 10 * len(gone)
        freed += decision.freed_bytes
        for ino, used_ns in decision.restamp:
            assert store.files[ino].used_ns == used_ns
    assert freed >= min(need_bytes, possible)
    assert freed < need_bytes + 10


@given(stores(), st.integers(1, 60), st.sets(st.integers(1, 14), max_size=2), st.integers(1, 6))
def test_evicting_in_short_steps(
    store: Store, need_bytes: int, kept: set[int], questions_max: int
) -> None:
    stay = staying(store, kept)
    held = {store.files[ino].digest for ino in stay}
    possible = 10 * len({c.digest for c in store.files.values()} - held)
    freed = steps = 0
    until_ns, has_evicted = store.newest_used_ns(), False
    with mock.patch.object(evict, "EVICTION_QUESTIONS_MAX", questions_max):
        while freed < need_bytes:
            steps += 1
            assert steps < 200, "it goes round in circles"
            store.questions = 0
            decision = evict.plan(store, need_bytes - freed, 3, kept=kept, until_ns=until_ns)
            assert store.questions <= 2 * (questions_max + 1)  # each may need a second page
            assert not set(decision.evict) & stay
            store.apply(decision)
            freed += decision.freed_bytes
            has_evicted |= bool(decision.evict)
            if not decision.evict and not decision.restamp:
                if not has_evicted:
                    break
                until_ns, has_evicted = store.newest_used_ns(), False
    assert freed >= min(need_bytes, possible)


def test_a_walk_over_what_stays_is_cut_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evict, "EVICTION_QUESTIONS_MAX", 50)
    store = Store()
    count = 3 * evict.EVICTION_QUESTIONS_MAX
    for ino in range(1, count + 1):
        store.add(ino, ino)
        store.add(count + ino, 10**6, parent=ino, is_pinned=True)
    store.add(10**6, count + 1)  # the one that may go
    until_ns, steps = store.newest_used_ns(), 0
    while not (decision := evict.plan(store, 10, 9, until_ns=until_ns)).evict:
        assert 0 < len(decision.restamp) <= evict.EVICTION_QUESTIONS_MAX
        store.apply(decision)
        steps += 1
    assert (steps, decision.evict) == (3, (10**6,))
    store.apply(decision)
    while (decision := evict.plan(store, 10, 9, until_ns=until_ns)).restamp:
        store.apply(decision)
    assert decision == Decision((), (), 0)


@given(stores(), st.integers(1, 60))
def test_one_directory_is_relieved_whenever_it_can_be(store: Store, need_bytes: int) -> None:
    stay = staying(store, set())
    held = {store.files[ino].digest for ino in stay}
    here = {c.digest for c in store.files.values() if c.directory == 0}
    # A blob here goes when all that share it may go: their files are all of this directory.
    decision = evict.plan(store, need_bytes, 99, directory=0)
    possible = 10 * len(here - held)
    assert decision.freed_bytes >= min(need_bytes, possible)
    assert not set(decision.evict) & stay


@given(stores())
def test_unrelated_files_keep_their_order(store: Store) -> None:
    store.parents.clear()
    everything = [c.ino for c in store.coldest(99)]
    assert list(evict.plan(store, 10**9, 99).evict) == everything


# Last copies --------------------------------------------------------------------------------------
def among(*numbers: int) -> Callable[[Sequence[bytes]], set[bytes]]:
    """What other nodes have: the digests of these files."""
    held = {bytes([number % 256]) * 16 for number in numbers}
    return held.intersection


def test_of_the_coldest_those_go_first_that_others_have() -> None:
    store = Store()
    for ino in range(1, 6):
        store.add(ino, ino * 10)
    assert evict.plan(store, 20, 9, elsewhere=among(3, 5)) == Decision((3, 5), (), 20)
    assert evict.plan(store, 30, 9, elsewhere=among(3, 5)) == Decision((3, 5, 1), (), 30)
    assert evict.plan(store, 30, 2, elsewhere=among(5)) == Decision((5, 1), (), 20)
    assert evict.plan(store, 20, 9, elsewhere=among()) == evict.plan(store, 20, 9)


def test_copies_beyond_the_coldest_wait_for_their_turn() -> None:
    store = Store()
    for ino in range(1, 2 * EVICTION_WINDOW):
        store.add(ino, ino, digest=ino.to_bytes(16, "big"))
    far = (EVICTION_WINDOW + 1).to_bytes(16, "big")
    assert evict.plan(store, 10, 9, elsewhere=lambda digests: {far}).evict == (1,)
    near = EVICTION_WINDOW.to_bytes(16, "big")
    assert evict.plan(store, 10, 9, elsewhere=lambda digests: {near}).evict == (EVICTION_WINDOW,)


def test_what_is_newer_than_the_round_is_no_candidate() -> None:
    store = Store()
    store.add(1, 10)
    store.add(2, 30)
    assert evict.plan(store, 10, 9, until_ns=20, elsewhere=among(2)).evict == (1,)


def test_a_copy_of_a_prefix_stays_as_long_as_its_suffix() -> None:
    store = Store()
    store.add(1, 10)
    store.add(2, 20, parent=1)
    store.add(3, 15)
    assert evict.plan(store, 10, 9, elsewhere=among(1)).evict == (3,)
    assert evict.plan(store, 10, 9, elsewhere=among(1, 2)).evict == (2,)
    assert evict.plan(store, 10, 9, kept={2}, elsewhere=among(1, 2)).evict == (3,)


@given(stores(), st.integers(1, 60), st.integers(1, 5), st.sets(st.integers(0, 20)))
def test_last_copies_and_others_leave_as_many_bytes_and_no_suffix(
    store: Store, need_bytes: int, limit: int, held: set[int]
) -> None:
    stay = staying(store, set())
    freed = 0
    possible = 10 * len(
        {c.digest for c in store.files.values()} - {store.files[ino].digest for ino in stay}
    )
    while freed < need_bytes:
        decision = evict.plan(store, need_bytes - freed, limit, elsewhere=among(*held))
        if not decision.evict:
            break
        assert len(decision.evict) <= limit
        assert len(set(decision.evict)) == len(decision.evict)
        left = dict(store.parents)
        for ino in decision.evict:
            assert ino not in stay
            assert ino not in left.values(), "a prefix went before its suffix"
            left.pop(ino, None)
        store.apply(decision)
        freed += decision.freed_bytes
    assert min(need_bytes, possible) <= freed < need_bytes + 10
