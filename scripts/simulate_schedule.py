#!/usr/bin/env python3
"""The pull scheduler on simulated tiers and a virtual clock: how near it comes to what is possible.

usage: simulate_schedule.py [--seeds 5] [--json]

Three tiers of 200 MiB/s times 1, 0.5 and 0.3, chunks of 4 MiB that all three hold:
- steady: constant speeds. The bound is all bytes over the summed bandwidth, plus one chunk.
- random: each tier's speed changes every 0.5 s, to 0.2 to 1 of its best. The bound is what all
  three could give until the end.
- frozen: one tier gives nothing more from 1 s on; beside it, the same job without that tier.
- tail: single chunks that come by chance, at three tenths of the bandwidth; 2% of all reads take 20
  times longer; with and without hedges.
- few: jobs of 1 to 16 chunks, one after the other, of tiers that nothing is known of, and of those
  that a job of 100 was read from before. The bound is all bytes over the bandwidth, and a latency.
- burst: 16 jobs of 8 chunks while a job of 256 is read.
Beside it, on the same tiers and seeds: all from the first tier in the list that has it, as vLLM's
tiers and LMCache read, and a static split by the tiers' mean speeds.

Production's schedule decides; only tiers and time are simulated. The same seed does the same.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs import config  # noqa: E402  (path first)
from kvfs.schedule import Chunk  # noqa: E402  (path first)
from scripts.simulated_tiers import (  # noqa: E402  (path first)
    MIB,
    FixedReader,
    Load,
    Reader,
    Result,
    S,
    SimulatedTier,
    World,
    first_tier,
    static_split,
)

BYTES_PER_S = 200 * MIB
SHARES = (1.0, 0.5, 0.3)
CHUNK_BYTES = 4 * MIB
NEVER = float("inf")
FEW = (1, 2, 4, 8, 16)
WAYS = ("pull", "first tier", "static split")


def chunks_of(count: int, tiers: int = len(SHARES)) -> tuple[Chunk, ...]:
    return tuple(Chunk(CHUNK_BYTES, tuple(range(tiers))) for _ in range(count))


def reader_of(way: str, world: World) -> Reader | FixedReader:
    if way == "pull":
        return Reader(world)
    return first_tier(world) if way == "first tier" else static_split(world, list(SHARES))


def tiers_of(**options: Any) -> list[SimulatedTier]:
    return [SimulatedTier(BYTES_PER_S * share, **options) for share in SHARES]


def steady(way: str, seed: int, *, count: int = 300) -> float:
    """The share of the bound that was reached: (all bytes over all bandwidth + a chunk) / time."""
    result = reader_of(way, World(tiers_of(), seed)).run([Load(0, chunks_of(count))])
    bandwidth = BYTES_PER_S * sum(SHARES)
    return (count * CHUNK_BYTES / bandwidth + CHUNK_BYTES / bandwidth) / result.end_s


def few(count: int, seed: int, *, is_known: bool) -> float:
    """The share of the bound that jobs of so few chunks reach, on average."""
    tiers = tiers_of()
    bound_s = count * CHUNK_BYTES / (BYTES_PER_S * sum(SHARES)) + tiers[0].latency_s
    before = [Load(0, chunks_of(100))] if is_known else []
    jobs = 8 if is_known else 1
    loads = [Load(2.0 + (4 * bound_s + 0.1) * job, chunks_of(count)) for job in range(jobs)]
    result = Reader(World(tiers, seed)).run(before + loads)
    return statistics.mean(bound_s / took_s for took_s in result.took_s[len(before) :])


def changing(way: str, seed: int, *, count: int = 600) -> float:
    """The share that was read of what the tiers could give until the end."""
    rng = random.Random(seed)
    tiers = tiers_of()
    for tier in tiers:
        tier.paces = [rng.uniform(0.2, 1.0) for _ in range(1000)]
    result = reader_of(way, World(tiers, seed)).run([Load(0, chunks_of(count))])
    possible = sum(tier.integral(round(result.end_s * S)) for tier in tiers)
    return count * CHUNK_BYTES / possible


def frozen(which: int, seed: int, *, count: int = 300) -> float:
    """The time, as part of that of the same job without the tier that freezes."""
    tiers = tiers_of()
    tiers[which].frozen = (1.0, NEVER)
    result = Reader(World(tiers, seed)).run([Load(0, chunks_of(count))])
    rest = tiers_of()
    del rest[which]
    alone = Reader(World(rest, seed)).run([Load(0, chunks_of(count, len(rest)))])
    assert result.lost == 0
    return result.end_s / alone.end_s


def tail(*, is_hedged: bool, seed: int, count: int = 2000) -> dict[str, float]:
    """Milliseconds from a job's coming to its end."""
    rng = random.Random(seed)
    at_s = 0.0
    loads = []
    for _ in range(count):
        at_s += rng.expovariate(0.3 * BYTES_PER_S * sum(SHARES) / CHUNK_BYTES)
        loads.append(Load(at_s, chunks_of(1)))
    world = World(tiers_of(slow_share=0.02), seed)
    copies = config.SCHEDULE_COPIES_MAX if is_hedged else 1
    with patch.object(config, "SCHEDULE_COPIES_MAX", copies):
        result = Reader(world).run(loads)
    took_ms = sorted(took_s * 1e3 for took_s in result.took_s)
    return {
        "p50_ms": took_ms[count // 2],
        "p99_ms": took_ms[count * 99 // 100],
        "read": result.read_bytes / count / CHUNK_BYTES,
    }


def burst(way: str, seed: int) -> float:
    """Seconds that a short job takes on average, of 16 that come while a long one is read."""
    rng = random.Random(seed)
    loads = [Load(0, chunks_of(256))]
    loads += [Load(rng.uniform(0.2, 1.0), chunks_of(8)) for _ in range(16)]
    result: Result = reader_of(way, World(tiers_of(), seed)).run(loads)
    return statistics.mean(result.took_s[1:])


def simulate(seeds: int) -> dict[str, Any]:
    numbers = range(seeds)
    report: dict[str, Any] = {}
    for way in WAYS:
        report[way] = {
            "steady": [steady(way, seed) for seed in numbers],
            "random": [changing(way, seed) for seed in numbers],
            "burst_s": [burst(way, seed) for seed in numbers],
        }
    report["few"] = {
        is_known: {
            count: [few(count, seed, is_known=is_known) for seed in numbers] for count in FEW
        }
        for is_known in (False, True)
    }
    report["frozen"] = [frozen(which, seed) for seed in numbers for which in range(len(SHARES))]
    report["hedged"] = [tail(is_hedged=True, seed=seed) for seed in numbers]
    report["unhedged"] = [tail(is_hedged=False, seed=seed) for seed in numbers]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = simulate(arguments.seeds)
    if arguments.json:
        print(json.dumps(report))
        return 0
    title = f"mean (worst) of {arguments.seeds}"
    print(f"{title:20}{'steady':>16}{'random':>16}{'short job of a burst, s':>26}")
    for way in WAYS:
        line = f"{way:20}"
        for kind, worst in (("steady", min), ("random", min), ("burst_s", max)):
            line += f"{statistics.mean(report[way][kind]):8.3f} ({worst(report[way][kind]):.3f})"
        print(line)
    for is_known, by_count in report["few"].items():
        shares = [f"{count}: {statistics.mean(by_count[count]):.2f}" for count in FEW]
        print(f"jobs of few chunks, tiers {'known' if is_known else 'new'}: {', '.join(shares)}")
    print(f"a tier frozen, time with it over time without: worst {max(report['frozen']):.3f}")
    for name in ("hedged", "unhedged"):
        mean = {key: statistics.mean(one[key] for one in report[name]) for key in report[name][0]}
        print(
            f"single chunks, {name}: p50 {mean['p50_ms']:.1f} ms, p99 {mean['p99_ms']:.1f} ms,"
            f" {mean['read']:.3f} of their bytes read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
