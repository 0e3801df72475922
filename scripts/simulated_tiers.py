"""Tiers on a virtual clock: what a schedule meets, without waiting for it. Reads of a tier share
its bandwidth, which changes with time; each has a latency first, some are slow or never end.

`Reader` runs production's schedule; `FirstTier` reads as vLLM's tiers and LMCache do, every chunk
from the first tier in the list that has it; `StaticSplit` gives each tier its share beforehand.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvfs.schedule import (
    Action,
    CancelRead,
    CheckChunk,
    Chunk,
    ChunkChecked,
    ChunkDone,
    ChunkLost,
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

S = 1_000_000_000
MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass
class Flow:
    """One read in a tier: `left` bytes to go, from `begins_ns` on."""

    read: int
    size_bytes: int
    left: float
    begins_ns: int
    is_cancelled: bool = False


@dataclass
class SimulatedTier:
    """Bandwidth at a time is `bytes_per_s * pace(t)`, shared by the reads that are past their
    latency. `slow_share` of reads take `slow_factor` times as long, by delay."""

    bytes_per_s: float
    latency_s: float = 0.001
    slots: int = 8
    slow_share: float = 0.0
    slow_factor: float = 20.0
    frozen: tuple[float, float] | None = None  # from when until when
    paces: list[float] = field(default_factory=list)  # of each half second; empty: always 1
    flows: dict[int, Flow] = field(default_factory=dict)
    queue: list[Flow] = field(default_factory=list)
    served_bytes: float = 0.0

    def rate(self, now_ns: int) -> float:
        """Bytes in a nanosecond, now."""
        if self.frozen and self.frozen[0] * S <= now_ns < self.frozen[1] * S:
            return 0.0
        pace = self.paces[now_ns // (S // 2) % len(self.paces)] if self.paces else 1.0
        return self.bytes_per_s * pace / S

    def changes(self, now_ns: int) -> list[int]:
        """When the rate is another next."""
        times = []
        if self.paces:
            times.append((now_ns // (S // 2) + 1) * (S // 2))
        for edge in self.frozen or ():
            if edge * S > now_ns and edge < float("inf"):
                times.append(round(edge * S))
        return times

    def integral(self, until_ns: int) -> float:
        """Bytes that it could give from the start until then."""
        at_ns, total = 0, 0.0
        while at_ns < until_ns:
            next_ns = min([until_ns, *self.changes(at_ns)])
            total += self.rate(at_ns) * (next_ns - at_ns)
            at_ns = next_ns
        return total

    def start(self, read: int, size_bytes: int, now_ns: int, rng: random.Random) -> None:
        delay_s = self.latency_s * rng.uniform(0.5, 1.5)  # else all that begin together end so
        if rng.random() < self.slow_share:
            delay_s += self.slow_factor * (self.latency_s + size_bytes / self.bytes_per_s)
        begins_ns = now_ns + round(delay_s * S)
        self.flows[read] = Flow(read, size_bytes, float(size_bytes), begins_ns)

    def next_ns(self, now_ns: int) -> int | None:
        """When the next read of it begins to get bytes or ends, or its rate changes."""
        if not self.flows:
            return None
        active = [flow for flow in self.flows.values() if flow.begins_ns <= now_ns]
        times = self.changes(now_ns)
        times += [flow.begins_ns for flow in self.flows.values() if flow.begins_ns > now_ns]
        rate = self.rate(now_ns)
        if active and rate:
            least = min(flow.left for flow in active)
            times.append(now_ns + max(1, round(least * len(active) / rate)))
        return min(times, default=None)

    def advance(self, begin_ns: int, end_ns: int) -> list[Flow]:
        """Serve from one time to another, between which nothing begins, ends or changes; what
        ended."""
        active = [flow for flow in self.flows.values() if flow.begins_ns <= begin_ns]
        if not active:
            return []
        given = self.rate(begin_ns) * (end_ns - begin_ns) / len(active)
        ended = []
        for flow in active:
            self.served_bytes += min(flow.left, given)
            flow.left -= given
            if flow.left <= 0.5:
                ended.append(flow)
                del self.flows[flow.read]
        return ended


class World:
    """Tiers, a clock, and times at which something is to be called."""

    def __init__(self, tiers: list[SimulatedTier], seed: int) -> None:
        self.tiers = tiers
        self.rng = random.Random(seed)
        self.now_ns = 0
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._calls, (when_ns, self._count, call))

    def run(
        self,
        on_end: Callable[[int, Flow], None],
        *,
        wake_ns: Callable[[], int | None],
        on_wake: Callable[[], None],
        until: Callable[[], bool],
        limit_s: float = 3600.0,
    ) -> None:
        """Until it is so; an hour is taken for never."""
        while not until():
            times = [tier.next_ns(self.now_ns) for tier in self.tiers]
            times += [wake_ns(), self._calls[0][0] if self._calls else None]
            known = [when_ns for when_ns in times if when_ns is not None]
            if not known or min(known) > limit_s * S:
                raise RuntimeError(f"nothing happens any more after {self.now_ns / S:.3f} s")
            next_ns = max(self.now_ns, min(known))
            for number, tier in enumerate(self.tiers):
                for flow in tier.advance(self.now_ns, next_ns):
                    self.at(next_ns, lambda number=number, flow=flow: on_end(number, flow))
            self.now_ns = next_ns
            while self._calls and self._calls[0][0] <= next_ns:
                heappop(self._calls)[2]()
            wake = wake_ns()
            if wake is not None and wake <= next_ns:
                on_wake()


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
    """Production's schedule. With `buffers`, all jobs share a pool of so many, each of which is
    free again `use_s` after its chunk came; and as many reads may have scratch."""

    def __init__(
        self,
        world: World,
        terms: list[TierTerms] | None = None,
        *,
        buffers: int | None = None,
        use_s: float = 0.0,
    ) -> None:
        self.world = world
        self.schedule = Schedule(scratch=buffers)
        self.is_pooled = buffers is not None
        self.use_s = use_s
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

    def tell(self, event: object) -> None:
        self.obey(self.schedule.handle(event, self.world.now_ns))  # type: ignore[arg-type]

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
                    world.at(world.now_ns, lambda checked=checked: self.tell(checked))
                case ChunkDone() | ChunkLost():
                    self.lost += isinstance(action, ChunkLost)
                    if self.is_pooled:
                        free_ns = world.now_ns + round(self.use_s * S)
                        world.at(free_ns, lambda: self.tell(MemoryFreed(buffers=1)))
                case JobEnded():
                    self.ends_s[action.job] = world.now_ns / S
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

    def run(self, loads: list[Load]) -> Result:
        world = self.world
        for job, load in enumerate(loads):
            event = JobAdded(job, load.chunks, load.priority, is_pooled=self.is_pooled)
            world.at(round(load.at_s * S), lambda event=event: self.tell(event))
        world.run(
            lambda _, flow: self.end(flow.read, Outcome.LANDED),
            wake_ns=lambda: self.schedule.wake_ns,
            on_wake=lambda: self.tell(Tick()),
            until=lambda: len(self.ends_s) == len(loads),
        )
        took_s = [self.ends_s[job] - load.at_s for job, load in enumerate(loads)]
        read_bytes = sum(tier.served_bytes for tier in world.tiers)
        return Result(took_s, max(self.ends_s.values()), self.lost, read_bytes, self.hedges)


class FixedReader:
    """Who decides beforehand: each chunk has its tier when its job comes, and is waited for there,
    in order, with so many reads at the same time as the tier has slots."""

    def __init__(self, world: World, choose: Callable[[int, int, Chunk], int]) -> None:
        self.world = world
        self.choose = choose
        self.ends_s: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.count = 0

    def run(self, loads: list[Load]) -> Result:
        world = self.world
        for job, load in enumerate(loads):
            world.at(round(load.at_s * S), lambda job=job, load=load: self.add(job, load))
        world.run(
            self.on_end,
            wake_ns=lambda: None,
            on_wake=lambda: None,
            until=lambda: len(self.ends_s) == len(loads),
        )
        took_s = [self.ends_s[job] - load.at_s for job, load in enumerate(loads)]
        read_bytes = sum(tier.served_bytes for tier in world.tiers)
        return Result(took_s, max(self.ends_s.values()), 0, read_bytes, 0)

    def add(self, job: int, load: Load) -> None:
        self.left[job] = len(load.chunks)
        for number, chunk in enumerate(load.chunks):
            tier = self.choose(job, number, chunk)
            self.owner[self.count] = job
            size = chunk.size_bytes
            self.world.tiers[tier].queue.append(Flow(self.count, size, float(size), 0))
            self.count += 1
            self.fill(tier)

    def fill(self, number: int) -> None:
        tier = self.world.tiers[number]
        while tier.queue and len(tier.flows) < tier.slots:
            flow = tier.queue.pop(0)
            tier.start(flow.read, flow.size_bytes, self.world.now_ns, self.world.rng)

    def on_end(self, number: int, flow: Flow) -> None:
        job = self.owner.pop(flow.read)
        self.left[job] -= 1
        if not self.left[job]:
            self.ends_s[job] = self.world.now_ns / S
        self.fill(number)


def first_tier(world: World) -> FixedReader:
    """vLLM's and LMCache's order: all from the first tier in the list that has it."""
    return FixedReader(world, lambda _job, _number, chunk: min(chunk.tiers))


def static_split(world: World, weights: list[float]) -> FixedReader:
    """Each tier gets a share by its mean speed: the next chunk goes where the least is given."""
    given = [0.0] * len(weights)

    def choose(_job: int, _number: int, chunk: Chunk) -> int:
        tier = min(chunk.tiers, key=lambda t: (given[t] + chunk.size_bytes) / weights[t])
        given[tier] += chunk.size_bytes
        return tier

    return FixedReader(world, choose)
