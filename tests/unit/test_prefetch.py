"""What comes to the local store ahead of its readers: which, in what order, and when not."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs.config import (
    PREFETCH_BLOBS_MAX,
    PREFETCH_BYTES_MAX,
    PREFETCH_CHILDREN_MAX,
    PREFETCH_EXPECTED_S,
    PREFETCH_FILES_MAX,
    PREFETCH_GUESS_S,
    PREFETCH_GUESSES_MAX,
    PREFETCH_READ_AFTER_S,
    PREFETCH_SETTLE_S,
    PREFETCH_TRIES_MAX,
)
from kvfs.prefetch.machine import Prefetch
from kvfs.prefetch.successors import Successors
from kvfs.prefetch.words import (
    Action,
    Asked,
    Cancel,
    Cause,
    Ended,
    Event,
    Look,
    Promote,
    Read,
    Sweep,
    Used,
    Wanted,
)

S = 10**9
DISK, BUCKET = 1, 2  # sources
ROOMY = 1 << 40


def digest(ino: int) -> bytes:
    return ino.to_bytes(16, "big")


@dataclass
class Store:
    """Files by number, whose digests are made of them: which are here, and which chunks continue
    which. A number without an entry in `tree` is no chunk."""

    tree: dict[int, list[int]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    sources: int = DISK
    size_bytes: int = 1

    def children(self, ino: int, limit: int) -> Sequence[int] | None:
        found = self.tree.get(ino)
        return None if found is None else found[:limit]

    def lacking(self, inos: Sequence[int]) -> Sequence[Wanted]:
        return [self.wanted(ino) for ino in inos if ino not in self.here]

    def is_here(self, digest: bytes) -> bool:
        return int.from_bytes(digest, "big") in self.here

    def wanted(self, ino: int) -> Wanted:
        return Wanted(ino, digest(ino), self.size_bytes, self.sources)


@dataclass
class Rig:
    """A prefetch and the time."""

    store: Store = field(default_factory=Store)
    causes: frozenset[Cause] = frozenset(Cause)
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.prefetch = Prefetch(self.store, self.causes)
        self.see(0)

    def tell(self, event: Event) -> list[Action]:
        return self.prefetch.handle(event, self.now_ns)

    def begun(self, event: Event) -> list[int]:
        """The files that are promoted at an event."""
        actions = self.tell(event)
        assert all(isinstance(action, Promote) for action in actions)
        return [action.blob.ino for action in actions if isinstance(action, Promote)]

    def read(self, *inos: int, reader: int | None = 7) -> list[int]:
        """Some files are read at once, and nothing for a moment; what is begun then."""
        self.tell(Used(inos))
        for ino in inos:
            self.tell(Read(ino, digest(ino), self.now_ns, reader))
        return self.pause()

    def pause(self) -> list[int]:
        self.now_ns += int(PREFETCH_SETTLE_S * S)
        return self.begun(self.seen)

    def see(self, busy: int, spare_bytes: int = ROOMY) -> list[Action]:
        self.seen = Look(busy, spare_bytes)
        return self.tell(self.seen)

    def idle(self) -> list[int]:
        """What is begun when all sources are idle."""
        self.seen = Look(0, ROOMY)
        return self.begun(self.seen)

    def ask(self, cause: Cause, *inos: int) -> list[int]:
        return self.begun(Asked(cause, tuple(map(self.store.wanted, inos))))

    def arrive(self, *inos: int) -> list[int]:
        """These came; what is begun then."""
        begun = []
        for ino in inos:
            self.store.here.add(ino)
            begun += self.begun(Ended(digest(ino), is_here=True))
        return begun


def filled(rig: Rig) -> list[int]:
    """Have as much under way as there may be, so that what is asked for waits."""
    inos = list(range(1000, 1000 + PREFETCH_BLOBS_MAX))
    assert rig.ask(Cause.WARM, *inos) == inos
    return inos


# Order --------------------------------------------------------------------------------------------
def test_the_most_urgent_cause_comes_first_whatever_came_before() -> None:
    store = Store(tree={1: [10]})
    rig = Rig(store)
    store.here = {20, 21}
    for _ in range(2):
        for ino in (20, 21):
            rig.read(ino)
    store.here.clear()
    under_way = filled(rig)
    assert rig.read(20) == []
    assert rig.read(1) == []
    assert rig.ask(Cause.WARM, 30) == []
    assert rig.ask(Cause.EXPECTED, 40) == []
    assert [rig.arrive(ino) for ino in under_way[:5]] == [[40], [30], [10], [21], []]


def test_what_is_asked_for_comes_in_order_and_of_guesses_the_newest() -> None:
    store = Store(tree={1: [10, 11], 2: [12, 13]})
    rig = Rig(store)
    under_way = filled(rig)
    rig.ask(Cause.EXPECTED, 41, 40)
    rig.ask(Cause.EXPECTED, 42)
    rig.read(1)
    rig.read(2)
    begun = [rig.arrive(ino)[0] for ino in under_way[:7]]
    assert begun == [41, 40, 42, 12, 13, 10, 11]


def test_a_guess_that_becomes_an_order_is_not_fetched_twice() -> None:
    rig = Rig(Store(tree={1: [10]}))
    under_way = filled(rig)
    rig.read(1)
    rig.ask(Cause.EXPECTED, 10)
    rig.read(1)  # which would guess it again
    assert rig.prefetch.waiting_count == 1
    assert rig.arrive(under_way[0]) == [10]
    assert rig.read(1) == []
    assert rig.arrive(under_way[1]) == []
    assert (rig.prefetch.tallies[Cause.EXPECTED].started, rig.prefetch.tallies[Cause.CHILD]) == (
        1, type(rig.prefetch.tallies[Cause.CHILD])()
    )  # fmt: skip


# Guesses ------------------------------------------------------------------------------------------
def test_the_chunks_behind_a_chunk_come_nearest_first_and_only_so_many() -> None:
    chain = {ino: [ino + 1] for ino in range(1, 100)}
    rig = Rig(Store(tree=chain | {1: [2, 50]}))
    assert rig.read(1) == [2, 50, 3, 51, 4, 52, 5, 53]
    assert rig.arrive(2, 50, 3, 51, 4, 52, 5, 53) == []  # though there is room for more


def test_what_is_here_and_what_many_continue_is_no_guess() -> None:
    store = Store(tree={1: [2], 2: [3], 3: list(range(100, 101 + PREFETCH_CHILDREN_MAX))})
    store.here = {2}
    assert Rig(store).read(1) == [3]


def test_files_that_followed_twice_are_fetched_for_the_third_time() -> None:
    store = Store(here={1, 2, 3})
    rig = Rig(store)
    for _ in range(2):
        for ino in (1, 2, 3):
            assert rig.read(ino) == []
    store.here = {1}
    assert rig.read(1) == [2, 3]


def test_two_readers_do_not_follow_each_other() -> None:
    store = Store()
    rig = Rig(store)
    for _ in range(3):
        rig.read(1, reader=1)
        rig.read(2, reader=2)
    assert rig.prefetch.waiting_count == rig.prefetch.under_way_count == 0
    for _ in range(3):
        rig.read(1, 2, reader=None)  # by who is not known
    assert rig.prefetch.under_way_count == 0


def test_a_guess_takes_spare_room_only_and_none_is_large() -> None:
    store = Store(tree={1: [10, 11, 12]}, size_bytes=100)
    rig = Rig(store)
    rig.see(0, 250)
    assert rig.read(1) == [10, 11]
    assert rig.ask(Cause.EXPECTED, 20) == [20]  # for which something may go
    store.size_bytes = PREFETCH_BYTES_MAX + 1
    rig = Rig(store)
    assert rig.read(1) == []


def test_what_waited_for_too_long_is_dropped() -> None:
    rig = Rig(Store(tree={1: [10]}))
    under_way = filled(rig)
    rig.read(1)
    rig.ask(Cause.EXPECTED, 20)
    rig.ask(Cause.WARM, 30)
    rig.now_ns += int(PREFETCH_GUESS_S * S) + 1
    assert rig.arrive(under_way[0]) == [20]
    assert rig.arrive(under_way[1]) == [30]
    assert rig.arrive(under_way[2]) == []
    assert rig.ask(Cause.EXPECTED, 40, 41, 42) == [40]
    rig.now_ns += int(PREFETCH_EXPECTED_S * S) + 1
    assert rig.arrive(20) == []
    assert rig.prefetch.waiting_count == 0
    assert rig.prefetch.tallies[Cause.CHILD].dropped == 1
    assert rig.prefetch.tallies[Cause.EXPECTED].dropped == 2


def test_of_too_many_guesses_the_oldest_go() -> None:
    store = Store(tree={ino: [10_000 + ino] for ino in range(PREFETCH_GUESSES_MAX + 5)})
    rig = Rig(store)
    under_way = filled(rig)
    for ino in range(PREFETCH_GUESSES_MAX + 5):
        rig.read(ino)
    assert rig.prefetch.waiting_count == PREFETCH_GUESSES_MAX
    assert rig.prefetch.tallies[Cause.CHILD].dropped == 5
    assert rig.arrive(under_way[0]) == [10_000 + PREFETCH_GUESSES_MAX + 4]


def test_what_a_reader_has_reached_is_not_fetched_ahead_of_it() -> None:
    rig = Rig(Store(tree={1: [2], 2: [3], 3: []}))
    under_way = filled(rig)
    rig.read(1)
    rig.read(2)
    rig.store.here.add(3)  # fetched for a reader
    assert rig.arrive(*under_way) == []
    assert rig.prefetch.waiting_count == 0


# Idle sources only --------------------------------------------------------------------------------
def test_only_idle_sources_are_read_and_a_busy_one_cancels() -> None:
    store = Store(tree={1: [10]}, sources=DISK | BUCKET)
    rig = Rig(store)
    rig.see(DISK)
    rig.tell(Read(1, digest(1), rig.now_ns))
    assert rig.tell(rig.seen) == [Promote(store.wanted(10), BUCKET, Cause.CHILD)]
    assert rig.see(BUCKET) == [Cancel(digest(10))]
    assert rig.see(BUCKET) == []  # once
    assert rig.tell(Ended(digest(10), is_here=False)) == []
    tally = rig.prefetch.tallies[Cause.CHILD]
    assert (tally.started, tally.cancelled, tally.failed) == (1, 1, 0)
    assert rig.prefetch.waiting_count == 0  # its moment is over


def test_what_is_expected_waits_for_an_idle_source_and_is_tried_again() -> None:
    rig = Rig()
    rig.see(DISK)
    assert rig.ask(Cause.EXPECTED, 10) == []
    for _ in range(PREFETCH_TRIES_MAX):
        assert rig.idle() == [10]
        assert rig.see(DISK) == [Cancel(digest(10))]
        assert rig.tell(Ended(digest(10), is_here=False)) == []
    assert rig.idle() == []
    assert not rig.prefetch.is_pending(digest(10))


def test_guesses_wait_until_nobody_reads() -> None:
    rig = Rig(Store(tree={1: [10], 10: [11], 11: []}))
    rig.tell(Used([1]))
    rig.tell(Read(1, digest(1), rig.now_ns))
    assert rig.idle() == []
    assert rig.ask(Cause.EXPECTED, 20) == [20]
    assert rig.pause() == [10, 11]


def test_what_was_read_on_is_not_guessed_again() -> None:
    rig = Rig(Store(tree={1: [10], 10: [11], 11: []}))
    assert rig.read(1, 10) == [11]


def test_what_a_person_warms_goes_on_beside_readers() -> None:
    rig = Rig()
    rig.see(DISK)
    assert rig.ask(Cause.WARM, 10) == [10]
    assert rig.see(DISK) == []
    rig.see(0)
    assert rig.ask(Cause.EXPECTED, 20) == [20]
    rig.ask(Cause.WARM, 20)
    assert rig.see(DISK) == []


def test_what_a_reader_waits_for_is_not_cancelled() -> None:
    rig = Rig(Store(tree={1: [10], 10: []}))
    assert rig.read(1) == [10]
    assert rig.tell(Used([10])) == []
    assert rig.see(DISK) == []
    assert rig.arrive(10) == []
    assert rig.read(10) == []
    assert rig.prefetch.tallies[Cause.CHILD].used == 1


# Bounds and figures -------------------------------------------------------------------------------
def test_only_so_many_bytes_are_on_their_way_and_a_large_blob_comes_alone() -> None:
    rig = Rig(Store(size_bytes=PREFETCH_BYTES_MAX // 2))
    assert rig.ask(Cause.EXPECTED, 1, 2, 3) == [1, 2]
    rig.store.size_bytes = 2 * PREFETCH_BYTES_MAX
    assert rig.ask(Cause.EXPECTED, 4) == []
    rig.store.size_bytes = 1
    assert rig.ask(Cause.EXPECTED, 5) == []
    assert rig.arrive(1) == [3]
    assert rig.arrive(2, 3) == [4]  # nothing overtook it
    assert rig.arrive(4) == [5]


def test_use_waste_and_failure_are_counted() -> None:
    rig = Rig(Store(tree={1: [10, 11, 12], 10: [], 11: [], 12: []}, size_bytes=5))
    assert rig.read(1) == [10, 11, 12]
    rig.arrive(10, 11)
    rig.tell(Ended(digest(12), is_here=False))
    assert rig.prefetch.unread_count == 2
    rig.read(10)
    rig.read(10)
    rig.tell(Sweep())
    assert rig.prefetch.unread_count == 1
    rig.store.here.clear()  # one of them after it was of use
    rig.tell(Sweep())
    rig.tell(Sweep())
    tally = rig.prefetch.tallies[Cause.CHILD]
    assert (tally.started, tally.started_bytes, tally.arrived_bytes) == (3, 15, 10)
    assert (tally.used, tally.used_bytes, tally.wasted, tally.wasted_bytes) == (1, 5, 1, 5)
    assert (tally.failed, tally.cancelled, rig.prefetch.unread_count) == (1, 0, 0)
    assert rig.read(1) == [10, 12]  # 11 was no good guess
    rig.read(11)
    assert rig.read(1) == [11]


def test_causes_that_are_switched_off_bring_nothing() -> None:
    rig = Rig(Store(tree={1: [10]}), causes=frozenset({Cause.EXPECTED}))
    assert rig.read(1) == []
    assert rig.ask(Cause.WARM, 20) == []
    assert rig.ask(Cause.EXPECTED, 30) == [30]


# What follows what --------------------------------------------------------------------------------
def followed(successors: Successors, *inos: int) -> None:
    for ino in inos:
        successors.note(ino, 1, 0)


def test_a_new_habit_overtakes_an_old_one() -> None:
    successors = Successors()
    followed(successors, *[1, 2] * 50)
    assert successors.after(1, 4) == [2]
    followed(successors, *[1, 3] * 20)
    assert successors.after(1, 1) == [3]


def test_programs_that_are_run_for_one_file_each_follow_each_other() -> None:
    successors = Successors()
    for reader, ino in enumerate([1, 2, 3, 1, 2, 3]):
        successors.note(ino, reader, 0)
    assert successors.after(1, 4) == [2, 3]


def test_what_follows_by_chance_is_no_successor() -> None:
    successors = Successors()
    followed(successors, 1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 2)
    assert successors.after(1, 4) == []
    successors.note(8, 2, 0)
    successors.note(8, 2, 0)  # the same once more
    assert successors.after(8, 4) == []


def test_a_late_read_follows_nothing() -> None:
    successors = Successors()
    late_ns = int(PREFETCH_READ_AFTER_S * S) + 1
    for turn in range(3):
        successors.note(1, 1, 2 * turn * late_ns)
        successors.note(2, 1, (2 * turn + 1) * late_ns)
    assert successors.after(1, 4) == []


def test_the_table_is_bounded() -> None:
    successors = Successors()
    followed(successors, 1, 2, 1, 2)
    followed(successors, *range(10, PREFETCH_FILES_MAX + 100))
    assert len(successors) == PREFETCH_FILES_MAX
    assert successors.after(1, 1) == []
