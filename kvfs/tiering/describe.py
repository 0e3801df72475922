"""A node's tiers as people are shown them: in `kvfs status`, and in `.kvfs/tiers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import trio

from kvfs.config import TIER_METER_S
from kvfs.meta.contract import MetaEngine
from kvfs.meta.tier_contract import TierLoad
from kvfs.schedule.views import TierView
from kvfs.tiering.opening import ConfiguredTier
from kvfs.tiers.counters import TierCounters
from kvfs.transfer.runner import Transfer


@dataclass(slots=True)
class _Pace:
    read_bytes: int = 0  # so far
    put_bytes: int = 0
    read_bytes_per_s: float = 0.0  # of the last interval
    put_bytes_per_s: float = 0.0
    read_bytes_per_s_max: float = 0.0  # of any


class Meter:
    """How many bytes each tier gives and takes now."""

    def __init__(self, tiers: Sequence[ConfiguredTier]) -> None:
        self._tiers = tiers
        self._paces: dict[int, _Pace] = {}

    async def run(self) -> None:
        """Background task."""
        last_s = trio.current_time()
        while True:
            await trio.sleep(TIER_METER_S)
            now_s = trio.current_time()
            for one in self._tiers:
                if one.tier is not None:
                    self._note(one.number, one.tier.counters, now_s - last_s)
            last_s = now_s

    def _note(self, number: int, counters: TierCounters, interval_s: float) -> None:
        pace = self._paces.setdefault(number, _Pace())
        pace.read_bytes_per_s = (counters.read_bytes - pace.read_bytes) / interval_s
        pace.put_bytes_per_s = (counters.put_bytes - pace.put_bytes) / interval_s
        pace.read_bytes_per_s_max = max(pace.read_bytes_per_s_max, pace.read_bytes_per_s)
        pace.read_bytes, pace.put_bytes = counters.read_bytes, counters.put_bytes

    def pace_of(self, number: int) -> _Pace:
        return self._paces.get(number) or _Pace()


def describe_tiers(
    tiers: Sequence[ConfiguredTier], engine: MetaEngine, transfer: Transfer, meter: Meter
) -> list[dict[str, Any]]:
    """Each tier, in the order of the configuration."""
    loads = engine.tier_loads()
    views = {view.number: view.schedule for view in transfer.view().tiers}
    read_bytes = sum(one.tier.counters.read_bytes for one in tiers if one.tier is not None)
    return [
        {
            **_place(one),
            **_content(one, loads.get(one.number, TierLoad())),
            **_reading(one, read_bytes, meter.pace_of(one.number)),
            **_schedule(views.get(one.number)),
        }
        for one in tiers
    ]


def _place(one: ConfiguredTier) -> dict[str, Any]:
    config, tier = one.config, one.tier
    return {
        "name": config.name,
        "number": one.number,
        "kind": config.kind.value,
        "place": config.url if config.path is None else str(config.path),
        "is_open": tier is not None,
        "health": None if tier is None else tier.health.value,
        "trouble": one.shown_trouble,
        "is_full": one.full_until_s > trio.current_time(),
    }


def _content(one: ConfiguredTier, load: TierLoad) -> dict[str, Any]:
    capacity = one.capacity
    return {
        "blobs": load.blobs,
        "size_bytes": load.size_bytes,
        "max_bytes": one.config.max_bytes,
        "capacity_bytes": None if capacity is None else capacity.total_bytes,
        "free_bytes": None if capacity is None else capacity.free_bytes,
    }


def _reading(one: ConfiguredTier, all_bytes: int, pace: _Pace) -> dict[str, Any]:
    counters = TierCounters() if one.tier is None else one.tier.counters
    return {
        "hits": counters.reads,
        "misses": counters.misses,
        "read_bytes": counters.read_bytes,
        "read_share": counters.read_bytes / all_bytes if all_bytes else 0.0,
        "read_bytes_per_s": round(pace.read_bytes_per_s),
        "read_bytes_per_s_max": round(pace.read_bytes_per_s_max),
        "puts": counters.puts,
        "put_bytes": counters.put_bytes,
        "put_bytes_per_s": round(pace.put_bytes_per_s),
        "in_flight": counters.in_flight,
        "failures": counters.failures,
        "stalls": counters.stalls,
        "corrupt": counters.corrupt,
    }


def _schedule(view: TierView | None) -> dict[str, Any]:
    """What reading from several tiers at once has found out."""
    return {
        "expected_bytes_per_s": None if view is None else round(view.bytes_per_s),
        "latency_s": None if view is None else view.latency_s,
        "reads_wanted": None if view is None else view.reads_wanted,
        "jobs": 0 if view is None else view.jobs,
        "hedges_won": 0 if view is None else view.hedges_won,
        "hedges_lost": 0 if view is None else view.hedges_lost,
    }
