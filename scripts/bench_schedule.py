#!/usr/bin/env python3
"""What a decision of the pull scheduler costs: microseconds, with many tiers and queued chunks.

usage: bench_schedule.py [--tiers 64] [--chunks 100000] [--decisions 50000] [--json]

Jobs of 1, 24 and 1,000 chunks, one job of them all, and chunks that each have a set of holders of
their own, all on tiers of different speed with every slot in use. A decision is one read that ended
and what is done about it: the read that its tier begins next. Reads end in the order in which they
would. Processor time of the thread is measured, not the clock: others may use the machine, and
then take caches away; the best batch is what it costs alone. A full collection of the interpreter's
garbage is kept out of it.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs import config  # noqa: E402  (path first)
from kvfs.schedule import (  # noqa: E402  (path first)
    Action,
    Chunk,
    JobAdded,
    Outcome,
    ReadEnded,
    Schedule,
    StartRead,
    TierTerms,
    TierUp,
)

MIB = 1024 * 1024
BATCH = 500
KINDS = ("jobs of 24", "jobs of 1000", "one job", "sets of holders", "jobs of 1")


class Load:
    """A schedule with work, whose reads end when they should."""

    def __init__(self, kind: str, tiers: int, chunks: int, rng: random.Random) -> None:
        self.rng = rng
        self.schedule = Schedule()
        self.now_ns = 1
        self.ends: list[tuple[int, int]] = []
        self.speeds = [rng.uniform(0.2, 1.0) for _ in range(tiers)]
        for tier in range(tiers):
            self.tell(TierUp(tier, TierTerms(reads_max=8)))
        everywhere = tuple(range(tiers))
        sizes = {"jobs of 1": 1, "jobs of 24": 24, "jobs of 1000": 1000}
        size = sizes.get(kind, chunks)
        added = 0
        while added < chunks:
            holders = [everywhere] * size
            if kind == "sets of holders":
                holders = [tuple(sorted(rng.sample(everywhere, 3))) for _ in range(size)]
            few = tuple(Chunk(4 * MIB, held) for held in holders)
            self.tell(JobAdded(added, few))
            added += size
            if len(self.schedule._board.jobs) >= config.SCHEDULE_JOBS_MAX:
                break
        self.queued = self.schedule.view().unread_chunks

    def tell(self, event: Any) -> int:
        return self.obey(self.schedule.handle(event, self.now_ns))

    def obey(self, actions: list[Action]) -> int:
        begun = 0
        for action in actions:
            if isinstance(action, StartRead):
                begun += 1
                took_ns = 1e7 / self.speeds[action.tier] * self.rng.uniform(0.8, 1.2)
                heappush(self.ends, (self.now_ns + round(took_ns), action.read))
        return begun


def clock_us() -> float:
    """What it costs to look at the clock twice."""
    began_s = time.thread_time()
    for _ in range(10_000):
        time.thread_time()
    return (time.thread_time() - began_s) * 100


CLOCK_US = clock_us()


def step_ns() -> float:
    """What this machine takes now for one step of an empty loop: 20 to 30 where nobody else is."""
    began_s = time.thread_time()
    for _ in range(1_000_000):
        pass
    return (time.thread_time() - began_s) * 1e3


def measure(kind: str, tiers: int, chunks: int, decisions: int) -> dict[str, Any]:
    tracemalloc.start()
    load = Load(kind, tiers, chunks, random.Random(1))
    memory_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    began_s = time.thread_time()
    load = Load(kind, tiers, chunks, random.Random(1))
    added_us = (time.thread_time() - began_s) / max(1, load.queued) * 1e6
    queued = load.queued
    gc.collect()  # which takes tens of milliseconds with so many objects, would be due at any time
    gc.freeze()
    batches: list[float] = []
    longest_us = 0.0
    for _ in range(min(decisions, queued * 9 // 10) // BATCH):
        total_s = 0.0
        begun = 0
        for _ in range(BATCH):
            when_ns, read = heappop(load.ends)
            load.now_ns = when_ns
            event = ReadEnded(read, Outcome.LANDED)
            began_s = time.thread_time()
            actions = load.schedule.handle(event, when_ns)
            passed_s = time.thread_time() - began_s
            total_s += passed_s
            longest_us = max(longest_us, passed_s * 1e6)
            begun += load.obey(actions)
        batches.append(total_s / begun * 1e6 - CLOCK_US)
    gc.unfreeze()
    return {
        "kind": kind,
        "step_ns": step_ns(),
        "tiers": tiers,
        "queued": queued,
        "decisions": len(batches) * BATCH,
        "best_us": min(batches),
        "median_us": statistics.median(batches),
        "worst_us": max(batches),
        "longest_us": longest_us,
        "add_us_per_chunk": added_us,
        "bytes_per_chunk": memory_bytes / max(1, queued),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiers", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--decisions", type=int, default=50_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reports = [
        measure(kind, arguments.tiers, arguments.chunks, arguments.decisions) for kind in KINDS
    ]
    if arguments.json:
        print(json.dumps(reports))
        return 0
    steps = f"{reports[0]['step_ns']:.0f} to {reports[-1]['step_ns']:.0f} ns"
    print(f"{arguments.tiers} tiers; a step of an empty loop takes {steps}")
    print(f"microseconds of a decision, over batches of {BATCH}; `longest` of a single one")
    print(
        f"{'':18}{'queued':>9}{'best':>8}{'median':>8}{'worst':>8}{'longest':>9}{'add/chunk':>11}"
        f"{'B/chunk':>9}"
    )
    for report in reports:
        print(
            f"{report['kind']:18}{report['queued']:9}{report['best_us']:8.1f}"
            f"{report['median_us']:8.1f}{report['worst_us']:8.1f}{report['longest_us']:9.0f}"
            f"{report['add_us_per_chunk']:11.1f}{report['bytes_per_chunk']:9.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
