"""Saves: the engine's blocks into chunk files, behind the engine's back.

A save has two ends that the engine hears of. *Settled*: its blocks may be reused, since they were
copied to a slot or will not be. *Ended*: the chunk is published, or it is not and never will be. A
save that must settle before its copy began is given up; one whose copy is under way when its blocks
are about to be reused is finished and thrown away. Nothing here fails a request.
"""

import enum
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from gpu_bridge.copies import Copier, Mark
from gpu_bridge.counters import Counters
from gpu_bridge.link import Link, is_chunk_size
from gpu_bridge.plan import ChunkSave, Place
from gpu_bridge.shard import Shard
from gpu_bridge.staging import Slot, StagingPool
from kvfs.chunk import ChunkHeader, chunk_info, encode_header, with_digest
from kvfs.client import Client
from kvfs.client_files import Staged, StagedFile
from kvfs.config import BRIDGE_SAVES_MAX, BRIDGE_SETTLE_DEADLINE_S, BRIDGE_SLOT_DEADLINE_S
from kvfs.digest import digest_of
from kvfs.errors import OutOfSpace
from kvfs.file_io import write_from
from kvfs.hashers import in_background
from kvfs.workers import Workers

log = logging.getLogger(__name__)

_BATCH = 16  # chunks that are staged and published together


class Drop(enum.StrEnum):
    """Why a chunk was not saved."""

    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    NO_SPACE = "no_space"
    NO_SLOT = "no_slot"
    FENCED = "fenced"  # its blocks were needed before they were copied
    IO_ERROR = "io_error"
    CLOSED = "closed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class SaveEnd:
    """A save is over. `is_stored`: the chunk is in the store, by this save or before it."""

    job: int
    is_stored: bool


@dataclass(frozen=True, slots=True)
class _Draft:
    """The file that a chunk is to become: its header, as yet without the payload's digest."""

    header: ChunkHeader
    encoded: bytes
    size_bytes: int

    @property
    def begin(self) -> int:
        """Of the payload."""
        return len(self.encoded)


class _Job:
    """One chunk to save."""

    def __init__(self, place: Place, save: ChunkSave, after: Mark | None) -> None:
        self.place = place
        self.save = save
        self.after = after
        self.end_s = time.monotonic() + BRIDGE_SETTLE_DEADLINE_S
        self.settled = threading.Event()
        self._lock = threading.Lock()

    def settle(self) -> bool:
        """Settle, once; whether this call did it. Of a copier and of someone who gives the save up
        one comes first: if it is the other, what was copied is void."""
        with self._lock:
            was_settled = self.settled.is_set()
            self.settled.set()
        return not was_settled


class Saver:
    """Takes chunks and reports their ends. `submit`, `settle`, `is_settled`, `take_settled` and
    `take_ends` are called by the engine's thread; only `settle` waits, and no longer than it is
    told."""

    def __init__(
        self,
        shard: Shard,
        link: Link,
        staging: StagingPool,
        copier: Copier,
        counters: Counters,
        *,
        threads: int,
    ) -> None:
        self._shard = shard
        self._link = link
        self._staging = staging
        self._copier = copier
        self._counters = counters
        self._lock = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._settled: list[int] = []
        self._ends: list[SaveEnd] = []
        self._workers = Workers("kvfs-save", threads)
        self._spare_slots = staging.count // 2  # stay with the loads

    def submit(self, place: Place, saves: Sequence[ChunkSave], after: Mark | None) -> None:
        """Begin to save. The blocks must keep their content until their save settles."""
        jobs = [_Job(place, save, after) for save in saves]
        with self._lock:
            room = max(0, BRIDGE_SAVES_MAX - len(self._jobs))
            self._jobs |= {job.save.job: job for job in jobs}
        for start in range(0, min(room, len(jobs)), _BATCH):
            self._workers.start(self._begin, jobs[start : min(room, start + _BATCH)])
        for job in jobs[room:]:
            self._drop(job, Drop.QUEUE_FULL)

    def settle(self, jobs: Iterable[int], deadline_s: float) -> None:
        """Return when the blocks of these saves may be written: wait for their copies until the
        deadline, then give up those that are left."""
        end_s = time.monotonic() + deadline_s
        for number in jobs:
            with self._lock:
                job = self._jobs.get(number)
            if job is not None and not job.settled.wait(max(0.0, end_s - time.monotonic())):
                self._note_settled(job)

    def is_settled(self, number: int) -> bool:
        with self._lock:
            job = self._jobs.get(number)
        return job is None or job.settled.is_set()

    def take_settled(self) -> list[int]:
        """Saves that settled since the last call. One that took too long is given up here, so that
        no request keeps its blocks for the sake of a node or disk that hangs."""
        now_s = time.monotonic()
        with self._lock:
            late = [job for job in self._jobs.values() if now_s > job.end_s]
        for job in late:
            self._note_settled(job)
        with self._lock:
            taken, self._settled = self._settled, []
        return taken

    def take_ends(self) -> list[SaveEnd]:
        """Saves that ended since the last call."""
        with self._lock:
            taken, self._ends = self._ends, []
        return taken

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything submitted has ended; False at the deadline."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._jobs, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Finish what can be finished in time, drop the rest."""
        if not self.flush(deadline_s):
            log.warning("kvfs: %d chunks were not saved before the end", len(self._jobs))
        self._workers.close()
        with self._lock:
            left = list(self._jobs.values())
        for job in left:
            job.settle()

    # On the threads -------------------------------------------------------------------------------
    def _begin(self, jobs: Sequence[_Job]) -> None:
        try:
            self._hand_out(jobs)
        except BaseException:
            for job in jobs:
                self._drop(job, Drop.INTERNAL)
            raise

    def _hand_out(self, jobs: Sequence[_Job]) -> None:
        """Leave out what the store has, make files for the rest, and hand each to a thread."""
        jobs = self._without_known(self._without_given_up(jobs))
        if not jobs:
            return
        drafts = [self._draft(job) for job in jobs]
        sizes = [draft.size_bytes for draft in drafts]
        try:
            staged = self._link.ask(lambda client: client.stage(sizes))
        except OutOfSpace:
            staged, reason = None, Drop.NO_SPACE
        else:
            reason = Drop.UNAVAILABLE
        if staged is None:
            for job in jobs:
                self._drop(job, reason)
            return
        batch = _Batch(len(jobs))
        for job, draft, file in zip(jobs, drafts, staged, strict=True):
            if not self._workers.start(self._save, job, draft, file, batch):
                os.close(file.fd)
                if batch.add(job, file, Drop.CLOSED):
                    self._finish(batch)

    def _without_given_up(self, jobs: Sequence[_Job]) -> list[_Job]:
        left = []
        for job in jobs:
            if job.settled.is_set():
                self._drop(job, Drop.FENCED)
            else:
                left.append(job)
        return left

    def _without_known(self, jobs: Sequence[_Job]) -> list[_Job]:
        asked = [job for job in jobs if not job.save.is_replacing]
        paths = [self._shard.path(job.place, job.save.chunk) for job in asked]
        sizes = self._link.ask(lambda client: client.lookup(paths)) if paths else []
        if sizes is None:
            for job in jobs:
                self._drop(job, Drop.UNAVAILABLE)
            return []
        known = {
            job.save.job for job, size in zip(asked, sizes, strict=True) if is_chunk_size(size)
        }
        for job in asked:
            if job.save.job in known:
                self._end(job, is_stored=True, counts={"known_chunks": 1})
        return [job for job in jobs if job.save.job not in known]

    def _draft(self, job: _Job) -> _Draft:
        chunk = job.save.chunk
        header = self._shard.header(job.place, chunk, job.save.token_ids)
        encoded = encode_header(header)  # once: with all token ids it takes a while
        return _Draft(header, encoded, len(encoded) + self._shard.payload_bytes(chunk.group))

    def _save(self, job: _Job, draft: _Draft, file: Staged, batch: "_Batch") -> None:
        ready: StagedFile | Drop = Drop.INTERNAL
        try:
            ready = self._copy_and_write(job, draft, file)
        finally:
            os.close(file.fd)
            self._note_settled(job)
            if batch.add(job, file, ready):
                self._finish(batch)

    def _copy_and_write(self, job: _Job, draft: _Draft, file: Staged) -> StagedFile | Drop:
        if job.settled.is_set():
            return Drop.FENCED
        with self._staging.slot(BRIDGE_SLOT_DEADLINE_S, spare=self._spare_slots) as slot:
            if slot is None:
                return Drop.NO_SLOT
            if job.settled.is_set():
                return Drop.FENCED
            began_s = time.monotonic()
            self._copier.gather(
                self._shard.layouts[job.save.chunk.group],
                job.save.block_ids,
                slot.tensor[draft.begin : draft.size_bytes],
                job.after,
            )
            if not self._note_settled(job):  # the blocks may have been written meanwhile
                return Drop.FENCED
            try:
                return self._write(job, draft, file, slot)
            except OSError as error:
                log.warning("kvfs: cannot write a chunk: %s", error)
                return Drop.IO_ERROR
            finally:
                self._counters.add("save_seconds", time.monotonic() - began_s)

    def _write(self, job: _Job, draft: _Draft, file: Staged, slot: Slot) -> StagedFile:
        """Write the payload while its digests are made, and then the header that needs one."""
        begin, end = draft.begin, draft.size_bytes
        sealing = in_background(_seal, draft, slot)
        try:
            write_from(file.fd, slot.memory[begin:end], begin)
        finally:
            wait([sealing])
        digest = sealing.result()
        write_from(file.fd, slot.memory[:begin])
        path = self._shard.path(job.place, job.save.chunk)
        return StagedFile(file.token, path, digest, end, chunk_info(draft.header))

    def _finish(self, batch: "_Batch") -> None:
        """Publish what is ready, discard the rest, and report the ends of all."""
        try:
            self._discard(batch)
            self._publish(batch)
        finally:
            for job in (*(job for job, _ in batch.ready), *(job for job, _, _ in batch.void)):
                self._drop(job, Drop.INTERNAL)  # those whose end is still open

    def _discard(self, batch: "_Batch") -> None:
        if batch.void:
            tokens = [token for _, token, _ in batch.void]
            self._link.ask(lambda client: client.discard(tokens))
        for job, _, reason in batch.void:
            self._drop(job, reason)

    def _publish(self, batch: "_Batch") -> None:
        if not batch.ready:
            return
        files = [file for _, file in batch.ready]
        reason = Drop.UNAVAILABLE
        try:
            published = self._link.ask(lambda client: _publish(client, files))
        except OutOfSpace:
            published, reason = None, Drop.NO_SPACE
        for job, file in batch.ready:
            if published is None:
                self._drop(job, reason)
            else:
                counts = {"saved_chunks": 1, "saved_bytes": file.size_bytes}
                self._end(job, is_stored=True, counts=counts)

    # Ends -----------------------------------------------------------------------------------------
    def _note_settled(self, job: _Job) -> bool:
        """Settle and report it, once; whether this call did it."""
        if not job.settle():
            return False
        with self._lock:
            self._settled.append(job.save.job)
        return True

    def _drop(self, job: _Job, reason: Drop) -> None:
        self._end(job, is_stored=False, counts={f"dropped_saves.{reason}": 1})

    def _end(self, job: _Job, *, is_stored: bool, counts: Mapping[str, int]) -> None:
        """Count and report the end, once."""
        job.settle()
        with self._lock:
            if self._jobs.pop(job.save.job, None) is None:
                return
            for name, amount in counts.items():
                self._counters.add(name, amount)
            self._ends.append(SaveEnd(job.save.job, is_stored))
            self._lock.notify_all()


def _seal(draft: _Draft, slot: Slot) -> bytes:
    """Put the header before the payload; the digest of the whole."""
    payload = slot.memory[draft.begin : draft.size_bytes]
    slot.memory[: draft.begin] = with_digest(draft.encoded, digest_of(payload))
    return digest_of(slot.memory[: draft.size_bytes])


def _publish(client: Client, files: Sequence[StagedFile]) -> bool:
    client.publish(files)
    return True


class _Batch:
    """Collects the files of one batch; thread-safe until it is full, then the last one's alone."""

    def __init__(self, count: int) -> None:
        self.ready: list[tuple[_Job, StagedFile]] = []
        self.void: list[tuple[_Job, int, Drop]] = []  # with the token to discard
        self._left = count
        self._lock = threading.Lock()

    def add(self, job: _Job, file: Staged, ready: StagedFile | Drop) -> bool:
        """Whether this was the last."""
        with self._lock:
            if isinstance(ready, StagedFile):
                self.ready.append((job, ready))
            else:
                self.void.append((job, file.token, ready))
            self._left -= 1
            return self._left == 0
