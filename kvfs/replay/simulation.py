"""Production's schedule on simulated tiers (`kvfs.replay.world`): jobs that come at their times,
and when each was read. The same seed does the same."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvfs.errors import QueueFull
from kvfs.replay.world import S, SimulatedTier, World
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
    JobEnded,
    KeepRead,
    Memory,
    MemoryFreed,
    Outcome,
    ReadEnded,
    Schedule,
    StartRead,
    Tick,
    TierTerms,
    TierUp,
)


@dataclass
class Load:
    """A job that comes at a time."""

    at_s: float
    chunks: tuple[Chunk, ...]
    priority: int = 0


@dataclass
class Result:
    """What came of it. `took_s` of each job; `end_s`: of the last."""

    took_s: list[float]
    end_s: float
    lost: int
    read_bytes: float  # from the tiers, with what was read twice
    hedges: int


class Reader:
    """Production's schedule. A job for which it has no room waits for one to end. `on_end` is
    called with each job's number at its end. With `buffers`, all jobs share a pool of so many, each
    of which is free again `use_s` after its chunk came; and as many reads may have scratch."""

    def __init__(
        self,
        world: World,
        terms: list[TierTerms] | None = None,
        *,
        buffers: int | None = None,
        use_s: float = 0.0,
        on_end: Callable[[int], None] = lambda job: None,
    ) -> None:
        self.world = world
        self.schedule = Schedule(scratch=buffers)
        self.is_pooled = buffers is not None
        self.use_s = use_s
        self.on_end = on_end
        self.waiting: deque[JobAdded] = deque()
        self.scratched: set[int] = set()  # reads that have it
        self.ends_s: dict[int, float] = {}
        self.lost = 0
        self.hedges = 0
        self.stuck_s = 5.0  # after which a thread that does not come back is given up
        for number, tier in enumerate(world.tiers):
            given = terms[number] if terms else TierTerms(reads_max=tier.slots)
            self.tell(TierUp(number, given))
        if buffers is not None:
            self.tell(MemoryFreed(buffers))

    def end(self, read: int, outcome: Outcome) -> None:
        self.tell(ReadEnded(read, outcome))
        if read in self.scratched:
            self.scratched.remove(read)
            self.tell(MemoryFreed(scratch=1))

    def admit(self, added: JobAdded | None = None) -> None:
        """Let those in that wait, as far as there is room, and then this one."""
        if added is not None:
            self.waiting.append(added)
        while self.waiting:
            try:
                actions = self.schedule.handle(self.waiting[0], self.world.now_ns)
            except QueueFull:
                return
            self.waiting.popleft()
            self.obey(actions)

    def tell(self, event: Event) -> None:
        self.obey(self.schedule.handle(event, self.world.now_ns))

    def obey(self, actions: list[Action]) -> None:
        world = self.world
        for action in actions:
            match action:
                case StartRead():
                    tier = world.tiers[action.tier]
                    self.hedges += action.kind.value == "hedge"
                    if self.is_pooled and action.into is Memory.SCRATCH:
                        self.scratched.add(action.read)
                    size_bytes = action.end - action.begin
                    tier.start(action.read, size_bytes, world.now_ns, world.rng)
                case CancelRead():
                    self.cancel(action.read)
                case CheckChunk():
                    checked = ChunkChecked(action.job, action.chunk, Outcome.LANDED)
                    world.at(world.now_ns, partial(self.tell, checked))
                case ChunkDone() | ChunkLost():
                    self.lost += isinstance(action, ChunkLost)
                    if self.is_pooled:
                        free_ns = world.now_ns + round(self.use_s * S)
                        world.at(free_ns, lambda: self.tell(MemoryFreed(buffers=1)))
                case JobEnded():
                    self.ends_s[action.job] = world.now_ns / S
                    self.on_end(action.job)
                    if self.waiting:
                        world.at(world.now_ns, self.admit)
                case KeepRead():
                    pass

    def cancel(self, read: int) -> None:
        """A read that gets bytes stops at once; one that hangs is given up later."""
        world = self.world
        for tier in world.tiers:
            flow = tier.flows.get(read)
            if flow is None:
                continue
            flow.is_cancelled = True
            wait_s = 0.0 if tier.rate(world.now_ns) else self.stuck_s

            def give_up(tier: SimulatedTier = tier) -> None:
                if tier.flows.pop(read, None) is not None:
                    self.end(read, Outcome.CANCELLED)

            world.at(world.now_ns + round(wait_s * S), give_up)

    def run(self, loads: list[Load], *, limit_s: float = 3600.0) -> Result:
        world = self.world
        for job, load in enumerate(loads):
            event = JobAdded(job, load.chunks, load.priority, is_pooled=self.is_pooled)
            world.at(round(load.at_s * S), partial(self.admit, event))
        world.run(
            lambda _, flow: self.end(flow.read, Outcome.LANDED),
            wake_ns=lambda: self.schedule.wake_ns,
            on_wake=lambda: self.tell(Tick()),
            until=lambda: len(self.ends_s) == len(loads),
            limit_s=limit_s,
        )
        took_s = [self.ends_s[job] - load.at_s for job, load in enumerate(loads)]
        read_bytes = sum(tier.served_bytes for tier in world.tiers)
        return Result(took_s, max(self.ends_s.values()), self.lost, read_bytes, self.hedges)
