"""What came of a replay."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.replay.plan import Planned


@dataclass(frozen=True, slots=True)
class TierShare:
    """What one tier gave. `read_bytes` are those that were used."""

    name: str
    read_bytes: int
    hedges_won: int
    hedges_lost: int


@dataclass(frozen=True, slots=True)
class Loads:
    """What was read. `took_s`: of each request that hit, from its arrival until the last of its
    blocks was there or lost."""

    took_s: tuple[float, ...]
    ended_s: float  # from the first arrival until the last load
    lost_blocks: int
    tiers: tuple[TierShare, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of a trace, and how its hits were loaded."""

    requests: int
    blocks: int
    hit_blocks: int
    block_bytes: int
    loads: Loads

    @property
    def hit_ratio(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def hit_bytes(self) -> int:
        return self.hit_blocks * self.block_bytes

    def document(self) -> dict[str, Any]:
        """Ready for JSON; times are null when nothing hit."""
        loads = self.loads
        given = sum(tier.read_bytes for tier in loads.tiers)
        return {
            "requests": self.requests,
            "requests_hit": len(loads.took_s),
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "hit_ratio": self.hit_ratio,
            "block_bytes": self.block_bytes,
            "hit_bytes": self.hit_bytes,
            "lost_blocks": loads.lost_blocks,
            "ended_s": loads.ended_s,
            "load_s": load_times(loads.took_s),
            "tiers": [
                {
                    "name": tier.name,
                    "read_bytes": tier.read_bytes,
                    "share": tier.read_bytes / given if given else 0.0,
                    "hedges_won": tier.hedges_won,
                    "hedges_lost": tier.hedges_lost,
                }
                for tier in loads.tiers
            ],
        }


def report_of(planned: Sequence[Planned], block_bytes: int, loads: Loads) -> Report:
    return Report(
        requests=len(planned),
        blocks=sum(len(one.request.blocks) for one in planned),
        hit_blocks=sum(len(one.hits) for one in planned),
        block_bytes=block_bytes,
        loads=loads,
    )


def load_times(took_s: Sequence[float]) -> dict[str, float | None]:
    """Mean and parts of how long loads took."""
    if not took_s:
        return dict.fromkeys(("mean", "p50", "p99", "max"))
    ordered = sorted(took_s)
    last = len(ordered) - 1
    return {
        "mean": statistics.fmean(ordered),
        "p50": ordered[last // 2],
        "p99": ordered[min(last, round(0.99 * last))],
        "max": ordered[last],
    }
