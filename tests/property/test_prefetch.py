"""The prefetch by chance: whatever is read, asked for, comes, fails and goes, in any order."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.config import (
    PREFETCH_BLOBS_MAX,
    PREFETCH_BYTES_MAX,
    PREFETCH_DESCENDANTS_MAX,
    PREFETCH_FOLLOWERS_MAX,
    PREFETCH_GUESSES_MAX,
    PREFETCH_SETTLE_S,
    PREFETCH_TRIES_MAX,
)
from kvfs.prefetch.machine import Prefetch
from kvfs.prefetch.words import (
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

FILES = st.integers(1, 40)
SIZES = (1, PREFETCH_BYTES_MAX // 3, PREFETCH_BYTES_MAX, 2 * PREFETCH_BYTES_MAX)
SOURCES = 0b111
STEP_NS = 4 * 10**7  # so that three without a read are a pause
GUESSES_OF_A_READ = max(PREFETCH_DESCENDANTS_MAX, PREFETCH_FOLLOWERS_MAX)


class Ahead(RuleBasedStateMachine):
    """Even files are chunks, each continued by two others; all circle, so that what feeds itself
    would go on for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetch = Prefetch(self)
        self.now_ns = 0
        self.here: set[int] = set()
        self.under_way: dict[int, Promote] = {}
        self.cancelled: set[int] = set()
        self.read_meanwhile: set[int] = set()
        self.busy = 0
        self.quiet_ns = 0
        self.spare_bytes = 0
        self.guessed = 0  # promotions of guesses, ever
        self.ordered = 0
        self.guesses_due = 0  # that reads may have made
        self.orders_due = 0

    # What the prefetch asks
    def children(self, ino: int, limit: int) -> Sequence[int] | None:
        return None if ino % 2 else [ino * 3 % 40 & ~1 or 2, (ino * 7 + 2) % 40 & ~1 or 4][:limit]

    def lacking(self, inos: Sequence[int]) -> Sequence[Wanted]:
        return [self.wanted(ino) for ino in inos if ino not in self.here]

    def is_here(self, digest: bytes) -> bool:
        return digest[0] in self.here

    @staticmethod
    def wanted(ino: int) -> Wanted:
        return Wanted(ino, bytes([ino] * 16), SIZES[ino % len(SIZES)], 1 + ino % SOURCES)

    # What it hears
    def tell(self, event: Event) -> None:
        self.now_ns += STEP_NS
        for action in self.prefetch.handle(event, self.now_ns):
            if isinstance(action, Cancel):
                ino = action.digest[0]
                assert ino not in self.cancelled
                assert ino not in self.read_meanwhile
                assert self.under_way[ino].cause is not Cause.WARM
                assert not self.under_way[ino].sources & ~self.busy
                self.cancelled.add(ino)
            else:
                self.begin(action.blob.ino, action)

    def begin(self, ino: int, action: Promote) -> None:
        assert ino not in self.under_way
        assert action.sources
        assert not action.sources & ~self.wanted(ino).sources
        assert action.cause is Cause.WARM or not action.sources & self.busy
        if action.cause.is_guess:
            assert self.now_ns >= self.quiet_ns
            assert action.blob.size_bytes <= min(self.spare_bytes, PREFETCH_BYTES_MAX)
            self.guessed += 1
        else:
            self.ordered += 1
        self.spare_bytes -= action.blob.size_bytes
        self.under_way[ino] = action

    @rule(ino=FILES, reader=st.sampled_from([None, 1, 2]))
    def read(self, ino: int, reader: int | None) -> None:
        self.guesses_due += GUESSES_OF_A_READ
        if ino in self.under_way:
            self.read_meanwhile.add(ino)
        self.quiet_ns = self.now_ns + STEP_NS + int(PREFETCH_SETTLE_S * 1e9)
        self.tell(Used([ino]))
        self.tell(Read(ino, bytes([ino] * 16), self.now_ns, reader))

    @rule(cause=st.sampled_from([Cause.EXPECTED, Cause.WARM]), inos=st.lists(FILES, max_size=12))
    def ask(self, cause: Cause, inos: list[int]) -> None:
        self.orders_due += len(inos) * PREFETCH_TRIES_MAX
        self.tell(Asked(cause, tuple(self.wanted(ino) for ino in inos if ino not in self.here)))

    @rule(
        busy=st.integers(0, SOURCES),
        spare=st.sampled_from([0, *SIZES, 1 << 40]),
    )
    def look(self, busy: int, spare: int) -> None:
        self.busy, self.spare_bytes = busy, spare
        self.tell(Look(busy, spare))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_here=st.booleans())
    def end(self, data: st.DataObject, is_here: bool) -> None:
        ino = data.draw(st.sampled_from(sorted(self.under_way)))
        del self.under_way[ino]
        self.cancelled.discard(ino)
        self.read_meanwhile.discard(ino)
        if is_here:
            self.here.add(ino)
        self.tell(Ended(bytes([ino] * 16), is_here))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ino = data.draw(st.sampled_from(sorted(self.here)))
        self.here.discard(ino)

    @rule()
    def sweep(self) -> None:
        self.tell(Sweep())
        assert self.prefetch.unread_count <= len(self.here)

    @rule()
    def feed_back(self) -> None:
        """Whatever is promoted comes, is evicted at once, and a source is idle again, until nothing
        more happens: which it does."""
        most = self.guessed + self.ordered + self.prefetch.waiting_count
        self.now_ns = max(self.now_ns, self.quiet_ns)
        self.look(0, 1 << 40)
        while self.under_way:
            ino = next(iter(self.under_way))
            del self.under_way[ino]
            self.cancelled.discard(ino)
            self.read_meanwhile.discard(ino)
            self.tell(Ended(bytes([ino] * 16), is_here=True))
            self.tell(Sweep())
            self.look(0, 1 << 40)
            assert self.guessed + self.ordered <= most

    # What always holds
    @invariant()
    def is_bounded(self) -> None:
        sizes = [one.blob.size_bytes for one in self.under_way.values()]
        assert self.prefetch.under_way_count == len(sizes) <= PREFETCH_BLOBS_MAX
        assert self.prefetch.under_way_bytes == sum(sizes)
        assert sum(sizes) <= PREFETCH_BYTES_MAX or len(sizes) == 1
        guesses = sum(len(self.prefetch._waiting[c]) for c in Cause if c.is_guess)
        assert guesses <= 2 * PREFETCH_GUESSES_MAX

    @invariant()
    def nothing_feeds_itself(self) -> None:
        """Each promotion goes back to a read, or to somebody who asked for it."""
        assert self.guessed <= self.guesses_due
        assert self.ordered <= self.orders_due + self.guessed

    @invariant()
    def the_figures_add_up(self) -> None:
        assert sum(tally.started for tally in self.prefetch.tallies.values()) == (
            self.guessed + self.ordered
        )
        for tally in self.prefetch.tallies.values():
            ended = tally.arrived + tally.cancelled + tally.failed
            assert tally.used + tally.wasted <= tally.arrived <= ended <= tally.started


Ahead.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAhead = Ahead.TestCase
