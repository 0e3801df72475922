"""The pull scheduler by chance: tiers come, go, fail, stall, lie; jobs come and are cancelled;
memory is short and comes back late."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs import config
from kvfs.health import HealthState
from kvfs.schedule import (
    Action,
    CancelRead,
    CheckChunk,
    Chunk,
    ChunkChecked,
    ChunkDone,
    ChunkLost,
    Event,
    JobAdded,
    JobCancelled,
    JobEnded,
    KeepRead,
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
    TierView,
)

TIERS = 6
PIECE = config.SCHEDULE_PIECE_BYTES_MIN
SIZES = (1, 4096, 10_000, PIECE, 3 * PIECE + 5, 16 * PIECE)
TERMS = st.builds(
    TierTerms,
    reads_max=st.integers(1, 4),
    request_cost_s=st.sampled_from([0.0, 0.0, 0.001, 5.0]),
    gib_cost_s=st.sampled_from([0.0, 0.0, 1.0]),
    bytes_per_s=st.sampled_from([1e6, 1e8, 1e9]),
    latency_s=st.sampled_from([0.0, 0.001, 0.1]),
)
CHUNKS = st.lists(
    st.builds(
        Chunk,
        st.sampled_from(SIZES),
        st.lists(st.integers(0, TIERS - 1), min_size=1, max_size=TIERS, unique=True).map(tuple),
    ),
    max_size=12,
).map(tuple)
PRIORITIES = st.sampled_from([0, 0, 0, 4, -4, config.SCHEDULE_PRIORITY_IDLE])


@dataclass
class ChunkState:
    chunk: Chunk
    holders: set[int]  # of its tiers, those that were known when the job came
    kept: list[tuple[int, int]] = field(default_factory=list)
    is_done: bool = False
    is_lost: bool = False
    is_checked: bool = False  # an answer is awaited
    barred: set[int] = field(default_factory=set)  # tiers that have it not, or wrong
    gave: set[int] = field(default_factory=set)  # tiers of the ranges that are there
    tries: int = 0
    has_memory: bool = True


class Runner(RuleBasedStateMachine):
    """Whoever runs the schedule, and believes nothing."""

    @initialize(buffers=st.integers(0, 3), scratch=st.sampled_from([None, 0, 1, 3]))
    def begin(self, buffers: int, scratch: int | None) -> None:
        self.schedule = Schedule(scratch)
        self.buffers = buffers
        self.scratch = 10**9 if scratch is None else scratch
        self.buffers_out = self.scratch_out = 0  # in use, and not told to be free again
        self.now_ns = 1_000
        self.terms: dict[int, TierTerms] = {}
        self.known: set[int] = set()
        self.states: dict[int, TierView] = {}
        self.jobs: dict[int, list[ChunkState]] = {}
        self.next_job = 0
        self.live: dict[int, StartRead] = {}  # slots in use
        self.wanted: set[int] = set()  # reads that were not cancelled
        self.checks: list[CheckChunk] = []
        self.landed: int | None = None  # the read that lands in this event
        self.ended: list[JobEnded] = []
        self.tell(MemoryFreed(buffers))

    def tell(self, event: Event) -> None:
        actions = self.schedule.handle(event, self.now_ns)
        self.states = {tier.tier: tier for tier in self.schedule.view().tiers}
        for action in actions:
            self.obey(action)
        self.landed = None

    def obey(self, action: Action) -> None:
        match action:
            case StartRead():
                self.start(action)
            case CancelRead():
                assert action.read in self.live
                self.wanted.remove(action.read)
                read = self.live[action.read]
                if read.job in self.jobs:  # it may have stalled, which counts
                    self.jobs[read.job][read.chunk].tries += 1
            case KeepRead():
                assert action.read == self.landed
                self.landed = None
            case CheckChunk():
                state = self.jobs[action.job][action.chunk]
                assert covers(state.kept, state.chunk.size_bytes) and len(state.kept) > 1
                assert not state.is_checked
                state.is_checked = True
                self.checks.append(action)
            case ChunkDone():
                state = self.jobs[action.job][action.chunk]
                assert covers(state.kept, state.chunk.size_bytes)
                assert not state.is_done and not state.is_lost
                state.is_done = True
            case ChunkLost():
                state = self.jobs[action.job][action.chunk]
                assert not state.is_done and not state.is_lost
                state.is_lost = True
                assert self.wanted_of(action.job, action.chunk) == []
                if state.tries < config.SCHEDULE_TRIES_MAX:
                    for tier in state.holders & self.terms.keys() - state.barred:
                        assert self.states[tier].health is HealthState.DOWN
            case JobEnded():
                states = self.jobs.pop(action.job)
                assert all(state.is_done != state.is_lost for state in states)
                lost = tuple(n for n, state in enumerate(states) if state.is_lost)
                assert action.lost == lost
                self.ended.append(action)

    def start(self, read: StartRead) -> None:
        state = self.jobs[read.job][read.chunk]
        size = state.chunk.size_bytes
        assert read.tier in self.terms, "a tier that is there"
        assert self.states[read.tier].health is not HealthState.DOWN
        busy = sum(other.tier == read.tier for other in self.live.values())
        assert busy < self.terms[read.tier].reads_max
        assert read.tier in state.chunk.tiers and read.tier not in state.barred
        assert not state.is_done and not state.is_lost and not state.is_checked
        assert 0 <= read.begin < read.end <= size
        assert read.begin % config.PAGE_BYTES == 0
        assert read.end % config.PAGE_BYTES == 0 or read.end == size
        for begin, end in state.kept:
            assert read.end <= begin or end <= read.begin, "what is there is not read again"
        copies = 1
        for other in self.wanted_of(read.job, read.chunk):
            if read.begin < other.end and other.begin < read.end:
                assert (other.begin, other.end) == (read.begin, read.end)
                assert other.tier != read.tier
                copies += 1
        assert copies <= config.SCHEDULE_COPIES_MAX
        assert (read.kind is ReadKind.HEDGE) == (copies > 1)
        self.use_memory(read, state)
        self.live[read.read] = read
        self.wanted.add(read.read)

    def use_memory(self, read: StartRead, state: ChunkState) -> None:
        """Each read writes where no other does, and what it takes is there."""
        if read.into is Memory.SCRATCH:
            self.scratch -= 1
            self.scratch_out += 1
            assert self.scratch >= 0
            return
        assert read.kind is ReadKind.FIRST
        assert state.has_memory == (read.into is Memory.CHUNK)
        if not state.has_memory:
            state.has_memory = True
            self.buffers -= 1
            self.buffers_out += 1
            assert self.buffers >= 0
        assert not self.is_written(read)

    def is_written(self, read: StartRead) -> bool:
        """Whether a read that has not ended, wanted or not, writes to the same bytes."""
        return any(
            other.into is not Memory.SCRATCH
            and (other.job, other.chunk) == (read.job, read.chunk)
            and read.begin < other.end
            and other.begin < read.end
            for other in self.live.values()
        )

    def wanted_of(self, job: int, chunk: int) -> list[StartRead]:
        reads = [self.live[read] for read in self.wanted]
        return [read for read in reads if (read.job, read.chunk) == (job, chunk)]

    # What happens ---------------------------------------------------------------------------------
    @rule(tier=st.integers(0, TIERS - 1), terms=TERMS)
    def tier_up(self, tier: int, terms: TierTerms) -> None:
        self.terms[tier] = terms
        self.known.add(tier)
        self.tell(TierUp(tier, terms))

    @rule(tier=st.integers(0, TIERS - 1))
    def tier_down(self, tier: int) -> None:
        self.terms.pop(tier, None)
        self.tell(TierDown(tier))
        assert all(self.live[read].tier != tier for read in self.wanted)

    @rule(chunks=CHUNKS, priority=PRIORITIES, is_pooled=st.booleans())
    def add_job(self, chunks: tuple[Chunk, ...], priority: int, is_pooled: bool) -> None:
        job = self.next_job
        self.next_job += 1
        self.jobs[job] = [
            ChunkState(chunk, self.known & set(chunk.tiers), has_memory=not is_pooled)
            for chunk in chunks
        ]
        self.tell(JobAdded(job, chunks, priority, is_pooled))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel_job(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        self.tell(JobCancelled(job))
        del self.jobs[job]
        assert not any(self.live[read].job == job for read in self.wanted)
        self.tell(JobCancelled(job))  # once more is no error

    @precondition(lambda self: self.live)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.LANDED, *Outcome]))
    def end_read(self, data: st.DataObject, outcome: Outcome) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.live))), outcome)

    def end(self, number: int, outcome: Outcome) -> None:
        read = self.live.pop(number)
        is_wanted = number in self.wanted
        self.wanted.discard(number)
        states = self.jobs.get(read.job)
        state = states[read.chunk] if states is not None else None
        if outcome is Outcome.LANDED and is_wanted:
            assert state is not None
            state.kept.append((read.begin, read.end))
            state.gave.add(read.tier)
            self.landed = number
        elif is_wanted and state is not None:
            if outcome in (Outcome.MISSING, Outcome.CORRUPT):
                state.barred.add(read.tier)
            else:
                state.tries += 1
        self.tell(ReadEnded(number, outcome))
        assert self.landed is None, "what landed and was wanted is kept"

    @precondition(lambda self: self.checks)
    @rule(is_right=st.booleans())
    def answer_check(self, is_right: bool) -> None:
        self.answer(is_right=is_right)

    def answer(self, *, is_right: bool) -> None:
        check = self.checks.pop(0)
        states = self.jobs.get(check.job)
        if states is not None:
            states[check.chunk].is_checked = False
            if not is_right:
                state = states[check.chunk]
                if len(state.gave) == 1:
                    state.barred |= state.gave
                state.kept.clear()
                state.gave.clear()
                state.tries += 1
        outcome = Outcome.LANDED if is_right else Outcome.CORRUPT
        self.tell(ChunkChecked(check.job, check.chunk, outcome))

    @precondition(lambda self: self.buffers_out or self.scratch_out)
    @rule(data=st.data())
    def free_memory(self, data: st.DataObject) -> None:
        self.free(
            data.draw(st.integers(0, self.buffers_out)),
            data.draw(st.integers(0, self.scratch_out)),
        )

    def free(self, buffers: int, scratch: int) -> None:
        self.buffers += buffers
        self.buffers_out -= buffers
        self.scratch += scratch
        self.scratch_out -= scratch
        self.tell(MemoryFreed(buffers, scratch))

    @rule(seconds=st.sampled_from([0.0001, 0.003, 0.1, 2.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self.tell(Tick())

    # What holds at any time -----------------------------------------------------------------------
    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        """Whatever is not finished is under way, awaits its check or memory, or the schedule wakes
        by itself."""
        schedule = getattr(self, "schedule", None)
        if schedule is None:
            return
        if self.jobs and not self.live and not self.checks:
            assert schedule.wake_ns is not None or self.waits_for_buffers()
        assert schedule.is_empty == (not self.jobs and not self.live)
        view = schedule.view()
        assert view.reads == len(self.live)
        assert view.jobs == len(self.jobs)
        assert view.buffers == self.buffers
        assert view.scratch is None or view.scratch == self.scratch

    def waits_for_buffers(self) -> bool:
        """Whether all that is left needs buffers, and there is none."""
        states = [state for states in self.jobs.values() for state in states]
        left = [state for state in states if not state.is_done and not state.is_lost]
        return not self.buffers and not any(state.has_memory for state in left)

    def teardown(self) -> None:
        """From any state: all ends, each chunk once, and nothing is kept."""
        schedule = getattr(self, "schedule", None)
        if schedule is None:
            return
        for _ in range(10_000):
            if self.checks:
                self.answer(is_right=True)
            elif self.live:
                self.now_ns += 1_000_000
                self.end(min(self.live), Outcome.LANDED)
            elif schedule.wake_ns is not None and self.jobs:
                self.now_ns = max(self.now_ns, schedule.wake_ns)
                self.tell(Tick())
            elif self.jobs and self.waits_for_buffers():
                self.buffers_out += not self.buffers_out  # of a pool that had none at all
                self.free(1, 0)
            else:
                break
        assert not self.jobs and schedule.is_empty
        assert schedule.view().kept == 0
        self.now_ns += 3600 * 10**9
        self.tell(Tick())
        assert schedule.wake_ns is None


def covers(ranges: list[tuple[int, int]], size_bytes: int) -> bool:
    """Whether ranges are a chunk, without gap or overlap."""
    at = 0
    for begin, end in sorted(ranges):
        if begin != at:
            return False
        at = end
    return at == size_bytes


Runner.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedule = Runner.TestCase
