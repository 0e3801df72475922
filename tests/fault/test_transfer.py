"""Reading from several tiers at once: what is handed over is right, and stays so."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import InvalidInput, Unavailable
from kvfs.schedule.words import Outcome
from kvfs.settings.words import TierKind
from kvfs.tiers.contract import Tier
from kvfs.transfer.job import Landed
from kvfs.transfer.rechecks import Rechecks
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import Ending, JobEnd, Pool, WantedChunk
from scripts.tier_rig import RigTier
from tests.processes import wait_until
from tests.tiers import on_tmpfs, open_directory
from tests.transfers import (
    DEADLINE_S,
    GARBAGE,
    SlotPool,
    StoredTier,
    Taker,
    make_blobs,
    wanted,
)

KIB = 1024


@pytest.fixture
def opened() -> Iterator[Callable[..., Transfer]]:
    """Makes transfers over tiers, numbered as they come; closed afterwards, with nothing left."""
    transfers: list[Transfer] = []

    def make(*tiers: Tier, pool: Pool | None = None, **words: object) -> Transfer:
        transfer = Transfer(pool, **words)  # type: ignore[arg-type]
        transfers.append(transfer)
        for number, tier in enumerate(tiers):
            transfer.add_tier(number, tier)
        return transfer

    yield make
    for transfer in transfers:
        assert transfer.close(DEADLINE_S), "a call is still under way"


def test_chunks_land_in_the_memory_that_they_bring(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(100, 64 * KIB)
    transfer = opened(*(StoredTier(f"t{n}", blobs) for n in range(3)))
    chunks, taker, ends = wanted(blobs, (0, 1, 2)), Taker(), list[JobEnd]()
    job = transfer.start(chunks, taker.take, deadline_s=DEADLINE_S, on_end=ends.append)
    end = job.wait(DEADLINE_S)
    assert end == JobEnd(Ending.DONE, (), {}) and ends == [end]
    assert [taker.digests[n] for n in range(100)] == list(blobs)
    assert job.wait_quiet(DEADLINE_S)
    assert [bytes(c.memory[: c.size_bytes]) for c in chunks if c.memory] == list(blobs.values())
    view = transfer.view()
    assert (view.landed_chunks, view.landed_bytes) == (100, 100 * 64 * KIB)
    assert sum(tier.schedule.bytes_read for tier in view.tiers) == 100 * 64 * KIB


def test_many_chunks_come_through_few_slots(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(300, 16 * KIB)
    pool = SlotPool(8, 16 * KIB)
    transfer = opened(*(StoredTier(f"t{n}", blobs) for n in range(3)), pool=pool, scratch_reads=2)
    taker = Taker()
    chunks = wanted(blobs, (0, 1, 2), is_pooled=True)
    job = transfer.start(chunks, taker.take_and_give_back, deadline_s=DEADLINE_S)
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert [taker.digests[n] for n in range(300)] == list(blobs)
    wait_until(lambda: pool.free == 8, DEADLINE_S)


def test_no_read_begins_without_a_slot(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(20, 4 * KIB)
    pool = SlotPool(3, 4 * KIB)
    transfer = opened(StoredTier("t", blobs), pool=pool, scratch_reads=0)
    taker = Taker()
    job = transfer.start(wanted(blobs, (0,), is_pooled=True), taker.take, deadline_s=DEADLINE_S)
    for _ in range(6):
        taker.wait(3)
        held = list(taker.landed.values())
        assert pool.free == 0 and transfer.view().reads == 0
        for landed in held[-3:]:
            landed.give_back()
    taker.wait(2)
    taker.give_back()
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    wait_until(lambda: pool.free == 3, DEADLINE_S)


def test_a_slot_that_others_gave_back_is_used(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(1, 4 * KIB)
    pool = SlotPool(1, 4 * KIB)
    slot = pool.take_nowait()
    assert slot is not None
    transfer = opened(StoredTier("t", blobs), pool=pool)
    job = transfer.start(
        wanted(blobs, (0,), is_pooled=True), Landed.give_back, deadline_s=DEADLINE_S
    )
    pool.give_back(slot)
    transfer.note_room()
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})


@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_read_that_hangs_writes_to_nothing_that_was_handed_over(
    opened: Callable[..., Transfer], is_pooled: bool
) -> None:
    """One tier hangs in its reads; another, which is busy at first, repeats them. When the first
    goes on at last, it writes garbage."""
    blobs, other = make_blobs(2, 64 * KIB), make_blobs(1, 64 * KIB)
    pool = SlotPool(8, 64 * KIB) if is_pooled else None
    stuck, good = StoredTier("stuck", blobs), StoredTier("good", blobs | other, reads_max=1)
    transfer = opened(stuck, good, pool=pool, scratch_reads=2)
    hung, busy = stuck.hang(blobs), good.hold(other)
    first = transfer.start(
        wanted(other, (1,), is_pooled=is_pooled), Landed.give_back, deadline_s=DEADLINE_S
    )
    assert good.began.acquire(timeout=DEADLINE_S)
    chunks, taker = wanted(blobs, (0, 1), is_pooled=is_pooled), Taker()
    job = transfer.start(chunks, taker.take, deadline_s=DEADLINE_S, in_place=False)
    for _ in blobs:
        assert stuck.began.acquire(timeout=DEADLINE_S)
    busy.set()
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert [taker.digests[n] for n in range(2)] == list(blobs)
    assert [landed.is_in_place for landed in taker.landed.values()] == [is_pooled] * 2
    assert job.is_quiet == is_pooled
    hung.set()
    assert job.wait_quiet(DEADLINE_S) and first.wait(DEADLINE_S)
    wait_until(lambda: transfer.view().reads == 0, DEADLINE_S)
    for number, blob in enumerate(blobs.values()):
        assert bytes(taker.landed[number].memory) == blob
    if pool is None:
        assert all(chunk.memory is not None and chunk.memory[0] == GARBAGE for chunk in chunks)
    taker.give_back()
    if pool is not None:
        wait_until(lambda: pool.free == 8, DEADLINE_S)


def test_where_chunks_must_lie_a_late_read_is_waited_for(opened: Callable[..., Transfer]) -> None:
    blobs, other = make_blobs(1, 64 * KIB), make_blobs(1, 64 * KIB)
    stuck, good = StoredTier("stuck", blobs), StoredTier("good", blobs | other, reads_max=1)
    transfer = opened(stuck, good)
    hung, busy = stuck.hang(blobs), good.hold(other)
    transfer.start(wanted(other, (1,)), Landed.give_back, deadline_s=DEADLINE_S)
    chunks, taker = wanted(blobs, (0, 1)), Taker()
    assert good.began.acquire(timeout=DEADLINE_S)
    job = transfer.start(chunks, taker.take, deadline_s=DEADLINE_S)
    assert stuck.began.acquire(timeout=DEADLINE_S)
    busy.set()
    assert good.began.acquire(timeout=DEADLINE_S)  # it repeats the read
    wait_until(lambda: transfer.view().tiers[1].schedule.hedges_won == 1, DEADLINE_S)
    assert not taker.landed and job.end is None
    hung.set()
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert taker.landed[0].is_in_place and job.is_quiet
    memory = chunks[0].memory
    assert memory is not None and bytes(memory[: 64 * KIB]) == next(iter(blobs.values()))


def test_wrong_bytes_are_read_elsewhere_and_looked_at(
    opened: Callable[..., Transfer], allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier bad had wrong bytes")
    blobs = make_blobs(10, 16 * KIB)
    bad, good = StoredTier("bad", dict(blobs)), StoredTier("good", dict(blobs))
    bad.wrong = set(list(blobs)[:2])
    gone: list[tuple[int, bytes]] = []
    transfer = opened(bad, good, on_gone=lambda number, digest: gone.append((number, digest)))
    good.is_failing = True
    taker = Taker()
    job = transfer.start(wanted(blobs, (0,)), taker.take, deadline_s=DEADLINE_S)
    end = job.wait(DEADLINE_S)
    assert end == JobEnd(Ending.DONE, (0, 1), {0: Outcome.CORRUPT, 1: Outcome.CORRUPT})
    wait_until(lambda: sorted(gone) == sorted((0, digest) for digest in bad.wrong), DEADLINE_S)
    assert sorted(bad.rechecked) == sorted(bad.wrong)
    good.is_failing = False
    taker = Taker()
    again = transfer.start(wanted(blobs, (0, 1)), taker.take, deadline_s=DEADLINE_S)
    assert again.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert [taker.digests[n] for n in range(10)] == list(blobs)


def test_a_recheck_that_meets_a_bug_keeps_no_later_one(allow_warnings: list[str]) -> None:
    class BrokenTier(StoredTier):
        def _recheck(self, digest: bytes, end_s: float) -> bool:
            super()._recheck(digest, end_s)
            raise RuntimeError("a bug")

    allow_warnings.append("tier odd .* in an unforeseen way")
    odd = BrokenTier("odd", {})
    rechecks = Rechecks(lambda number, digest: None)
    for count in (1, 2):
        rechecks.add(0, odd, bytes([count]) * 16)
        wait_until(lambda count=count: len(odd.rechecked) == count, DEADLINE_S)
    assert rechecks.close(DEADLINE_S)


def test_a_chunk_that_no_tier_has_is_lost_at_once(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(3, 4 * KIB)
    first = next(iter(blobs))
    gone: list[tuple[int, bytes]] = []
    empty = StoredTier("empty", {digest: blobs[digest] for digest in list(blobs)[1:]})
    transfer = opened(empty, on_gone=lambda number, digest: gone.append((number, digest)))
    chunks = wanted(blobs, (0,))
    chunks[2] = WantedChunk(chunks[2].digest, chunks[2].size_bytes, (7,), chunks[2].memory)
    job = transfer.start(chunks, Landed.give_back, deadline_s=DEADLINE_S)
    missing = {0: Outcome.MISSING, 2: Outcome.MISSING}
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (0, 2), missing)
    assert gone == [(0, first)]


def test_a_tier_that_fails_loses_only_what_no_other_has(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(40, 4 * KIB)
    bad, good = StoredTier("bad", blobs), StoredTier("good", blobs)
    bad.is_failing = True
    transfer = opened(bad, good)
    taker = Taker()
    chunks = wanted(blobs, (0, 1))
    chunks[39] = WantedChunk(chunks[39].digest, 4 * KIB, (0,), chunks[39].memory)
    job = transfer.start(chunks, taker.take, deadline_s=DEADLINE_S)
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (39,), {39: Outcome.FAILED})
    assert [taker.digests[n] for n in range(39)] == list(blobs)[:39]


def test_after_a_cancel_nothing_is_handed_over(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(50, 4 * KIB)
    pool = SlotPool(8, 4 * KIB)
    tier = StoredTier("t", blobs, reads_max=2)
    late = tier.hold(list(blobs)[5:])
    transfer = opened(tier, pool=pool, scratch_reads=0)
    taker, ends = Taker(), list[JobEnd]()
    chunks = wanted(blobs, (0,), is_pooled=True)
    job = transfer.start(chunks, taker.take, deadline_s=DEADLINE_S, on_end=ends.append)
    taker.wait(5)
    for _ in range(7):
        assert tier.began.acquire(timeout=DEADLINE_S)
    job.cancel()
    end = job.wait(DEADLINE_S)
    assert end is not None and (end.ending, end.lost) == (Ending.CANCELLED, tuple(range(5, 50)))
    assert ends == [end]
    taker.give_back()
    wait_until(lambda: pool.free == 6, DEADLINE_S)
    assert transfer.view().reads == 2 and pool.free == 6  # two calls may still write
    late.set()
    wait_until(lambda: pool.free == 8, DEADLINE_S)
    assert len(taker.landed) == 5


def test_a_callback_may_cancel_its_job(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(50, 4 * KIB)
    transfer = opened(StoredTier("t", blobs, reads_max=1))
    count, begun = 0, threading.Event()

    def on_chunk(landed: Landed) -> None:
        nonlocal count
        assert begun.wait(DEADLINE_S)
        count += 1
        job.cancel()

    job = transfer.start(wanted(blobs, (0,)), on_chunk, deadline_s=DEADLINE_S)
    begun.set()
    end = job.wait(DEADLINE_S)
    assert end is not None and end.ending is Ending.CANCELLED
    assert len(end.lost) == 50 - count


def test_a_job_ends_at_its_deadline(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(4, 4 * KIB)
    tier = StoredTier("t", blobs)
    held = tier.hold(list(blobs)[2:])
    transfer = opened(tier)
    taker = Taker()
    job = transfer.start(wanted(blobs, (0,)), taker.take, deadline_s=0.2)
    end = job.wait(DEADLINE_S)
    late = {2: Outcome.CANCELLED, 3: Outcome.CANCELLED}
    assert end == JobEnd(Ending.LATE, (2, 3), late)
    assert not job.is_quiet
    held.set()
    assert job.wait_quiet(DEADLINE_S)


def test_a_tier_that_hangs_costs_its_own_threads_only(opened: Callable[..., Transfer]) -> None:
    """More reads of it hang than there would be threads for, if all shared a fixed number."""
    blobs, stuck_blobs = make_blobs(200, 4 * KIB), make_blobs(64, 4 * KIB)
    stuck, good = StoredTier("stuck", stuck_blobs, reads_max=64), StoredTier("good", blobs)
    held = stuck.hold(stuck_blobs)
    transfer = opened(stuck, good)
    jobs = [
        transfer.start(wanted({digest: blob}, (0,)), Landed.give_back, deadline_s=DEADLINE_S)
        for digest, blob in stuck_blobs.items()
    ]
    taker = Taker()
    job = transfer.start(wanted(blobs, (1,)), taker.take, deadline_s=DEADLINE_S)
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    held.set()
    for job in jobs:
        assert job.wait(DEADLINE_S) is not None


def test_a_callback_that_raises_ends_nothing(
    opened: Callable[..., Transfer], allow_warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    allow_warnings.append("callback for .* failed")
    blobs = make_blobs(20, 4 * KIB)
    pool = SlotPool(4, 4 * KIB)
    transfer = opened(StoredTier("t", blobs), pool=pool, scratch_reads=0)

    def fail(_: object) -> None:
        raise RuntimeError("a callback of the test")

    job = transfer.start(
        wanted(blobs, (0,), is_pooled=True), fail, deadline_s=DEADLINE_S, on_end=fail
    )
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    wait_until(lambda: pool.free == 4, DEADLINE_S)
    assert len(caplog.records) == 21


def test_a_tier_comes_and_goes(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(30, 4 * KIB)
    first, second = StoredTier("first", blobs, reads_max=1), StoredTier("second", blobs)
    held = first.hold(blobs)
    transfer = opened(first, second)
    taker = Taker()
    transfer.remove_tier(1)
    job = transfer.start(wanted(blobs, (0, 1)), taker.take, deadline_s=DEADLINE_S)
    assert first.began.acquire(timeout=DEADLINE_S)
    transfer.add_tier(1, second)
    transfer.remove_tier(0)
    assert [tier.name for tier in transfer.view().tiers] == ["second"]
    held.set()
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert [taker.digests[n] for n in range(30)] == list(blobs)


def test_a_large_chunk_is_read_in_parts_and_checked_as_a_whole(
    opened: Callable[..., Transfer], allow_warnings: list[str]
) -> None:
    """One tier has wrong bytes, and both are asked for parts: then the whole is wrong once."""
    allow_warnings.append("tier .* wrong bytes")
    blobs = make_blobs(1, 8 * 1024 * KIB)
    tiers = [StoredTier(f"t{n}", dict(blobs)) for n in range(2)]
    transfer = opened(*tiers)

    def read() -> int:
        """How many reads it took."""
        before, taker = sum(tier.counters.reads for tier in tiers), Taker()
        job = transfer.start(wanted(blobs, (0, 1)), taker.take, deadline_s=DEADLINE_S)
        assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
        assert [taker.digests[0]] == list(blobs)
        return sum(tier.counters.reads for tier in tiers) - before

    wait_until(lambda: read() > 1, DEADLINE_S)  # whether in parts depends on how fast both look
    tiers[0].wrong = set(blobs)
    # Until it was asked, and looked at what it has.
    wait_until(lambda: bool(read()) and not tiers[0].blobs, DEADLINE_S)


def test_close_ends_all(opened: Callable[..., Transfer]) -> None:
    blobs = make_blobs(10, 4 * KIB)
    tier = StoredTier("t", blobs)
    held = tier.hold(blobs)
    transfer = Transfer()
    transfer.add_tier(0, tier)
    job = transfer.start(wanted(blobs, (0,)), Landed.give_back, deadline_s=DEADLINE_S)
    assert tier.began.acquire(timeout=DEADLINE_S)
    assert not transfer.close(0.05), "a call still hangs"
    end = job.wait(DEADLINE_S)
    assert end is not None and end.ending is Ending.CLOSED and len(end.lost) == 10
    with pytest.raises(Unavailable, match="closed"):
        transfer.start(wanted(blobs, (0,)), Landed.give_back, deadline_s=1.0)
    held.set()
    assert transfer.close(DEADLINE_S)


def test_what_cannot_be_read_is_refused(opened: Callable[..., Transfer]) -> None:
    plain, pooled = opened(), opened(pool=SlotPool(1, 4096))
    digest, memory = bytes(16), memoryview(bytearray(5000))

    def refused(transfer: Transfer, chunk: WantedChunk, match: str) -> None:
        with pytest.raises(InvalidInput, match=match):
            transfer.start([chunk], Landed.give_back, deadline_s=1.0)

    refused(plain, WantedChunk(b"short", 10, (0,), memory), "16 bytes")
    refused(plain, WantedChunk(digest, 0, (0,), memory), "not in 1")
    refused(plain, WantedChunk(digest, 10, (0,)), "no memory")
    refused(plain, WantedChunk(digest, 5001, (0,), memory), "5001")
    refused(plain, WantedChunk(digest, 10, (0,), memoryview(bytes(10))), "writable")
    refused(pooled, WantedChunk(digest, 10, (0,), memory), "has a pool")
    refused(pooled, WantedChunk(digest, 4097, (0,)), "slots of 4096")
    with pytest.raises(InvalidInput, match="begin with 0"):
        plain.add_tier(-1, StoredTier("t", {}))
    assert plain.start([], Landed.give_back, deadline_s=1.0).wait(DEADLINE_S) == JobEnd(
        Ending.DONE, (), {}
    )


def test_real_tiers_late_and_lying(
    opened: Callable[..., Transfer], tmp_path: Path, allow_warnings: list[str]
) -> None:
    """Directories in memory, on a disk, and as a shared file system; some chunks so large that they
    are read by several calls, and hashed meanwhile."""
    allow_warnings.append("tier .* gave wrong bytes")
    blobs = make_blobs(30, 300 * KIB + 17) | make_blobs(3, 20 * 1024 * KIB + 5)
    with on_tmpfs() as memory:
        rigs = []
        for kind, path in (
            (TierKind.MEMORY, memory / "tier"),
            (TierKind.NVME, tmp_path / "disk"),
            (TierKind.SHARED, tmp_path / "shared"),
        ):
            tier = open_directory(path, kind)
            for digest, blob in blobs.items():
                tier.put(digest, memoryview(blob), len(blob))
            rigs.append(RigTier(tier, bytes_per_s=100e6, burst_bytes=4 * 1024 * KIB))
        rigs[0].troubles.corrupt_share = 0.2
        rigs[1].troubles.latency_s, rigs[1].troubles.slow_share = 0.005, 0.2
        transfer, taker = opened(*rigs), Taker()
        chunks = wanted(blobs, (0, 1, 2))
        job = transfer.start(chunks, taker.take_and_give_back, deadline_s=DEADLINE_S)
        assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
        assert [taker.digests[n] for n in range(len(blobs))] == list(blobs)
        assert transfer.close(DEADLINE_S)
        for rig in rigs:
            rig.close()


@pytest.mark.parametrize("is_pooled", [False, True])
def test_tiers_that_hang_for_ever_do_not_keep_a_job(
    opened: Callable[..., Transfer], is_pooled: bool
) -> None:
    """Their reads hold more memory than there is for reads that repeat others."""
    blobs = make_blobs(40, 16 * KIB)
    stuck = [StoredTier(f"stuck-{n}", blobs, reads_max=2) for n in range(3)]
    hung = [tier.hang(blobs) for tier in stuck]
    pool = SlotPool(8, 16 * KIB) if is_pooled else None
    transfer = opened(*stuck, StoredTier("good", blobs), pool=pool, scratch_reads=1)
    taker = Taker()
    job = transfer.start(
        wanted(blobs, (0, 1, 2, 3), is_pooled=is_pooled),
        taker.take_and_give_back,
        deadline_s=DEADLINE_S,
        in_place=False,
    )
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    assert [taker.digests[n] for n in range(40)] == list(blobs)
    assert transfer.view().reads >= 6, "they still hang"
    again = Taker()  # all of which the same tiers are asked for, as long as they are up
    job = transfer.start(
        wanted(blobs, (0, 1, 2, 3), is_pooled=is_pooled),
        again.take_and_give_back,
        deadline_s=DEADLINE_S,
        in_place=False,
    )
    assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
    for event in hung:
        event.set()
    if pool is not None:
        wait_until(lambda: pool.free == 8, DEADLINE_S)


def test_a_job_that_hung_leaves_others_what_it_did_not_have(
    opened: Callable[..., Transfer],
) -> None:
    """Two of its reads keep two slots for ever; the third is for whoever comes."""
    blobs = make_blobs(10, 16 * KIB)
    stuck, good = StoredTier("stuck", blobs, reads_max=2), StoredTier("good", blobs)
    hung = stuck.hang(blobs)
    pool = SlotPool(3, 16 * KIB)
    transfer = opened(stuck, good, pool=pool, scratch_reads=3)
    chunks = wanted(blobs, (0,), is_pooled=True)
    job = transfer.start(chunks, Landed.give_back, deadline_s=DEADLINE_S)
    for _ in range(2):
        assert stuck.began.acquire(timeout=DEADLINE_S)
    job.cancel()
    for _ in range(3):
        chunks, taker = wanted(blobs, (1,), is_pooled=True), Taker()
        job = transfer.start(chunks, taker.take_and_give_back, deadline_s=DEADLINE_S)
        assert job.wait(DEADLINE_S) == JobEnd(Ending.DONE, (), {})
        assert [taker.digests[n] for n in range(10)] == list(blobs)
    hung.set()
    wait_until(lambda: pool.free == 3, DEADLINE_S)
