"""Transfers by chance: tiers that are late, fail, lie and hang, jobs that are cancelled or late,
and who gets chunks keeps them for a while. Whatever happens: what is handed over is right and does
not change until it is given back, each chunk is handed over or lost, and all memory comes back."""

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.config import PAGE_BYTES
from kvfs.digest import digest_of
from kvfs.errors import TierStalled, TierTrouble
from kvfs.file_io import allocate
from kvfs.transfer.job import Job, Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import Ending, WantedChunk
from tests.processes import wait_until
from tests.transfers import DEADLINE_S, GARBAGE, SlotPool, StoredTier, make_blobs

LARGE = make_blobs(3, 1024 * 1024 + 4097)  # may be read in parts
SMALL = make_blobs(40, PAGE_BYTES + 17)
BLOBS = SMALL | LARGE


class ErraticTier(StoredTier):
    """Does one of these in each read, by chance: nothing wrong; comes late; fails after a part was
    written; has one byte wrong; does not have it; hangs, writes garbage, says that it stalled."""

    def __init__(self, name: str, rng: random.Random, trouble: float, reads_max: int) -> None:
        super().__init__(name, dict(BLOBS), reads_max)
        self._rng = rng
        self._trouble = trouble
        self._rng_lock = threading.Lock()

    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        with self._rng_lock:
            is_fine = self._rng.random() >= self._trouble
            kind = self._rng.choice(("late", "late", "fails", "wrong", "missing", "hangs"))
            wait_s = self._rng.random() * 0.04
            place = self._rng.randrange(len(buffer))
        if is_fine:
            return super()._read_into(digest, offset_bytes, buffer, end_s)
        array = np.frombuffer(buffer, np.uint8)
        if kind == "late":
            time.sleep(wait_s)
        elif kind == "fails":
            array[: place + 1] = GARBAGE
            raise TierTrouble(self.name, "was told to fail")
        elif kind == "missing":
            return False
        elif kind == "hangs":
            for _ in range(20):
                time.sleep(wait_s / 10)
                array[:] = GARBAGE
            raise TierStalled(self.name, "was told to hang")
        is_here = super()._read_into(digest, offset_bytes, buffer, end_s)
        if kind == "wrong":
            array[place] ^= 0xFF
        return is_here

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        return True  # it is the way to here that is bad


class Reader:
    """One job: what it gets is looked at when it comes and again before it is given back, later and
    on another thread."""

    def __init__(self, chunks: list[WantedChunk], keepers: ThreadPoolExecutor, seed: int) -> None:
        self.chunks = chunks
        self.handed: set[int] = set()
        self.kept: list[Future[None]] = []
        self._keepers = keepers
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._is_over = False

    def take(self, landed: Landed) -> None:
        assert digest_of(landed.memory) == self.chunks[landed.chunk].digest
        with self._lock:
            assert not self._is_over
            assert landed.chunk not in self.handed
            self.handed.add(landed.chunk)
            wait_s = self._rng.random() * 0.02
            self.kept.append(self._keepers.submit(self._keep, landed, wait_s))

    def _keep(self, landed: Landed, wait_s: float) -> None:
        time.sleep(wait_s)
        with landed:
            assert digest_of(landed.memory) == self.chunks[landed.chunk].digest

    def end(self, _: object) -> None:
        with self._lock:
            self._is_over = True

    def check(self, job: Job, deadline_s: float) -> None:
        end = job.wait(2 * DEADLINE_S)
        assert end is not None
        assert end.ending is not Ending.LATE or deadline_s < DEADLINE_S, "it waits for something"
        assert set(end.lost) == set(range(len(self.chunks))) - self.handed
        assert end.ending is not Ending.DONE or all(n in end.why for n in end.lost)
        for keeping in self.kept:
            keeping.result(DEADLINE_S)


# The fixture only says which warnings are expected, of all examples.
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32 - 1),
    troubles=st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0]), min_size=1, max_size=4),
    jobs=st.integers(1, 8),
    slots=st.integers(0, 6),
    scratch_reads=st.integers(0, 4),
    in_place=st.booleans(),
)
def test_what_is_handed_over_is_right_and_stays_so(
    seed: int,
    troubles: list[float],
    jobs: int,
    slots: int,
    scratch_reads: int,
    in_place: bool,
    allow_warnings: list[str],
) -> None:
    allow_warnings.append("gave wrong bytes")
    rng = random.Random(seed)
    is_pooled = slots > 0
    pool = SlotPool(slots, max(map(len, BLOBS.values()))) if is_pooled else None
    transfer = Transfer(pool, scratch_reads=scratch_reads)
    try:
        for number, trouble in enumerate(troubles):
            tier = ErraticTier(
                f"t{number}", random.Random(rng.random()), trouble, rng.randint(1, 4)
            )
            transfer.add_tier(number, tier)
        readers: list[tuple[Reader, Job, float]] = []
        with ThreadPoolExecutor(8) as keepers:
            for _ in range(jobs):
                chosen = rng.choices(list(BLOBS), k=rng.randint(1, 40))
                chunks = [
                    WantedChunk(
                        digest,
                        len(BLOBS[digest]),
                        tuple(rng.sample(range(len(troubles)), rng.randint(1, len(troubles)))),
                        None if is_pooled else allocate(len(BLOBS[digest])),
                    )
                    for digest in chosen
                ]
                reader = Reader(chunks, keepers, rng.randrange(2**32))
                deadline_s = rng.choice((0.02, 0.1, DEADLINE_S, DEADLINE_S))
                job = transfer.start(
                    chunks, reader.take, deadline_s=deadline_s, on_end=reader.end, in_place=in_place
                )
                readers.append((reader, job, deadline_s))
                if rng.random() < 0.3:
                    rng.choice(readers)[1].cancel()
                if rng.random() < 0.3:
                    number = rng.randrange(len(troubles))
                    transfer.remove_tier(number)
                    name, trouble = f"t{number}", troubles[number]
                    tier = ErraticTier(
                        name, random.Random(rng.random()), trouble, rng.randint(1, 4)
                    )
                    transfer.add_tier(number, tier)
                time.sleep(rng.choice((0.0, 0.0, 0.005)))
            for reader, job, deadline_s in readers:
                reader.check(job, deadline_s)
        for reader, job, _ in readers:
            assert job.wait_quiet(DEADLINE_S)
            if in_place and not is_pooled:
                for number in reader.handed:
                    chunk = reader.chunks[number]
                    assert chunk.memory is not None
                    assert digest_of(chunk.memory[: chunk.size_bytes]) == chunk.digest
        wait_until(lambda: transfer.view().reads == 0, DEADLINE_S)
        if pool is not None:
            wait_until(lambda: pool.free == slots, DEADLINE_S)
        view = transfer.view()
        assert (view.slots, view.scratch_reads, view.jobs, view.unread_chunks) == (0, 0, 0, 0)
        assert view.landed_chunks == sum(len(reader.handed) for reader, _, _ in readers)
    finally:
        is_closed = transfer.close(DEADLINE_S)
    assert is_closed
