"""Ways to read a list of chunks from several throttled tiers, on real threads, so that they can be
compared: production's transfer, and what others do.

Every way gets the same list and the same tiers, compares every digest, and says when each chunk
came and from where. Nothing is kept of a chunk but that.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvfs.digest import digest_of
from kvfs.errors import TierTrouble
from kvfs.file_io import allocate
from kvfs.transfer.buffers import BufferPool
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import WantedChunk
from scripts.tier_rig import RigTier

SLOTS = 32
PACE_S = 0.5  # between two changes of a tier's speed
PACES = (0.2, 1.0)  # of its full speed: the least, and the most
SAMPLE_S = 0.1


@dataclass(slots=True)
class Run:
    """What came of one list. Times are since it began."""

    took_s: float = 0.0
    landed_bytes: int = 0
    lost: int = 0
    wrong: int = 0  # handed over, with other bytes than their digest says
    samples: list[tuple[float, list[int]]] = field(default_factory=list)  # bytes read of each tier
    could: list[float] = field(default_factory=list)  # bytes in a second of all, every `PACE_S`


Way = Callable[[Sequence[RigTier], Sequence[bytes], int], Run]


def pulling(
    rigs: Sequence[RigTier],
    digests: Sequence[bytes],
    size_bytes: int,
    *,
    hedges: int = 4,
    halfway: Callable[[], None] = lambda: None,
) -> Run:
    """Production's transfer. It begins without any knowledge of the tiers. `halfway` is called when
    half of the chunks have landed."""
    half_bytes = len(digests) // 2 * size_bytes
    run, lock = Run(), threading.Lock()
    transfer = Transfer(BufferPool(SLOTS, size_bytes), scratch_reads=hedges)
    tiers = tuple(range(len(rigs)))
    for number, rig in enumerate(rigs):
        transfer.add_tier(number, rig)

    def take(landed: Landed) -> None:
        with landed:
            is_right = digest_of(landed.memory) == digests[landed.chunk]
        with lock:
            run.landed_bytes += size_bytes
            run.wrong += not is_right
            is_half = run.landed_bytes == half_bytes
        if is_half:
            halfway()

    chunks = [WantedChunk(digest, size_bytes, tiers) for digest in digests]
    try:
        with sampled(rigs, run):
            end = transfer.start(chunks, take, deadline_s=3600.0).wait(3600.0)
        assert end is not None
        run.lost = len(end.lost)
    finally:
        for rig in rigs:
            rig.set_frozen(False)  # else its calls would be waited for
        transfer.close(60.0)
    return run


def fixed(choose: Callable[[int], int]) -> Way:
    """Each chunk has its tier beforehand, and is waited for there, in order, by as many threads as
    the tier may have reads."""

    def read_all(rigs: Sequence[RigTier], digests: Sequence[bytes], size_bytes: int) -> Run:
        run, lock = Run(), threading.Lock()
        queues: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in rigs]
        for place, digest in enumerate(digests):
            queues[choose(place)].put(digest)

        def read(rig: RigTier, waiting: "queue.SimpleQueue[bytes]") -> None:
            memory = allocate(size_bytes)[:size_bytes]
            while True:
                try:
                    digest = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    is_here = rig.read_into(digest, 0, memory)
                except TierTrouble:
                    is_here = False
                is_right = is_here and digest_of(memory) == digest
                with lock:
                    run.landed_bytes += size_bytes * is_right
                    run.lost += not is_right

        readers = [
            (rig, waiting)
            for rig, waiting in zip(rigs, queues, strict=True)
            for _ in range(rig.limits.reads_max)
        ]
        with ThreadPoolExecutor(len(readers)) as threads, sampled(rigs, run):
            for ended in [threads.submit(read, *reader) for reader in readers]:
                ended.result()
        return run

    return read_all


def first_in_list() -> Way:
    """vLLM's secondary tiers and LMCache's planner: the first tier in the list that has a chunk."""
    return fixed(lambda _place: 0)


def static_split(speeds: Sequence[float]) -> Way:
    """Each tier gets its share by its mean speed: the next chunk goes where the least is given."""

    def way(rigs: Sequence[RigTier], digests: Sequence[bytes], size_bytes: int) -> Run:
        given = [0.0] * len(speeds)
        shares = []
        for _ in digests:
            tier = min(range(len(speeds)), key=lambda t: (given[t] + 1) / speeds[t])
            given[tier] += 1
            shares.append(tier)
        return fixed(lambda place: shares[place])(rigs, digests, size_bytes)

    return way


@contextmanager
def sampled(rigs: Sequence[RigTier], run: Run) -> Iterator[None]:
    """Notes how long it took, and what each tier gave meanwhile. No tier begins with anything that
    it saved up."""
    for rig in rigs:
        rig.drain()
    ended = threading.Event()
    before = [rig.counters.read_bytes for rig in rigs]
    began_s = time.monotonic()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            note()

    def note() -> None:
        given = [rig.counters.read_bytes - begin for rig, begin in zip(rigs, before, strict=True)]
        run.samples.append((time.monotonic() - began_s, given))

    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(sample)
        try:
            yield
            run.took_s = time.monotonic() - began_s
        finally:
            ended.set()
        sampling.result()
    note()


@contextmanager
def changing(rigs: Sequence[RigTier], speeds: Sequence[float], seed: int) -> Iterator["Paces"]:
    """Each tier's speed is another part of its full one every `PACE_S`, by chance; the same for the
    same seed. Afterwards full again."""
    paces = Paces(speeds, seed)
    ended = threading.Event()
    began_s = time.monotonic()

    def change() -> None:
        step = 0
        while True:
            for rig, speed in zip(rigs, paces.at(step), strict=True):
                rig.set_rate(speed)
            step += 1
            if ended.wait(max(0.0, began_s + step * PACE_S - time.monotonic())):
                return

    try:
        with ThreadPoolExecutor(1) as thread:
            changes = thread.submit(change)
            try:
                yield paces
            finally:
                ended.set()
            changes.result()
    finally:
        for rig, speed in zip(rigs, speeds, strict=True):
            rig.set_rate(speed)


class Paces:
    """How fast tiers are when."""

    def __init__(self, speeds: Sequence[float], seed: int) -> None:
        self._speeds = speeds
        self._random = random.Random(seed)
        self._steps: list[list[float]] = []

    def at(self, step: int) -> list[float]:
        """Bytes in a second of each, from `step * PACE_S` on."""
        while len(self._steps) <= step:
            self._steps.append([speed * self._random.uniform(*PACES) for speed in self._speeds])
        return self._steps[step]

    def sums(self, until_s: float) -> list[float]:
        """Bytes in a second of all tiers, from each change on."""
        return [sum(self.at(step)) for step in range(int(until_s / PACE_S) + 1)]

    def integral(self, until_s: float) -> float:
        """Bytes that all could give from the start until then."""
        whole = int(until_s / PACE_S)
        given = sum(sum(self.at(step)) * PACE_S for step in range(whole))
        return given + sum(self.at(whole)) * (until_s - whole * PACE_S)
