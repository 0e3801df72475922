"""Other ways to read than production's schedule, on the same simulated tiers.

`Reader` runs production's schedule; `first_tier` reads as vLLM's tiers and LMCache do, every chunk
from the first tier in the list that has it; `static_split` gives each tier its share beforehand.
"""

from collections.abc import Callable

from kvfs.config import GIB, MIB
from kvfs.replay.simulation import Load, Reader, Result
from kvfs.replay.world import Flow, S, SimulatedTier, World
from kvfs.schedule import Chunk

__all__ = [
    "GIB", "MIB", "FixedReader", "Load", "Reader", "Result", "S", "SimulatedTier", "World",
    "first_tier", "static_split",
]  # fmt: skip


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
