"""Memory as credit: how the pull scheduler spends buffers of a pool and scratch."""

from typing import Any

from kvfs import config
from kvfs.schedule import (
    Action,
    Chunk,
    ChunkDone,
    JobAdded,
    Memory,
    MemoryFreed,
    Outcome,
    ReadEnded,
    ReadKind,
    Schedule,
    StartRead,
    Tick,
    TierDown,
    TierTerms,
    TierUp,
)

MS = 1_000_000
MIB = config.MIB
ONE = TierTerms(reads_max=1, bytes_per_s=1000e6)
TWO = TierTerms(reads_max=2, bytes_per_s=1000e6)


class Bench:
    """A schedule with tiers, and the reads that it began."""

    def __init__(self, *terms: TierTerms, buffers: int, scratch: int | None = None) -> None:
        self.schedule = Schedule(scratch)
        self.now_ns = 1000 * MS
        self.tell(MemoryFreed(buffers))
        for tier, given in enumerate(terms):
            self.tell(TierUp(tier, given))

    def tell(self, event: Any) -> list[StartRead]:
        return begun(self.schedule.handle(event, self.now_ns))

    def add(self, job: int, *chunks: Chunk, is_pooled: bool = True) -> list[StartRead]:
        return self.tell(JobAdded(job, chunks, is_pooled=is_pooled))

    def land(self, read: StartRead) -> list[StartRead]:
        self.now_ns += 4 * MS
        return self.tell(ReadEnded(read.read, Outcome.LANDED))

    def wait_for_reads(self) -> list[StartRead]:
        """Tick as the schedule wants it, until it begins some."""
        while (wake_ns := self.schedule.wake_ns) is not None:
            self.now_ns = max(self.now_ns, wake_ns)
            if reads := self.tell(Tick()):
                return reads
        return []


def begun(actions: list[Action]) -> list[StartRead]:
    return [action for action in actions if isinstance(action, StartRead)]


def on(*tiers: int, size: int = MIB // 4) -> Chunk:
    return Chunk(size, tiers)


def test_a_thousand_chunks_go_through_eight_buffers() -> None:
    bench = Bench(TWO, TWO, buffers=8)
    reads = bench.add(1, *[on(0, 1)] * 1000)
    done = out = 0
    while reads:
        read = reads.pop(0)
        out += read.into is Memory.NEW
        assert out <= 8
        bench.now_ns += 4 * MS
        actions = bench.schedule.handle(ReadEnded(read.read, Outcome.LANDED), bench.now_ns)
        done += sum(isinstance(action, ChunkDone) for action in actions)
        reads += begun(actions)
        if out == 8 and not reads:  # used all at once, and then given back one by one
            for _ in range(8):
                out -= 1
                reads += bench.tell(MemoryFreed(buffers=1))
    assert done == 1000
    assert bench.schedule.is_empty


def test_a_chunk_that_brings_its_memory_is_not_held_up_by_those_that_wait_for_it() -> None:
    bench = Bench(ONE, buffers=0)
    assert bench.add(1, *[on(0)] * 100) == []
    [read] = bench.add(2, on(0), is_pooled=False)
    assert (read.job, read.into) == (2, Memory.CHUNK)
    assert bench.land(read) == []
    [read] = bench.tell(MemoryFreed(buffers=1))
    assert (read.job, read.chunk, read.into) == (1, 0, Memory.NEW)


def test_what_failed_is_read_again_into_the_buffer_that_its_chunk_has() -> None:
    bench = Bench(ONE, ONE, buffers=1)
    [read] = bench.add(1, on(0, 1), on(0, 1))
    [again] = bench.tell(ReadEnded(read.read, Outcome.MISSING))
    assert (again.chunk, again.into) == (0, Memory.CHUNK)
    assert bench.land(again) == []
    [second] = bench.tell(MemoryFreed(buffers=1))
    assert (second.chunk, second.into) == (1, Memory.NEW)


def test_a_freed_buffer_goes_to_the_tier_that_is_done_with_it_first() -> None:
    slow = TierTerms(reads_max=8, bytes_per_s=500e6)
    fast = TierTerms(reads_max=8, bytes_per_s=1000e6)
    bench = Bench(slow, fast, buffers=0)
    bench.add(1, *[on(0, 1)] * 100)
    tiers = [bench.tell(MemoryFreed(buffers=1))[0].tier for _ in range(3)]
    assert tiers == [1, 0, 1]  # beside another, a read of the fast one takes as long


def test_the_rest_of_a_chunk_that_has_its_buffer_is_offered_to_who_waited_for_one() -> None:
    bench = Bench(ONE, ONE, buffers=0)
    assert bench.add(1, on(0, 1, size=30 * MIB)) == []
    reads = bench.tell(MemoryFreed(buffers=1))
    assert {(read.tier, read.into) for read in reads} == {(0, Memory.NEW), (1, Memory.CHUNK)}


def test_a_tier_that_alone_holds_what_is_left_is_not_forgotten() -> None:
    fast = TierTerms(reads_max=8, bytes_per_s=1000e6)
    bench = Bench(*[fast] * 10, TierTerms(reads_max=1, bytes_per_s=1e6), buffers=0)
    bench.add(1, *[on(*range(10))] * 10)
    bench.add(2, on(10))
    tiers = {read.tier for _ in range(11) for read in bench.tell(MemoryFreed(buffers=1))}
    assert 10 in tiers


def test_without_scratch_nothing_is_repeated_until_there_is_some() -> None:
    bench = Bench(ONE, ONE, buffers=0, scratch=0)
    [read] = bench.add(1, on(0, 1), is_pooled=False)
    bench.now_ns += 100 * MS  # it is late by now
    assert bench.tell(Tick()) == []
    [hedge] = bench.tell(MemoryFreed(scratch=1))
    assert (hedge.kind, hedge.into) == (ReadKind.HEDGE, Memory.SCRATCH)
    assert hedge.tier != read.tier


def test_what_a_cancelled_read_may_still_write_to_is_read_into_scratch() -> None:
    bench = Bench(ONE, ONE, buffers=1, scratch=1)
    [read] = bench.add(1, on(0, 1))
    [again] = bench.tell(TierDown(read.tier))
    assert (again.kind, again.into) == (ReadKind.FIRST, Memory.SCRATCH)


def test_without_scratch_it_waits_until_that_read_has_ended() -> None:
    bench = Bench(ONE, ONE, buffers=1, scratch=0)
    [read] = bench.add(1, on(0, 1))
    assert bench.tell(TierDown(read.tier)) == []
    assert bench.wait_for_reads() == []
    [again] = bench.tell(ReadEnded(read.read, Outcome.CANCELLED))
    assert (again.tier, again.into) == (1 - read.tier, Memory.CHUNK)
