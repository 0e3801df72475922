"""Loads: chunk files into the engine's blocks, on threads, each request to one outcome.

The rule that keeps the engine's memory right: nothing is copied into a block after its request's
outcome was given. So a load that is late or cancelled shuts its gate first, and its outcome waits
for copies that are inside. A read that hangs in the kernel holds only a slot.
"""

import enum
import logging
import threading
import time
from dataclasses import dataclass

from gpu_bridge.complaints import Complaints
from gpu_bridge.copies import Copier, Mark
from gpu_bridge.counters import Counters
from gpu_bridge.link import Link
from gpu_bridge.plan import ChunkLoad, Place, RequestLoad
from gpu_bridge.shard import Shard
from gpu_bridge.staging import Slot, StagingPool
from gpu_bridge.workers import Workers
from kvfs.chunk import match_header
from kvfs.client_files import OpenFile, RemoteFile
from kvfs.config import BRIDGE_OPEN_BATCH
from kvfs.errors import Corrupt, Unavailable
from kvfs.file_io import read_verified
from kvfs.located import LocatedFile
from kvfs.remote import RemoteReader

log = logging.getLogger(__name__)
Found = OpenFile | RemoteFile | None


class Failure(enum.StrEnum):
    """Why a chunk was not loaded."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"  # a sound file, but not the chunk that its name promises
    UNAVAILABLE = "unavailable"
    NO_SLOT = "no_slot"
    LATE = "late"
    IO_ERROR = "io_error"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """A request's load is over. Everything before the first failed chunk is in its blocks; the
    blocks from there on are `failed_blocks`. `suspects`: hashes of chunks that must be written
    anew."""

    request_id: str
    failed_blocks: frozenset[int]
    suspects: frozenset[bytes]

    @property
    def is_whole(self) -> bool:
        return not self.failed_blocks


class _Job:
    """One request's load. Its lock guards all that follows it."""

    def __init__(
        self, place: Place, request: RequestLoad, after: Mark | None, deadline_s: float
    ) -> None:
        self.place = place
        self.request = request
        self.after = after
        self.began_s = time.monotonic()
        self.end_s = self.began_s + deadline_s
        self._lock = threading.Lock()
        self._is_shut = False
        self._copying = 0
        self._left = len(request.chunks)
        self._failed_token: int | None = None
        self._suspects: set[bytes] = set()

    def enter(self, chunk: ChunkLoad) -> bool:
        """Begin a copy into blocks; False when it would come too late, or behind a failure."""
        with self._lock:
            if self._is_shut or self._is_behind_failure(chunk):
                return False
            self._copying += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._copying -= 1

    def is_wanted(self, chunk: ChunkLoad) -> bool:
        with self._lock:
            return not self._is_shut and not self._is_behind_failure(chunk)

    def finish_chunk(self, chunk: ChunkLoad, failure: Failure | None) -> bool:
        """Whether it was the last."""
        with self._lock:
            self._left -= 1
            if failure is not None:
                self._fail_from(chunk.chunk.token_start)
            if failure in (Failure.CORRUPT, Failure.FOREIGN):
                self._suspects.add(chunk.chunk.hash)
            return self._left == 0

    def shut(self) -> bool:
        """No more copies; True when this call did it and chunks were left."""
        with self._lock:
            did = not self._is_shut and self._left > 0
            self._is_shut = True
            if did:
                self._fail_from(0)
            return did

    def outcome(self) -> LoadOutcome | None:
        """The outcome, once nothing more will be copied."""
        with self._lock:
            if self._copying or (self._left and not self._is_shut):
                return None
            start = self._failed_token
            failed = [
                block
                for load in self.request.chunks
                if start is not None and load.chunk.token_start >= start
                for block in load.block_ids
            ]
            return LoadOutcome(
                self.request.request_id, frozenset(failed), frozenset(self._suspects)
            )

    def _fail_from(self, token: int) -> None:
        known = self._failed_token
        self._failed_token = token if known is None else min(token, known)

    def _is_behind_failure(self, chunk: ChunkLoad) -> bool:
        return self._failed_token is not None and chunk.chunk.token_start >= self._failed_token


def _nearest(file: LocatedFile | None) -> Found:
    """The copy here, or that of another node."""
    if file is None:
        return None
    if file.fd is not None:
        return OpenFile(file.fd, file.size_bytes, file.digest)
    if file.ticket:
        return RemoteFile(file.size_bytes, file.digest, file.address, file.ticket)
    return None


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
        self._shard = shard
        self._link = link
        self._complaints = complaints
        self._staging = staging
        self._copier = copier
        self._counters = counters
        self._deadline_s = deadline_s
        self._jobs: dict[str, _Job] = {}
        self._workers = Workers(threads, "kvfs-load")
        self._remote = RemoteReader()
        self._reading = threading.Semaphore(max(1, threads // 2))
        self._ended = threading.Event()

    def submit(self, place: Place, request: RequestLoad, after: Mark | None) -> None:
        """Begin to load. The blocks are the loader's until the outcome is taken."""
        assert request.request_id not in self._jobs
        job = _Job(place, request, after, self._deadline_s)
        self._jobs[request.request_id] = job
        self._workers.start(self._open, job, 0)

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
        return outcomes

    def close(self) -> None:
        """Give up what is under way. Its outcomes are never taken."""
        for job in self._jobs.values():
            job.shut()
        self._remote.close()
        self._workers.close()

    # On the threads -------------------------------------------------------------------------------
    def _open(self, job: _Job, first: int) -> None:
        """Open the next chunks and hand each to a thread. Behind the first of them queues the
        opening of those after them: it goes on while these are read, and few are open at once."""
        chunks = job.request.chunks[first : first + BRIDGE_OPEN_BATCH]
        if not job.is_wanted(chunks[0]):
            self._fail(job, first, Failure.CANCELLED)
            return
        paths = [self._shard.path(job.place, load.chunk) for load in chunks]
        located = self._link.ask(lambda client: client.locate(paths))
        if located is None:
            self._fail(job, first, Failure.UNAVAILABLE)
            return
        opened = map(_nearest, located.files)
        after = first + len(chunks)
        for load, file in zip(chunks, opened, strict=True):
            if not self._workers.start(self._load, job, load, file):
                self._finish(job, load, Failure.CANCELLED)
                if file is not None:
                    file.close()
            has_more = load is chunks[0] and after < len(job.request.chunks)
            if has_more and not self._workers.start(self._open, job, after):
                self._fail(job, after, Failure.CANCELLED)

    def _load(self, job: _Job, load: ChunkLoad, file: Found) -> None:
        failure: Failure | None = Failure.INTERNAL
        try:
            failure = self._read_and_copy(job, load, file)
        finally:
            if file is not None:
                file.close()
            self._finish(job, load, failure)

    def _read_and_copy(self, job: _Job, load: ChunkLoad, file: Found) -> Failure | None:
        if not job.is_wanted(load):
            return Failure.CANCELLED
        if file is None:
            return Failure.MISSING
        if not 0 < file.size_bytes <= self._staging.slot_bytes:
            return Failure.FOREIGN
        with self._staging.slot(job.end_s - time.monotonic()) as slot:
            if slot is None:
                return Failure.NO_SLOT
            if not self._reading.acquire(timeout=max(0.0, job.end_s - time.monotonic())):
                return Failure.LATE
            try:
                failure = self._read(job, load, file, slot)
            except OSError as error:
                log.warning("kvfs: cannot read chunk %s: %s", file.digest.hex(), error)
                return Failure.IO_ERROR
            finally:
                self._reading.release()
            return failure or self._copy(job, load, file, slot)

    def _read(
        self, job: _Job, load: ChunkLoad, file: OpenFile | RemoteFile, slot: Slot
    ) -> Failure | None:
        """Fill a slot with a file's bytes, checked. At most half of the threads read at a time: a
        disk that all share would be done with all at once, and idle while all copy."""
        if isinstance(file, RemoteFile):
            return self._read_remote(job, load, file, slot)
        try:
            read_verified(file.fd, slot.memory, file.size_bytes, file.digest)
        except Corrupt as error:
            log.warning("kvfs: a chunk is corrupt and is recomputed: %s", error)
            self._complaints.complain(file.digest)
            return Failure.CORRUPT
        return None

    def _read_remote(
        self, job: _Job, load: ChunkLoad, file: RemoteFile, slot: Slot
    ) -> Failure | None:
        """As `_read`, from another node; where that fails, this one may still bring the file."""
        now_s = time.monotonic()
        try:
            self._remote.read_verified(file, slot.memory, now_s + (job.end_s - now_s) / 2)
        except (Unavailable, Corrupt) as error:
            log.info("kvfs: a chunk comes another way: %s", error)
        else:
            self._counters.add("loaded_remote_bytes", file.size_bytes)
            return None
        path = self._shard.path(job.place, load.chunk)
        opened = self._link.ask(lambda client: client.open([path]))
        if opened is None:
            return Failure.UNAVAILABLE
        if opened[0] is None:
            return Failure.MISSING
        with opened[0] as local:
            if (local.size_bytes, local.digest) != (file.size_bytes, file.digest):
                return Failure.MISSING  # another file by now
            return self._read(job, load, local, slot)

    def _copy(
        self, job: _Job, load: ChunkLoad, file: OpenFile | RemoteFile, slot: Slot
    ) -> Failure | None:
        """From a slot into blocks, if it is the right chunk."""
        data = slot.memory[: file.size_bytes]
        wanted = self._shard.header(job.place, load.chunk, None)
        try:
            begin = match_header(data, file.size_bytes, wanted)
        except Corrupt as error:
            log.warning("kvfs: a file is not the chunk that its name promises: %s", error)
            return Failure.FOREIGN
        if not job.enter(load):
            return Failure.CANCELLED
        try:
            self._copier.scatter(
                self._shard.layouts[load.chunk.group],
                load.block_ids,
                load.rows,
                self._shard.blocks(load.chunk.group),
                slot.tensor[begin : file.size_bytes],
                job.after,
            )
        finally:
            job.leave()
        self._counters.add("loaded_bytes", file.size_bytes)
        return None

    def _fail(self, job: _Job, first: int, failure: Failure) -> None:
        for load in job.request.chunks[first:]:
            self._finish(job, load, failure)

    def _finish(self, job: _Job, load: ChunkLoad, failure: Failure | None) -> None:
        if failure is None:
            self._counters.add("loaded_chunks")
        elif failure is not Failure.CANCELLED:
            self._counters.add(f"failed_loads.{failure}")
        if job.finish_chunk(load, failure):
            self._ended.set()
