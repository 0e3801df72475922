"""What every tier promises: sync calls, for as many threads as a caller has.

- Bytes land in the caller's buffer, exactly as many as it holds, with one copy at most on the way.
  The buffer is the caller's before, during and after; it is written to until a call returns or
  raises, never later, also when the tier hangs. After an error or a miss its content is of no use.
- A call ends at its deadline, but where the kernel waits for a local device.
- A blob is here whole or not at all. A miss is a value: `False`, or `None` for a size.
- What goes wrong: `TierTrouble` (the tier failed; another may have the blob), `TierStalled` of it
  (it did not answer in time), `TierBusy` (its limits are used up), `Corrupt` (what was to be put
  is not what its digest says), `OutOfSpace`, and `InvalidInput` for what could never be asked.
- Digests of reads are not checked here: who has the whole blob does that, in its own buffer, and
  says so with `recheck` when they differ.
- Nothing is tried twice: who has several tiers asks the next one.

While a tier is down (`kvfs.health`), questions and writes are refused at once. Reads are not: who
reads decides, with the same state machine, which tier is tried when (`kvfs.schedule`).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import xxhash

from kvfs.config import (
    CHUNK_BYTES_MAX,
    TIER_PIECE_BYTES,
    TIER_QUESTIONS_MAX,
    TIER_STALL_S_MIN,
    TIER_TROUBLE_ROW,
)
from kvfs.errors import InvalidInput, TierBusy, TierStalled, TierTrouble
from kvfs.file_io import allocate
from kvfs.health import Health, HealthState
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.settings.words import TierKind, TierLimits
from kvfs.tiers.counters import TierCounters

Source = int | memoryview  # an open file, read from its start, or bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the file system that a tier lies on, whoever uses it."""

    total_bytes: int
    free_bytes: int


class Use(Enum):
    """What a call does; each kind has its own limit, so that none waits for another kind."""

    READ = "reads"
    ASK = "questions"
    WRITE = "writes"


@dataclass(slots=True)
class _Row:
    """Calls of one kind that failed since one of them did not."""

    failures: int = 0
    said: str = ""  # by the last of them


class Tier(ABC):
    """A place that holds blobs, which can be read."""

    def __init__(self, name: str, kind: TierKind, limits: TierLimits) -> None:
        self.name = name
        self.kind = kind
        self.limits = limits
        self._health = Health()
        self._counters = TierCounters()
        self._rows = {use: _Row() for use in Use}
        self._lock = threading.Lock()  # for these three
        self._slots = {
            Use.READ: threading.Semaphore(limits.reads_max),
            Use.ASK: threading.Semaphore(TIER_QUESTIONS_MAX),
            Use.WRITE: threading.Semaphore(limits.writes_max),
        }

    # What callers use -----------------------------------------------------------------------------
    def read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, deadline_s: float | None = None
    ) -> bool:
        """Fill a buffer from a place in a blob; False when the tier has it not, or not so long.

        `deadline_s`: how long this may take; the tier's own deadline is the longest.
        """
        view = _checked_range(digest, offset_bytes, buffer)
        with self._call(Use.READ, deadline_s) as (begin_s, end_s):
            is_here = self._read_into(digest, offset_bytes, view, end_s)
            took_s = time.monotonic() - begin_s
        if is_here:
            self._count(reads=1, read_bytes=len(view), read_s=took_s)
        else:
            self._count(misses=1)
        return is_here

    def has(self, digests: Sequence[bytes], deadline_s: float | None = None) -> list[int | None]:
        """The size of each blob that is here; None for the others."""
        for digest in digests:
            _check_digest(digest)
        if not digests:
            return []
        with self._call(Use.ASK, deadline_s) as (_, end_s):
            sizes = self._has(digests, end_s)
        assert len(sizes) == len(digests)
        self._count(questions=1)
        return sizes

    def recheck(self, digest: bytes, deadline_s: float | None = None) -> bool:
        """A reader found that bytes which came from here do not have their digest: count it, and
        read the blob whole, where that can be, since it may have been the way to the reader.
        Whether it is here and right; one that is wrong is taken away."""
        _check_digest(digest)
        self._count(corrupt=1)
        with self._call(Use.WRITE, deadline_s) as (_, end_s):
            return self._recheck(digest, end_s)

    @property
    def counters(self) -> TierCounters:
        """As they are now."""
        with self._lock:
            return replace(self._counters)

    @property
    def health(self) -> HealthState:
        with self._lock:
            return self._health.state(time.monotonic_ns())

    @property
    def trouble(self) -> str:
        """What the last call said that failed, while the tier is not up, or one kind of call does
        nothing but fail: a bucket that is not there says of every blob that it has it not, and is
        up by that. Empty while all is well."""
        with self._lock:
            is_up = self._health.state(time.monotonic_ns()) is HealthState.UP
            least = TIER_TROUBLE_ROW if is_up else 1
            rows = [row for row in self._rows.values() if row.failures >= least]
            return max(rows, key=lambda row: row.failures).said if rows else ""

    def close(self) -> None:  # noqa: B027  (most have nothing to let go)
        """Let go what the tier holds open. Calls under way fail or end; there may be none later."""

    # What a tier does -----------------------------------------------------------------------------
    @abstractmethod
    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool: ...

    @abstractmethod
    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]: ...

    @abstractmethod
    def _recheck(self, digest: bytes, end_s: float) -> bool: ...

    # The frame of every call ----------------------------------------------------------------------
    @contextmanager
    def _call(self, use: Use, deadline_s: float | None) -> Iterator[tuple[float, float]]:
        """Holds a slot; gives when the call began and must end, by the monotonic clock; counts a
        fault of the tier, and tells its health how the call went."""
        begin_s = time.monotonic()
        end_s = begin_s + self._patience_s(use, deadline_s)
        self._admit(use, end_s)
        self._count(in_flight=int(use is Use.READ))
        began_ns = time.monotonic_ns()
        try:
            yield begin_s, end_s
        except TierStalled as error:
            self._end(use, failures=1, stalls=1)
            with self._lock:
                self._note_row(use, error.reason)
                now_ns = time.monotonic_ns()
                if now_ns - began_ns >= TIER_STALL_S_MIN * 1e9:
                    self._health.note_stalled(began_ns, now_ns)
                else:
                    self._health.note_nothing()
            raise
        except (TierTrouble, OSError) as error:
            self._end(use, failures=1)
            said = _shown(error) if isinstance(error, OSError) else error.reason
            with self._lock:
                self._note_row(use, said)
                self._health.note_failed(time.monotonic_ns())
            if isinstance(error, OSError):
                raise TierTrouble(self.name, said) from error
            raise
        except BaseException:
            self._end(use)
            with self._lock:
                self._health.note_nothing()
            raise
        self._end(use)
        with self._lock:
            self._rows[use].failures = 0
            self._health.note_landed(time.monotonic_ns())

    def _note_row(self, use: Use, said: str) -> None:
        row = self._rows[use]
        row.failures += 1
        row.said = said

    def _patience_s(self, use: Use, deadline_s: float | None) -> float:
        own_s = self.limits.write_deadline_s if use is Use.WRITE else self.limits.read_deadline_s
        if deadline_s is None:
            return own_s
        if not deadline_s > 0:
            raise InvalidInput("deadline", f"{deadline_s!r} leaves no time")
        return min(own_s, deadline_s)

    def _admit(self, use: Use, end_s: float) -> None:
        if use is not Use.READ:
            with self._lock:
                may_ask = self._health.take(time.monotonic_ns())
            if not may_ask:
                self._count(refusals=1)
                raise TierTrouble(self.name, "is down, and left alone for a while")
        if not self._slots[use].acquire(timeout=max(0.0, end_s - time.monotonic())):
            self._count(refusals=1)
            with self._lock:
                self._health.note_nothing()
            raise TierBusy(self.name, use.value)

    def _end(self, use: Use, **changes: int) -> None:
        self._slots[use].release()
        self._count(in_flight=-int(use is Use.READ), **changes)

    def _count(self, **changes: float) -> None:
        counters = self._counters
        with self._lock:
            for key, change in changes.items():
                setattr(counters, key, getattr(counters, key) + change)


class WritableTier(Tier):
    """A tier into which blobs are put, and which knows all that it has."""

    def put(
        self, digest: bytes, source: Source, size_bytes: int, deadline_s: float | None = None
    ) -> None:
        """Store a blob, from the start of an open file or from memory that does not change
        meanwhile. It is seen whole when this returns, and never in part; after an error it may be
        there, whole, or not. One that is here already is stored anew.

        Raises `Corrupt` when the source has other bytes than the digest says, and `OutOfSpace`.
        """
        _check_digest(digest)
        if not 0 <= size_bytes <= CHUNK_BYTES_MAX:
            raise InvalidInput("size", f"{size_bytes} is not in 0..{CHUNK_BYTES_MAX}")
        if isinstance(source, memoryview):
            source = _checked_memory(source)
            if len(source) != size_bytes:
                raise InvalidInput("buffer", f"has {len(source)} bytes, not {size_bytes}")
        with self._call(Use.WRITE, deadline_s) as (begin_s, end_s):
            self._put(digest, source, size_bytes, end_s)
            took_s = time.monotonic() - begin_s
        self._count(puts=1, put_bytes=size_bytes, put_s=took_s)

    def remove(self, digest: bytes, deadline_s: float | None = None) -> None:
        """Take a blob away; one that is not here is fine."""
        _check_digest(digest)
        with self._call(Use.WRITE, deadline_s) as (_, end_s):
            self._remove(digest, end_s)
        self._count(removes=1)

    def scan(self, deadline_s: float | None = None) -> Iterator[list[tuple[bytes, int]]]:
        """Every blob as (digest, size in bytes), in batches, each of which may take as long as the
        deadline. Those that come or go meanwhile may be among them or not."""
        step = self._begin_scan()
        while True:
            with self._call(Use.ASK, deadline_s) as (_, end_s):
                batch = step(end_s)
            self._count(questions=1)
            if batch is None:
                return
            yield batch

    def capacity(self, deadline_s: float | None = None) -> Capacity | None:
        """How much room there is; None where nobody can say."""
        with self._call(Use.ASK, deadline_s) as (_, end_s):
            capacity = self._capacity(end_s)
        self._count(questions=1)
        return capacity

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        is_right = self._digest_of(digest, end_s) == digest
        if not is_right:
            self._set_aside(digest, end_s)
        return is_right

    def _digest_of(self, digest: bytes, end_s: float) -> bytes | None:
        """The digest of what lies under one; None for nothing."""
        size_bytes = self._has([digest], end_s)[0]
        if size_bytes is None:
            return None
        hashing = xxhash.xxh3_128()
        buffer = allocate(min(size_bytes, TIER_PIECE_BYTES))
        for offset in range(0, size_bytes, TIER_PIECE_BYTES):
            piece = buffer[: min(TIER_PIECE_BYTES, size_bytes - offset)]
            check_time(end_s, self.name)
            if not self._read_into(digest, offset, piece, end_s):
                return None
            hashing.update(piece)
        return hashing.digest()

    @abstractmethod
    def _put(self, digest: bytes, source: Source, size_bytes: int, end_s: float) -> None: ...

    @abstractmethod
    def _remove(self, digest: bytes, end_s: float) -> None: ...

    @abstractmethod
    def _begin_scan(self) -> Callable[[float], list[tuple[bytes, int]] | None]:
        """A function that gives the next batch by a time; None after the last."""

    @abstractmethod
    def _capacity(self, end_s: float) -> Capacity | None: ...

    def _set_aside(self, digest: bytes, end_s: float) -> None:
        """Take a blob away that has wrong bytes."""
        self._remove(digest, end_s)


def check_time(end_s: float, tier: str) -> float:
    """The time until an end, which is more than 0; raises `TierStalled` when it is over."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TierStalled(tier, "did not end in time")
    return left_s


def _checked_range(digest: bytes, offset_bytes: int, buffer: memoryview) -> memoryview:
    _check_digest(digest)
    if type(offset_bytes) is not int or offset_bytes < 0:
        raise InvalidInput("offset", f"{offset_bytes!r:.40} is no place in a blob")
    view = _checked_memory(buffer)
    if view.readonly or not view:
        raise InvalidInput("buffer", "must be writable, and not empty")
    return view


def _checked_memory(memory: memoryview) -> memoryview:
    if not memory.c_contiguous:
        raise InvalidInput("buffer", "must be in one piece")
    return memory.cast("B")


def _check_digest(digest: bytes) -> None:
    if type(digest) is not bytes or len(digest) != DIGEST_BYTES:
        raise InvalidInput("digest", f"{digest!r:.80} does not have {DIGEST_BYTES} bytes")


def _shown(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
