"""One request's load: what of it is still wanted, when blocks may be written, and its outcome.

The rule that keeps the engine's memory right: nothing is copied into a block after its request's
outcome was given. So a load that is late or cancelled shuts its gate first, and its outcome waits
for copies that are inside.
"""

import enum
import threading
import time
from dataclasses import dataclass

from gpu_bridge.copies import Mark
from gpu_bridge.plan import ChunkLoad, Place, RequestLoad
from kvfs.transfer.job import Job


class Failure(enum.StrEnum):
    """Why a chunk was not loaded."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"  # a sound file, but not the chunk that its name promises
    UNAVAILABLE = "unavailable"
    BUSY = "busy"  # more is wanted at the same time than can be kept in mind
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


class LoadJob:
    """See the module's docstring. Its lock guards all that follows it."""

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
        self._left = {_key(load) for load in request.chunks}
        self._opened = 0  # chunks from the start whose opening has begun
        self._reads: list[Job] = []
        self._failed_token: int | None = None
        self._suspects: set[bytes] = set()
        self._doubted: set[tuple[int, int]] = set()

    def begin_open(self, first: int) -> bool:
        """Whether the chunks from one on are to be opened now; True once for each."""
        with self._lock:
            is_next = self._opened <= first < len(self.request.chunks)
            if is_next:
                self._opened = first + 1
            return is_next

    def add_reads(self, reads: Job) -> None:
        """Have reads end when the load is shut."""
        with self._lock:
            self._reads.append(reads)
            is_shut = self._is_shut
        if is_shut:
            reads.cancel()

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

    def doubt(self, chunk: ChunkLoad) -> None:
        """Some place had wrong bytes for it: if no other has it, it must be written anew."""
        with self._lock:
            self._doubted.add(_key(chunk))

    def finish_chunk(self, chunk: ChunkLoad, failure: Failure | None) -> tuple[bool, bool]:
        """Whether this was not said of the chunk before, which else changes nothing, and whether it
        was the last."""
        with self._lock:
            if _key(chunk) not in self._left:
                return False, False
            self._left.discard(_key(chunk))
            if failure is not None:
                self._fail_from(chunk.chunk.token_start)
            is_doubted = _key(chunk) in self._doubted and failure not in (None, Failure.CANCELLED)
            if is_doubted or failure in (Failure.CORRUPT, Failure.FOREIGN):
                self._suspects.add(chunk.chunk.hash)
            return True, not self._left

    def shut(self) -> bool:
        """No more copies; True when this call did it and chunks were left."""
        with self._lock:
            did = not self._is_shut and bool(self._left)
            self._is_shut = True
            if did:
                self._fail_from(0)
            reads, self._reads = self._reads, []
        for one in reads:
            one.cancel()
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


def _key(load: ChunkLoad) -> tuple[int, int]:
    """A chunk's own, within its request."""
    return load.chunk.token_start, load.chunk.group
