"""Loads: chunk files into the engine's blocks, from all places that have them, each request to one
outcome.

A request's chunks are located in batches, and the chunks of a batch are one job of the transfer,
which reads from the store's directories, the node's tiers and other nodes at once, into slots of
the staging pool. What has landed is right, and is copied into blocks, where it may
(`gpu_bridge.load_job`). What no place gives the node may still bring. A read that hangs in the
kernel holds only its slot.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpu_bridge.copies import Copier, Mark
from gpu_bridge.counters import Counters
from gpu_bridge.link import Link
from gpu_bridge.load_job import Failure, LoadJob, LoadOutcome
from gpu_bridge.load_sources import SourceCounts
from gpu_bridge.plan import ChunkLoad, Place, RequestLoad
from gpu_bridge.shard import Shard
from gpu_bridge.staging import Slot, StagingPool, StagingShare
from kvfs.chunk import match_header
from kvfs.client_files import OpenFile
from kvfs.config import (
    BRIDGE_OPEN_BATCH,
    CLIENT_DEADLINE_S,
    READER_TICKET_DEADLINE_S,
    TRANSFER_SCRATCH_READS,
)
from kvfs.errors import Corrupt, KvfsError, QueueFull, Unavailable
from kvfs.reader.complaints import Complaints
from kvfs.reader.places import Placed, Places
from kvfs.schedule.words import Outcome
from kvfs.settings.words import TIER_LIMITS, TierKind
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import Ending, JobEnd, WantedChunk
from kvfs.workers import Workers

log = logging.getLogger(__name__)

_LOCATING_THREADS = 2  # which ask the node, by one connection


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Chunks of a request that are read together, and where each is. `is_last`: what is not got
    now is not asked for once more."""

    job: LoadJob
    loads: Sequence[ChunkLoad]
    places: Sequence[Placed | None]
    after: int  # number of the request's first chunk behind them
    is_last: bool = False


class Loader:
    """Starts loads and hands out their outcomes. `submit`, `cancel` and `take_outcomes` are called
    by the engine's thread and never block; `wait` does, as long as it is told."""

    def __init__(
        self,
        shard: Shard,
        link: Link,
        complaints: Complaints,
        staging: StagingPool,
        copier: Copier,
        counters: Counters,
        *,
        threads: int,
        deadline_s: float,
    ) -> None:
        """`threads`: how many copy at the same time, and read from each directory of the store."""
        self._shard = shard
        self._link = link
        self._complaints = complaints
        self._copier = copier
        self._counters = counters
        self._deadline_s = deadline_s
        self._jobs: dict[str, LoadJob] = {}
        self._workers = Workers("kvfs-load", _LOCATING_THREADS)
        # Apart, since the node waits for what it brings: no look-up is to wait behind that.
        self._bringers = Workers("kvfs-bring", 1)
        self._bringing = link.beside(CLIENT_DEADLINE_S)
        self._copies = threading.Semaphore(threads)
        self._slot_bytes = staging.slot_bytes
        # The half that saves leave to loads, but where that is too little.
        half = (staging.count - 1) // 2
        share = StagingShare(staging, min(max(half, threads + 1), staging.count - 1))
        scratch_reads = min(TRANSFER_SCRATCH_READS, max(1, share.count // 4), share.count - 1)
        self._transfer = Transfer(share, scratch_reads=scratch_reads, on_gone=complaints.note_gone)
        staging.watch(self._transfer.note_room)
        limits = replace(TIER_LIMITS[TierKind.NVME], reads_max=threads)
        self._places = Places(
            self._transfer,
            lambda: link.ask(lambda client: client.tiers()),
            link.beside(READER_TICKET_DEADLINE_S),
            complaints.complain,
            limits,
        )
        self._source_counts = SourceCounts(self._places, self._transfer, counters)
        self._ended = threading.Event()

    def submit(self, place: Place, request: RequestLoad, after: Mark | None) -> None:
        """Begin to load. The blocks are the loader's until the outcome is taken."""
        assert request.request_id not in self._jobs
        job = LoadJob(place, request, after, self._deadline_s)
        self._jobs[request.request_id] = job
        self._go_on(job, 0)

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this load any more; its outcome comes soon."""
        job = self._jobs.get(request_id)
        if job is not None and job.shut():
            self._counters.add(f"failed_loads.{Failure.CANCELLED}")

    def wait(self, deadline_s: float) -> None:
        """Return when a load ends, at the deadline, or when there is none."""
        if self._jobs:
            self._ended.wait(deadline_s)

    def take_outcomes(self) -> list[LoadOutcome]:
        """The loads that ended since the last call."""
        self._ended.clear()
        now_s = time.monotonic()
        outcomes = []
        for job in self._jobs.values():
            if now_s > job.end_s and job.shut():
                self._counters.add(f"failed_loads.{Failure.LATE}")
                log.warning("kvfs: a load took over %g s and is given up", self._deadline_s)
            outcome = job.outcome()
            if outcome is not None:
                outcomes.append(outcome)
                self._counters.add_load_seconds(now_s - job.began_s)
        for outcome in outcomes:
            del self._jobs[outcome.request_id]
        if outcomes:
            self._source_counts.note()
        return outcomes

    def close(self) -> None:
        """Give up what is under way. Its outcomes are never taken."""
        for job in self._jobs.values():
            job.shut()
        self._workers.close()
        self._bringers.close()
        self._transfer.close(0.0)
        self._places.close()
        self._bringing.close()

    # Locating -------------------------------------------------------------------------------------
    def _go_on(self, job: LoadJob, first: int) -> None:
        """Have the next chunks located and read, once."""
        if job.begin_open(first) and not self._workers.start(self._open, job, first):
            self._fail(job, job.request.chunks[first:], Failure.CANCELLED)

    def _open(self, job: LoadJob, first: int) -> None:
        """Locate the next chunks and have them read. Those behind them follow when the first of
        these has come, so that few are open at once."""
        loads = job.request.chunks[first : first + BRIDGE_OPEN_BATCH]
        failure: Failure | None = Failure.INTERNAL
        try:
            failure = self._locate(job, loads, first + len(loads))
        finally:
            if failure is not None:
                self._fail(job, job.request.chunks[first:], failure)

    def _locate(self, job: LoadJob, loads: Sequence[ChunkLoad], after: int) -> Failure | None:
        """Why neither these chunks nor those behind them are loaded."""
        if not job.is_wanted(loads[0]):
            return Failure.CANCELLED
        paths = [self._shard.path(job.place, load.chunk) for load in loads]
        located = self._link.ask(lambda client: client.locate(paths))
        if located is None:
            return Failure.UNAVAILABLE
        self._begin(_Part(job, loads, self._places.place(located, job.end_s), after))
        return None

    def _begin(self, part: _Part) -> None:
        """Have those chunks of a part read that can be."""
        job = part.job
        wanted: list[tuple[ChunkLoad, Placed]] = []
        for load, place in zip(part.loads, part.places, strict=True):
            failure = self._refuse(job, load, place)
            if failure is None and place is not None:
                wanted.append((load, place))
                continue
            if place is not None:
                place.release()
            self._finish(job, load, failure)
        if wanted:
            loads, places = zip(*wanted, strict=True)
            self._read(replace(part, loads=loads, places=places))
        else:
            self._go_on(job, part.after)

    def _refuse(self, job: LoadJob, load: ChunkLoad, place: Placed | None) -> Failure | None:
        if not job.is_wanted(load):
            return Failure.CANCELLED
        if place is None:
            return Failure.MISSING
        is_chunk = 0 < place.file.size_bytes <= self._slot_bytes
        return None if is_chunk else Failure.FOREIGN

    # Reading --------------------------------------------------------------------------------------
    def _read(self, part: _Part) -> None:
        job = part.job
        chunks = [
            WantedChunk(place.file.digest, place.file.size_bytes, place.tiers)
            for place in part.places
            if place is not None
        ]
        left_s = job.end_s - time.monotonic()
        failure = Failure.LATE
        try:
            if left_s > 0:
                reads = self._transfer.start(
                    chunks,
                    partial(self._landed, part),
                    deadline_s=left_s,
                    on_end=partial(self._read_ended, part),
                )
                job.add_reads(reads)
                return
        except QueueFull as error:
            log.warning("kvfs: a load is given up: %s", error)
            failure = Failure.BUSY
        except Unavailable:  # closed meanwhile
            failure = Failure.CANCELLED
        self._release(part)
        self._fail(job, part.loads, failure)
        self._go_on(job, part.after)

    def _landed(self, part: _Part, landed: Landed) -> None:
        """A chunk is whole, in a slot. It is copied by the transfer's thread: another one would
        have to wait for the interpreter first."""
        job, load = part.job, part.loads[landed.chunk]
        failure: Failure | None = Failure.INTERNAL
        try:
            self._go_on(job, part.after)
            with self._copies:
                failure = self._copy(job, load, landed)
        finally:
            landed.give_back()
            self._finish(job, load, failure)

    def _read_ended(self, part: _Part, end: JobEnd) -> None:
        """All was got that is in any place that is known."""
        self._release(part)
        again: list[int] = []
        for number in end.lost:
            failure = self._reason(part, number, end)
            if failure is None:
                again.append(number)
            else:
                self._finish(part.job, part.loads[number], failure)
        if again and not self._bringers.start(self._bring, part, again):
            self._fail(part.job, [part.loads[number] for number in again], Failure.CANCELLED)
        self._go_on(part.job, part.after)

    def _reason(self, part: _Part, number: int, end: JobEnd) -> Failure | None:
        """Why a chunk was not read; None when the node may still bring it here."""
        if end.ending is Ending.LATE:
            return Failure.LATE
        if end.ending is not Ending.DONE or not part.job.is_wanted(part.loads[number]):
            return Failure.CANCELLED
        place = part.places[number]
        assert place is not None
        if not place.is_here and not part.is_last:
            if end.why[number] is Outcome.CORRUPT:
                part.job.doubt(part.loads[number])
            return None
        digest = place.file.digest.hex()
        if place.is_short or end.why[number] is Outcome.CORRUPT:
            log.warning("kvfs: a chunk is corrupt and is recomputed: %s", digest)
            return Failure.CORRUPT
        if end.why[number] is Outcome.FAILED:
            log.warning("kvfs: cannot read chunk %s: %s", digest, place.error or "no tier gives it")
            return Failure.IO_ERROR
        return Failure.MISSING

    def _bring(self, part: _Part, numbers: Sequence[int]) -> None:
        """Have the node bring here what was got from no other place, and read what comes soon; the
        rest is asked for again, after what others want."""
        loads = [part.loads[number] for number in numbers]
        failure: Failure | None = Failure.INTERNAL
        try:
            failure = self._bring_here(part, numbers, loads)
        finally:
            if failure is not None:
                self._fail(part.job, loads, failure)

    def _bring_here(
        self, part: _Part, numbers: Sequence[int], loads: Sequence[ChunkLoad]
    ) -> Failure | None:
        if not part.job.is_wanted(loads[0]):
            return Failure.CANCELLED
        paths = [self._shard.path(part.job.place, load.chunk) for load in loads]
        left_s = part.job.end_s - time.monotonic()
        if left_s <= 0:
            return Failure.LATE
        try:
            opened, coming = self._bringing.bring(paths, left_s)
        except KvfsError as error:
            log.info("kvfs: %d chunks are not brought: %s", len(paths), error)
            return Failure.UNAVAILABLE
        wanted = [part.places[number] for number in numbers]
        places = [self._place_here(file, place) for file, place in zip(opened, wanted, strict=True)]
        ended = [n for n in range(len(loads)) if n not in coming]
        self._begin(
            _Part(
                part.job,
                [loads[n] for n in ended],
                [places[n] for n in ended],
                part.after,
                is_last=True,
            )
        )
        again = [numbers[n] for n in coming]
        if again and not self._bringers.start(self._bring, part, again):
            return Failure.CANCELLED
        return None

    def _place_here(self, file: OpenFile | None, wanted: Placed | None) -> Placed | None:
        """A copy that is here by now; None where it is another file's."""
        if file is None or wanted is None:
            return None
        if (file.size_bytes, file.digest) != (wanted.file.size_bytes, wanted.file.digest):
            file.close()
            return None
        return self._places.place_here(file)

    def _release(self, part: _Part) -> None:
        for place in part.places:
            if place is not None:
                place.release()

    # Copying --------------------------------------------------------------------------------------
    def _copy(self, job: LoadJob, load: ChunkLoad, landed: Landed) -> Failure | None:
        """From a slot into blocks, if it is the right chunk."""
        if not job.is_wanted(load):
            return Failure.CANCELLED
        size_bytes = len(landed.memory)
        wanted = self._shard.header(job.place, load.chunk, None)
        try:
            begin = match_header(landed.memory, size_bytes, wanted)
        except Corrupt as error:
            log.warning("kvfs: a file is not the chunk that its name promises: %s", error)
            return Failure.FOREIGN
        if not job.enter(load):
            return Failure.CANCELLED
        slot = landed.slot
        assert isinstance(slot, Slot)
        try:
            self._copier.scatter(
                self._shard.layouts[load.chunk.group],
                load.block_ids,
                load.rows,
                self._shard.blocks(load.chunk.group),
                slot.tensor[begin:size_bytes],
                job.after,
            )
        finally:
            job.leave()
        self._counters.add("loaded_bytes", size_bytes)
        return None

    def _fail(self, job: LoadJob, loads: Sequence[ChunkLoad], failure: Failure) -> None:
        for load in loads:
            self._finish(job, load, failure)

    def _finish(self, job: LoadJob, load: ChunkLoad, failure: Failure | None) -> None:
        is_new, is_last = job.finish_chunk(load, failure)
        if not is_new:
            return
        if failure is None:
            self._counters.add("loaded_chunks")
        elif failure is not Failure.CANCELLED:
            self._counters.add(f"failed_loads.{failure}")
        if is_last:
            self._ended.set()
