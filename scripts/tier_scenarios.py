"""What is measured of reading from several tiers at once: a function for each scenario, that takes
one round. scripts/bench_tiers.py runs them."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from kvfs.digest import digest_of
from kvfs.file_io import allocate
from kvfs.settings.words import TierLimits
from kvfs.tiers.contract import Tier, WritableTier
from kvfs.transfer.buffers import BufferPool
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import WantedChunk
from scripts.tier_contest import (
    Run,
    Way,
    changing,
    first_in_list,
    pulling,
    static_split,
)
from scripts.tier_rig import RigTier

READS_MAX = 8
LIMITS = TierLimits(READS_MAX, 2, 4.0, 30.0)
BACK_S = 30.0  # how long there is something to read, while a tier freezes and comes back
SINGLE_LATENCY_S = (0.004, 0.008, 0.012)  # of the three tiers
SINGLE_WARM = 20  # reads, after which the tiers are known
COST_THREADS = 2
SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ground:
    """What all scenarios read."""

    inner: list[WritableTier]  # as fast as they are
    rigs: list[RigTier]  # the same, throttled
    digests: list[bytes]
    size_bytes: int
    small: list[bytes]  # digests of chunks of SMALL_BYTES
    speeds: list[float]  # full ones, bytes in a second
    seconds: float
    seed: int

    def job(self, bytes_per_s: float, seconds: float | None = None) -> list[bytes]:
        """As many chunks as tiers of that speed read in that time."""
        count = max(8, round(bytes_per_s * (seconds or self.seconds) / self.size_bytes))
        return [self.digests[n % len(self.digests)] for n in range(count)]


@dataclass(slots=True)
class Row:
    """One line of the table: a ratio in each round, or other figures."""

    scenario: str
    side: str
    unit: str
    figures: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0

    def as_dict(self) -> dict[str, object]:
        return {
            "scenario": self.scenario,
            "side": self.side,
            "unit": self.unit,
            "median": round(statistics.median(self.figures), 3),
            "smallest": round(min(self.figures), 3),
            "largest": round(max(self.figures), 3),
            "wrong": self.wrong,
            "lost": self.lost,
        }


class Table:
    """Rows by scenario and side, as they come; and the last run of each side, for pictures."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.runs: dict[tuple[str, str], Run] = {}
        self.latencies: dict[str, list[float]] = {}

    def note(
        self, scenario: str, side: str, unit: str, figure: float, run: Run | None = None
    ) -> None:
        row = self.rows.setdefault((scenario, side), Row(scenario, side, unit))
        row.figures.append(figure)
        if run is not None:
            row.wrong += run.wrong
            row.lost += run.lost
            self.runs[scenario, side] = run


def ways_of(ground: Ground) -> dict[str, Way]:
    return {
        "kvfs": pulling,
        "static split": static_split(ground.speeds),
        "first in list": first_in_list(),
    }


def in_turn(number: int, sides: dict[str, Way]) -> Iterator[tuple[str, Way]]:
    """Another order in each round."""
    names = list(sides)
    at = number % len(names)
    for name in names[at:] + names[:at]:
        yield name, sides[name]


def steady(ground: Ground, number: int, table: Table) -> None:
    alone = 0.0
    for rig, speed in zip(ground.rigs, ground.speeds, strict=True):
        run = pulling([rig], ground.job(speed), ground.size_bytes)
        alone += run.landed_bytes / run.took_s
    for side, way in in_turn(number, ways_of(ground)):
        run = way(ground.rigs, ground.job(sum(ground.speeds)), ground.size_bytes)
        table.note("steady", side, "of the sum", run.landed_bytes / run.took_s / alone, run)


def changing_speeds(ground: Ground, number: int, table: Table) -> None:
    for side, way in in_turn(number, ways_of(ground)):
        with changing(ground.rigs, ground.speeds, ground.seed + number) as paces:
            job = ground.job(0.6 * sum(ground.speeds))
            run = way(ground.rigs, job, ground.size_bytes)
        run.could = paces.sums(run.took_s)
        ratio = run.landed_bytes / paces.integral(run.took_s)
        table.note("changing", side, "of the integral", ratio, run)


def frozen(ground: Ground, number: int, table: Table) -> None:
    job = ground.job(sum(ground.speeds))
    without = pulling(ground.rigs[1:], job, ground.size_bytes)
    was_frozen = threading.Event()

    def freeze() -> None:
        ground.rigs[0].set_frozen(True)
        was_frozen.set()

    run = pulling(ground.rigs, job, ground.size_bytes, halfway=freeze)
    assert was_frozen.is_set(), "the tier was not frozen before the job ended"
    table.note("frozen", "kvfs", "of the time without it", run.took_s / without.took_s, run)
    table.note("frozen", "comes back", "s after the thaw", _back_s(ground))


def _back_s(ground: Ground) -> float:
    """One transfer all the while: a tier freezes, goes down, thaws, and is read from again."""
    fastest = ground.rigs[0]
    with reading(ground.rigs, BufferPool(16, ground.size_bytes), 2) as transfer:
        chunks = [
            WantedChunk(digest, ground.size_bytes, (0, 1, 2))
            for digest in ground.job(sum(ground.speeds), BACK_S)
        ]
        job = transfer.start(chunks, Landed.give_back, deadline_s=3600.0)
        try:
            _wait_until(lambda: transfer.view().tiers[0].schedule.bytes_read > 0)
            fastest.set_frozen(True)
            _wait_until(lambda: transfer.view().tiers[0].schedule.health.value == "down")
            time.sleep(ground.seconds / 4)
            before = transfer.view().tiers[0].schedule.bytes_read
            fastest.set_frozen(False)
            thawed_s = time.monotonic()
            _wait_until(lambda: transfer.view().tiers[0].schedule.bytes_read > before)
            return time.monotonic() - thawed_s
        finally:
            fastest.set_frozen(False)
            job.cancel()


@contextmanager
def reading(tiers: Sequence[Tier], pool: BufferPool, hedges: int) -> Iterator[Transfer]:
    transfer = Transfer(pool, scratch_reads=hedges)
    try:
        for number, tier in enumerate(tiers):
            transfer.add_tier(number, tier)
        yield transfer
    finally:
        transfer.close(60.0)


def _wait_until(condition: Callable[[], bool], deadline_s: float = BACK_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError("the tier did not do what was waited for")
        time.sleep(0.01)


def corrupt(ground: Ground, number: int, table: Table) -> None:
    job = ground.job(sum(ground.speeds))
    speeds = {}
    for side in ("clean", "kvfs") if number % 2 else ("kvfs", "clean"):
        ground.rigs[0].troubles.corrupt_share = 0.01 if side == "kvfs" else 0.0
        run = pulling(ground.rigs, job, ground.size_bytes)
        ground.rigs[0].troubles.corrupt_share = 0.0
        speeds[side] = run.landed_bytes / run.took_s
        if side == "kvfs":
            noted = run
    table.note("corrupt", "kvfs", "of the clean speed", speeds["kvfs"] / speeds["clean"], noted)


def single(ground: Ground, number: int, table: Table) -> None:
    reads = max(50, round(100 * ground.seconds))
    p99_ms: dict[str, float] = {}
    for side, hedges in (("hedged", 4), ("not hedged", 0))[:: 1 if number % 2 else -1]:
        took_s = _single_reads(ground, reads, hedges, number)
        table.latencies.setdefault(side, []).extend(took_s)
        p99_ms[side] = sorted(took_s)[int(0.99 * reads)] * 1e3
        table.note("single", side, "ms at p99", p99_ms[side])
        table.note("single", f"{side}, median", "ms", statistics.median(took_s) * 1e3)
    table.note("single", "hedged / not", "of p99", p99_ms["hedged"] / p99_ms["not hedged"])


def _single_reads(ground: Ground, reads: int, hedges: int, number: int) -> list[float]:
    """How long each took, of jobs of one chunk, one after the other."""
    rigs = [
        RigTier(tier, name=tier.name, limits=LIMITS, seed=ground.seed + number)
        for tier in ground.inner
    ]
    for rig, latency_s in zip(rigs, SINGLE_LATENCY_S, strict=True):
        rig.troubles.latency_s = latency_s
    rigs[0].troubles.slow_share = 0.02
    took_s = []
    with reading(rigs, BufferPool(4, ground.size_bytes), hedges) as transfer:
        for read in range(SINGLE_WARM + reads):
            digest = ground.digests[read % len(ground.digests)]
            chunk = WantedChunk(digest, ground.size_bytes, (0, 1, 2))
            landed_s: list[float] = []

            def take(landed: Landed, landed_s: list[float] = landed_s) -> None:
                landed_s.append(time.monotonic())
                landed.give_back()

            began_s = time.monotonic()
            end = transfer.start([chunk], take, deadline_s=60.0).wait(60.0)
            assert end is not None and not end.lost
            if read >= SINGLE_WARM:
                took_s.append(landed_s[0] - began_s)
    return took_s


def cost(ground: Ground, number: int, table: Table) -> None:
    """Processor time of the whole process, for chunks so small that their bytes cost nothing."""
    digests = ground.small * max(1, round(25 * ground.seconds))
    used_us: dict[str, float] = {}
    sides: list[tuple[str, Callable[[], None]]] = [
        ("kvfs", partial(_read_all, ground, digests)),
        ("read and digest alone", partial(_read_bare, ground.inner, digests)),
    ]
    for side, read in sides[:: 1 if number % 2 else -1]:
        begin_s = time.process_time()
        read()
        used_us[side] = (time.process_time() - begin_s) / len(digests) * 1e6
        table.note("cost", side, "us of processor a chunk", used_us[side])
    more_us = used_us["kvfs"] - used_us["read and digest alone"]
    table.note("cost", "the transfer's own", "us of processor a chunk", more_us)


def _read_all(ground: Ground, digests: Sequence[bytes]) -> None:
    chunks = [WantedChunk(digest, SMALL_BYTES, (0, 1, 2)) for digest in digests]
    with reading(ground.inner, BufferPool(16, SMALL_BYTES), 2) as transfer:
        end = transfer.start(chunks, Landed.give_back, deadline_s=600.0).wait(600.0)
    assert end is not None and not end.lost


def _read_bare(tiers: Sequence[Tier], digests: Sequence[bytes]) -> None:
    def read(number: int) -> None:
        memory = allocate(SMALL_BYTES)[:SMALL_BYTES]
        for at in range(number, len(digests), COST_THREADS):
            assert tiers[at % len(tiers)].read_into(digests[at], 0, memory)
            assert digest_of(memory) == digests[at]

    with ThreadPoolExecutor(COST_THREADS) as threads:
        for ended in [threads.submit(read, number) for number in range(COST_THREADS)]:
            ended.result()


SCENARIOS: dict[str, Callable[[Ground, int, Table], None]] = {
    "steady": steady,
    "changing": changing_speeds,
    "frozen": frozen,
    "corrupt": corrupt,
    "single": single,
    "cost": cost,
}
