"""The pull scheduler's rules, one by one."""

from typing import Any

import pytest

from kvfs import config
from kvfs.errors import QueueFull
from kvfs.health import HealthState
from kvfs.schedule import (
    Action,
    CancelRead,
    CheckChunk,
    Chunk,
    ChunkChecked,
    ChunkDone,
    ChunkLost,
    JobAdded,
    JobCancelled,
    JobEnded,
    KeepRead,
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
from kvfs.schedule.speed import Speed
from kvfs.schedule.timers import Timer, Timers
from kvfs.schedule.width import Width

MS = 1_000_000
S = 1000 * MS
MIB = config.MIB
SLOW = TierTerms(reads_max=1, bytes_per_s=100e6)
FAST = TierTerms(reads_max=1, bytes_per_s=1000e6)


class Bench:
    """A schedule with tiers, and what it said last."""

    def __init__(self, *terms: TierTerms) -> None:
        self.schedule = Schedule()
        self.now_ns = S
        for tier, given in enumerate(terms):
            self.tell(TierUp(tier, given))

    def tell(self, event: Any) -> list[Action]:
        return self.schedule.handle(event, self.now_ns)

    def add(self, job: int, *chunks: Chunk, priority: int = 0) -> list[StartRead]:
        return begun(self.tell(JobAdded(job, chunks, priority)))

    def land(self, read: StartRead, after_ns: int = 4 * MS) -> list[Action]:
        self.now_ns += after_ns
        return self.tell(ReadEnded(read.read, Outcome.LANDED))

    def view(self, tier: int) -> Any:
        return self.schedule.view().tiers[tier]


def begun(actions: list[Action]) -> list[StartRead]:
    return [action for action in actions if isinstance(action, StartRead)]


def on(*tiers: int, size: int = 4 * MIB) -> Chunk:
    return Chunk(size, tiers)


def test_each_tier_takes_the_next_unread_chunk_that_it_holds() -> None:
    bench = Bench(FAST, FAST, FAST)
    reads = bench.add(1, on(0), on(0, 1), on(1, 2), on(0), on(0))
    assert {(read.tier, read.chunk) for read in reads} == {(0, 0), (1, 1), (2, 2)}
    [read] = begun(bench.land(next(read for read in reads if read.tier == 0)))
    assert (read.tier, read.chunk) == (0, 3)


def test_a_chunk_that_landed_is_kept_and_done_and_the_job_ends_with_the_last() -> None:
    bench = Bench(FAST)
    [first] = bench.add(7, on(0), on(0))
    actions = bench.land(first)
    assert actions[:2] == [KeepRead(first.read), ChunkDone(7, 0)]
    [second] = begun(actions)
    actions = bench.land(second)
    assert actions == [KeepRead(second.read), ChunkDone(7, 1), JobEnded(7, ())]
    assert bench.schedule.is_empty
    assert bench.schedule.view().kept == 0


def test_jobs_of_one_size_are_served_as_they_come() -> None:
    bench = Bench(FAST)
    [read] = bench.add(1, on(0), on(0))
    bench.add(2, on(0), on(0))
    order = []
    for _ in range(4):
        order.append(read.job)
        reads = begun(bench.land(read))
        read = reads[0] if reads else read
    assert order == [1, 1, 2, 2]


def test_a_short_job_overtakes_a_long_one_that_is_young_and_not_one_that_has_waited() -> None:
    bench = Bench(FAST)
    [read] = bench.add(1, *[on(0)] * 100)  # 0.4 s alone
    bench.add(2, on(0))
    [read] = begun(bench.land(read))
    assert read.job == 2
    for _ in range(20):  # more than STRETCH times as long
        [read] = begun(bench.land(read, 100 * MS))
    bench.add(3, on(0))
    [read] = begun(bench.land(read))
    assert read.job == 1


def test_priority_is_worth_seconds_and_idle_jobs_come_last() -> None:
    bench = Bench(FAST)
    [read] = bench.add(1, on(0))
    bench.add(2, on(0), priority=config.SCHEDULE_PRIORITY_IDLE)
    bench.add(3, on(0))
    bench.add(4, on(0), priority=1)
    order = []
    for _ in range(3):
        [read] = begun(bench.land(read))
        order.append(read.job)
    assert order == [4, 3, 2]


def test_the_last_chunk_is_left_to_a_tier_that_has_it_sooner() -> None:
    bench = Bench(FAST, SLOW)
    [first] = bench.add(1, on(0, size=2 * MIB))
    assert begun(bench.tell(JobAdded(2, (on(0, 1, size=450 * config.KIB),)))) == []
    [read] = begun(bench.land(first))
    assert (read.tier, read.job) == (0, 2)


def test_what_was_left_to_others_is_taken_when_they_do_not_come_to_it() -> None:
    bench = Bench(FAST, SLOW)
    bench.add(1, on(0, size=2 * MIB))
    assert bench.add(2, on(0, 1, size=450 * config.KIB)) == []
    wake_ns = bench.schedule.wake_ns
    assert wake_ns is not None
    bench.now_ns = wake_ns
    reads = begun(bench.tell(Tick()))
    while not reads and (wake_ns := bench.schedule.wake_ns) is not None:
        bench.now_ns = wake_ns
        reads = begun(bench.tell(Tick()))
    assert [(read.tier, read.job) for read in reads] == [(1, 2)]
    assert bench.now_ns < 3 * S


def test_a_large_chunk_is_split_over_idle_tiers_by_their_speed_and_checked_whole() -> None:
    bench = Bench(FAST, TierTerms(reads_max=1, bytes_per_s=500e6))
    reads = bench.add(1, on(0, 1, size=30 * MIB))
    assert [read.tier for read in reads[:2]] == [0, 1]
    assert reads[0].begin == 0
    assert all(read.end % config.PAGE_BYTES == 0 for read in reads)
    assert reads[0].end == reads[1].begin
    assert reads[0].end == pytest.approx(20 * MIB, rel=0.1)
    actions: list[Action] = []
    for read in reads:
        actions += bench.land(read, 10 * MS)
    assert CheckChunk(1, 0) in actions
    assert not any(isinstance(action, ChunkDone) for action in actions)
    actions = bench.tell(ChunkChecked(1, 0, Outcome.LANDED))
    assert actions == [ChunkDone(1, 0), JobEnded(1, ())]


def test_parts_that_do_not_fit_together_are_read_whole() -> None:
    bench = Bench(FAST, FAST)
    reads = bench.add(1, on(0, 1, size=30 * MIB))
    assert len(reads) == 2
    for read in reads:
        bench.land(read, 10 * MS)
    [again] = begun(bench.tell(ChunkChecked(1, 0, Outcome.CORRUPT)))
    assert (again.begin, again.end) == (0, 30 * MIB)


def test_an_idle_tier_repeats_what_is_late_and_the_first_copy_wins() -> None:
    bench = Bench(FAST, FAST)
    [read] = bench.add(1, on(0, 1, size=MIB // 4))
    hedges: list[StartRead] = []
    while not hedges:
        wake_ns = bench.schedule.wake_ns
        assert wake_ns is not None
        bench.now_ns = wake_ns
        hedges = begun(bench.tell(Tick()))
    [hedge] = hedges
    assert hedge.kind is ReadKind.HEDGE
    assert hedge.tier != read.tier
    actions = bench.land(hedge, MS)
    assert CancelRead(read.read) in actions
    assert JobEnded(1, ()) in actions
    assert bench.land(read) == []  # the loser is nothing
    assert bench.view(hedge.tier).hedges_won == 1
    assert bench.schedule.view().kept == 0


def test_a_failed_read_is_made_elsewhere_and_a_chunk_nobody_has_is_lost() -> None:
    bench = Bench(FAST, FAST)
    [read] = bench.add(1, on(0, 1, size=4096))
    [again] = begun(bench.tell(ReadEnded(read.read, Outcome.MISSING)))
    assert again.tier != read.tier
    actions = bench.tell(ReadEnded(again.read, Outcome.CORRUPT))
    assert actions == [ChunkLost(1, 0), JobEnded(1, (0,))]


def test_tries_of_one_chunk_are_bounded() -> None:
    bench = Bench(*[FAST] * 8)
    reads = bench.add(1, on(*range(8), size=4096))
    tries = 0
    while reads:
        tries += 1
        reads = begun(bench.tell(ReadEnded(reads[0].read, Outcome.FAILED)))
    assert tries == config.SCHEDULE_TRIES_MAX
    assert bench.schedule.is_empty


def test_a_tier_that_goes_has_its_reads_made_by_others() -> None:
    bench = Bench(FAST, FAST)
    reads = bench.add(1, on(0, 1), on(0, 1), on(0))
    gone = next(read for read in reads if read.tier == 0)
    actions = bench.tell(TierDown(0))
    assert CancelRead(gone.read) in actions
    assert ChunkLost(1, 2) in actions  # only it had that one
    other = next(read for read in reads if read.tier == 1)
    [again] = begun(bench.land(other))
    assert (again.tier, again.chunk) == (1, gone.chunk)


def test_who_failed_with_an_unread_chunk_is_asked_again_when_the_last_other_tier_goes() -> None:
    bench = Bench(FAST, FAST)
    [other] = bench.add(1, on(1, size=4096))
    [read] = bench.add(2, on(0, 1, size=4096))
    assert (other.tier, read.tier) == (1, 0)
    assert begun(bench.tell(ReadEnded(read.read, Outcome.FAILED))) == []  # the other one is busy
    [again] = begun(bench.tell(TierDown(1)))
    assert (again.job, again.tier) == (2, 0)


def test_a_tier_that_fails_is_down_for_a_pause_and_then_tried_with_one_read() -> None:
    bench = Bench(TierTerms(reads_max=4, bytes_per_s=1000e6), SLOW)
    reads = bench.add(1, *[on(0, 1)] * 40)
    for read in [read for read in reads if read.tier == 0]:
        bench.tell(ReadEnded(read.read, Outcome.FAILED))
        for more in begun(bench.tell(Tick())):
            reads.append(more)
    failing = [r for r in range(100) if bench.view(0).health is not HealthState.DOWN]
    for _ in failing[:5]:
        live = next(iter(bench.schedule._board.tiers[0].reads), None)
        if live is not None:
            bench.tell(ReadEnded(live, Outcome.FAILED))
    assert bench.view(0).health is HealthState.DOWN
    assert bench.view(0).reads == 0
    bench.now_ns += round(config.TIER_PAUSE_S_MIN * S)
    trial = [read for read in begun(bench.tell(Tick())) if read.tier == 0]
    assert len(trial) == 1
    bench.land(trial[0])
    assert bench.view(0).health is HealthState.UP
    assert bench.view(0).reads > 0


def test_cancelling_a_job_frees_everything_but_slots_in_use() -> None:
    bench = Bench(FAST, FAST)
    reads = bench.add(1, *[on(0, 1)] * 50)
    actions = bench.tell(JobCancelled(1))
    assert {action.read for action in actions if isinstance(action, CancelRead)} == {
        read.read for read in reads
    }
    assert bench.schedule.view().jobs == bench.schedule.view().unread_chunks == 0
    for read in reads:
        assert bench.tell(ReadEnded(read.read, Outcome.CANCELLED)) == []
    assert bench.schedule.view().kept == 0
    assert bench.tell(JobCancelled(1)) == []


def test_an_empty_job_ends_at_once_and_one_nobody_has_is_lost_at_once() -> None:
    bench = Bench(FAST)
    assert bench.tell(JobAdded(1, ())) == [JobEnded(1, ())]
    assert bench.tell(JobAdded(2, (on(5),))) == [ChunkLost(2, 0), JobEnded(2, (0,))]


def test_too_many_chunks_and_jobs_and_tiers_are_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "SCHEDULE_CHUNKS_MAX", 10)
    monkeypatch.setattr(config, "SCHEDULE_JOBS_MAX", 2)
    bench = Bench(FAST)
    bench.add(1, *[on(0)] * 5)
    before = bench.schedule.view()
    with pytest.raises(QueueFull, match="chunks of the schedule: no room for 7 more, only for 6"):
        bench.add(2, *[on(0)] * 7)
    assert bench.schedule.view() == before
    bench.add(2, on(0))
    with pytest.raises(QueueFull, match="jobs of the schedule"):
        bench.add(3, on(0))
    for tier in range(1, config.SCHEDULE_TIERS_MAX):
        bench.tell(TierUp(tier, FAST))
    with pytest.raises(QueueFull, match="tiers of the schedule"):
        bench.tell(TierUp(1000, FAST))
    bench.tell(TierDown(5))
    bench.tell(TierUp(1000, FAST))  # in the place of one that is gone


# Speed --------------------------------------------------------------------------------------------
def test_latency_and_time_for_a_byte_are_told_apart_where_sizes_differ() -> None:
    speed = Speed(1 * MS, 1.0)
    for n in range(200):
        size = (1 + n % 4) * MIB
        speed.note(size, 20 * MS + 5 * size, 1, n * 10 * MS)
    assert speed.read_ns(MIB, 1) == pytest.approx(20 * MS + 5 * MIB, rel=0.05)
    assert speed.latency_ns == pytest.approx(20 * MS, rel=0.1)


def test_reads_at_the_same_time_share_the_bandwidth() -> None:
    speed = Speed(0, 1.0)
    for n in range(50):
        speed.note(MIB, 4 * 5 * MIB, 4, n * MS)
    assert speed.rate() == pytest.approx(1 / 5, rel=0.01)
    assert speed.read_ns(MIB, 1) == pytest.approx(5 * MIB, rel=0.01)


def test_the_bandwidth_is_found_from_reads_that_begin_and_end_at_any_time() -> None:
    bench = Bench(TierTerms(reads_max=2, bytes_per_s=1000e6))
    size = MIB // 4
    reads = bench.add(1, *[on(0, size=size)] * 200)
    left = [float(size), size / 2]  # so they overlap by halves
    while len(reads) == 2:  # a tier of 100 MB/s gives both the same
        at = left.index(min(left))
        after_ns = round(2 * left[at] * 10)
        left = [bytes_left - left[at] for bytes_left in left]
        left[at] = size
        more = begun(bench.land(reads[at], after_ns))
        reads[at : at + 1] = more[:1]
    assert bench.view(0).bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_one_slow_read_makes_no_slow_tier_and_many_do() -> None:
    speed = Speed(0, 1.0)
    for n in range(20):
        speed.note(MIB, MIB, 1, n * MS)
    speed.note(MIB, 100 * MIB, 1, 21 * MS)
    assert speed.read_ns(MIB, 1) < 1.3 * MIB
    for n in range(60):
        speed.note(MIB, 10 * MIB, 1, (22 + n) * 50 * MS)
    assert speed.read_ns(MIB, 1) > 8 * MIB


def test_a_tier_that_was_slow_is_thought_better_of_with_time() -> None:
    speed = Speed(0, 1.0)
    for n in range(50):
        speed.note(MIB, MIB, 1, n * MS)
    for n in range(10):
        speed.note(MIB, 4 * MIB, 1, 60 * MS + n * 40 * MS)
    slow_ns = speed.read_ns(MIB, 1)
    for second in range(2, 12):
        speed.age(second * S)
    assert slow_ns > 1.2 * MIB
    assert speed.read_ns(MIB, 1) == pytest.approx(MIB, rel=0.05)


# Width --------------------------------------------------------------------------------------------
def settle(width: Width, bytes_per_s: Any, rounds: int = 3000) -> int:
    now_ns = S
    for _ in range(rounds):
        now_ns += round(MIB / bytes_per_s(width.reads) * S)
        width.note(MIB, now_ns, is_full=True)
    return width.reads


def test_reads_at_a_time_grow_while_throughput_does_and_shrink_where_it_does_not() -> None:
    knee = settle(Width(32), lambda reads: 100e6 * min(reads, 8))
    assert 7 <= knee <= 9
    assert settle(Width(32), lambda reads: 100e6) <= 2
    assert settle(Width(32), lambda reads: 10e6 * reads) >= 30


def test_windows_in_which_there_was_not_enough_to_do_do_not_count() -> None:
    width = Width(8)
    for n in range(1000):
        width.note(MIB, n * MS, is_full=n % 3 == 0)
    assert width.reads == config.SCHEDULE_READS_FIRST


# Timers -------------------------------------------------------------------------------------------
def test_timers_that_mean_nothing_any_more_do_not_pile_up() -> None:
    live = {1, 2}
    timers = Timers(lambda _timer, number, _when: number in live)
    for n in range(10_000):
        timers.add(n + 10, Timer.READ, n)
    assert len(timers) < 1000
    assert timers.next_ns() == 11
    assert timers.pop_due(11) == (Timer.READ, 1)
    assert timers.pop_due(11) is None
    assert timers.pop_due(20_000) == (Timer.READ, 2)
    assert timers.next_ns() is None
