"""A replay on simulated tiers: production's schedule on a virtual clock."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfs.config import SCHEDULE_LATENCY_S, SCHEDULE_TIERS_MAX
from kvfs.errors import InvalidInput
from kvfs.replay.plan import Planned
from kvfs.replay.report import Loads, TierShare
from kvfs.replay.simulation import Load, Reader
from kvfs.replay.world import SimulatedTier, World
from kvfs.schedule import Chunk
from kvfs.settings.words import TIER_LIMITS, TierKind

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GB = 1e9


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """One simulated tier. Its reads share its bandwidth; each waits for its latency first."""

    name: str
    bytes_per_s: float
    latency_s: float = SCHEDULE_LATENCY_S


def parse_speeds(words: Sequence[str]) -> list[TierSpeed]:
    """`NAME:GB_PER_S[:LATENCY_MS]`, each its own name. Raises `InvalidInput`."""
    speeds: list[TierSpeed] = []
    for word in words:
        name, *numbers = word.split(":")
        try:
            if _NAME.fullmatch(name) is None or not 1 <= len(numbers) <= 2:
                raise ValueError
            values = [float(number) for number in numbers]
            if values[0] <= 0 or min(values) < 0 or not all(map(math.isfinite, values)):
                raise ValueError
        except ValueError:
            raise InvalidInput(
                word,
                "is no tier; write NAME:GB_PER_S or NAME:GB_PER_S:LATENCY_MS, as in nvme:6:0.1",
            ) from None
        if any(name == other.name for other in speeds):
            raise InvalidInput(word, f"{name} is there twice; give each tier its own name")
        latency_s = values[1] / 1e3 if len(values) == 2 else SCHEDULE_LATENCY_S
        speeds.append(TierSpeed(name, values[0] * _GB, latency_s))
    if len(speeds) > SCHEDULE_TIERS_MAX:
        raise InvalidInput("tiers", f"are {len(speeds)}; {SCHEDULE_TIERS_MAX} are the limit")
    return speeds


def simulate(
    planned: Sequence[Planned],
    tiers: Sequence[TierSpeed],
    block_bytes: int,
    *,
    speed: float = 1.0,
    on_loaded: Callable[[int], None] = lambda blocks: None,
) -> Loads:
    """Let the requests arrive `speed` times as fast. `on_loaded` is told of the blocks of each load
    that ended. The same arguments give the same."""
    hitting = [one for one in planned if one.hits]
    world = World(
        [
            SimulatedTier(
                tier.bytes_per_s,
                latency_s=tier.latency_s,
                slots=TIER_LIMITS[TierKind.NVME].reads_max,
            )
            for tier in tiers
        ],
        seed=0,
    )
    reader = Reader(world, on_end=lambda job: on_loaded(len(hitting[job].hits)))
    took_s: list[float] = []
    ended_s = 0.0
    if hitting:
        result = reader.run(
            [
                Load(
                    one.request.at_s / speed,
                    tuple(Chunk(block_bytes, numbers) for _, numbers in one.hits),
                )
                for one in hitting
            ],
            limit_s=math.inf,
        )
        took_s, ended_s = result.took_s, result.end_s
    views = reader.schedule.view().tiers
    shares = tuple(
        TierShare(tier.name, view.bytes_read, view.hedges_won, view.hedges_lost)
        for tier, view in zip(tiers, views, strict=True)
    )
    return Loads(tuple(took_s), ended_s, reader.lost, shares)
