"""A job as its caller sees it, and the chunks that it gets."""

import logging
import threading
from collections.abc import Callable, Mapping, Set
from types import TracebackType
from typing import Self

from kvfs.schedule import Outcome
from kvfs.transfer.memory import Memory, Place
from kvfs.transfer.words import Ending, JobEnd, Slot, WantedChunk

log = logging.getLogger(__name__)


class Landed:
    """A chunk that is whole and has its digest. Nobody writes to its memory until `give_back`;
    after that it is not for whoever got it any more.

    Memory that the caller brought stays the caller's; `give_back` changes nothing then.
    """

    __slots__ = ("_give_back", "_memory", "chunk", "is_in_place", "memory")

    def __init__(
        self,
        chunk: int,
        memory: memoryview,
        held: Memory | None,
        give_back: Callable[[Memory], None],
        *,
        is_in_place: bool,
    ) -> None:
        self.chunk = chunk  # its place in the job's list
        self.memory = memory  # its bytes, no more
        self.is_in_place = is_in_place
        """False: the bytes lie in memory of the transfer, until `give_back`, since a read that is
        not wanted any more may still write to what the caller brought. Only of jobs that allow it.
        """
        self._memory = held
        self._give_back = give_back

    @property
    def slot(self) -> Slot | None:
        """The pool's, at whose start the bytes lie."""
        return self._memory.slot if self._memory is not None else None

    def give_back(self) -> None:
        """The memory is not used any more. From any thread, also after the job's end; once is
        enough."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._give_back(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()


class Job:
    """Chunks that are being read. Made by `Transfer.start`."""

    def __init__(
        self,
        number: int,
        chunks: tuple[WantedChunk, ...],
        on_chunk: Callable[[Landed], None],
        on_end: Callable[[JobEnd], None] | None,
        cancel: Callable[["Job"], None],
    ) -> None:
        self.number = number
        self.chunks = chunks
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._cancel = cancel
        self._gate = threading.Lock()  # for the next two
        self._is_shut = False
        self._handed = bytearray(len(chunks))  # 1: its callback has begun
        self._end: JobEnd | None = None
        self._ended = threading.Event()
        self._quiet = threading.Event()

    @property
    def end(self) -> JobEnd | None:
        """How it ended; None while it goes on."""
        return self._end

    @property
    def is_quiet(self) -> bool:
        """Whether it is over, and no call of a tier may write any more to memory that its caller
        brought."""
        return self._quiet.is_set()

    def cancel(self) -> None:
        """Nobody wants it any more. Never blocks. No chunk is handed over once this has returned;
        the end comes when callbacks that have begun have returned."""
        self._cancel(self)

    def wait(self, deadline_s: float) -> JobEnd | None:
        """How it ended, once all callbacks have returned; None when that is not so in time. Not for
        the job's own callbacks, which would wait for themselves."""
        return self._end if self._ended.wait(deadline_s) else None

    def wait_quiet(self, deadline_s: float) -> bool:
        """Wait until it `is_quiet`; False when that is not so in time."""
        return self._quiet.wait(deadline_s)

    # For the transfer -----------------------------------------------------------------------------
    def hand_over(self, landed: Landed) -> bool:
        """Give a chunk to the caller, unless nobody wants it any more: False then."""
        with self._gate:
            if self._is_shut:
                return False
            self._handed[landed.chunk] = 1
        try:
            self._on_chunk(landed)
        except Exception:
            # The edge of what is ours: without it the threads would end, one after the other.
            log.exception("kvfs: a callback for a chunk that was read failed")
            landed.give_back()
        return True

    def shut(self) -> None:
        """Nothing more is handed over."""
        with self._gate:
            self._is_shut = True

    def tell_end(self, ending: Ending, troubles: Mapping[int, Outcome]) -> None:
        """All is over but for calls that may still write. `troubles`: what is known of chunks that
        were lost."""
        self.shut()
        lost = tuple(chunk for chunk, handed in enumerate(self._handed) if not handed)
        why = {chunk: troubles.get(chunk, Outcome.CANCELLED) for chunk in lost}
        self._end = JobEnd(ending, lost, why)
        try:
            if self._on_end is not None:
                self._on_end(self._end)
        except Exception:
            # The same edge: whoever waits for the end is told of it all the same.
            log.exception("kvfs: a callback for the end of a job failed")
        self._ended.set()

    def tell_quiet(self) -> None:
        """No call may write to the caller's memory any more."""
        self._quiet.set()


class Task:
    """A job as the transfer sees it, under its lock."""

    __slots__ = (
        "bare", "end_s", "ending", "handing", "is_in_place", "is_read", "is_told", "job",
        "largest_bytes", "missing", "places", "troubles", "waiting", "writing",
    )  # fmt: skip

    def __init__(self, job: Job, end_s: float, *, is_in_place: bool) -> None:
        self.job = job
        self.is_in_place = is_in_place  # chunks are handed over in the memory that they brought
        self.end_s = end_s  # when it is late, by the monotonic clock
        self.largest_bytes = max((chunk.size_bytes for chunk in job.chunks), default=0)
        self.places: dict[int, Place] = {}  # of chunks that are being read
        self.bare = 0  # chunks that have no slot of the pool yet
        self.handing = 0  # chunks that are being handed over, those that wait for it among them
        self.waiting: dict[int, Place] = {}  # whole chunks, to whose memory a call may still write
        self.writing = 0  # who writes to memory that the caller brought
        self.troubles: dict[int, Outcome] = {}  # the worst that tiers did with chunks
        self.missing: dict[int, set[int]] = {}  # tiers that do not have a chunk after all
        self.is_read = False  # the schedule is done with it
        self.is_told = False  # and the caller knows
        self.ending = Ending.DONE

    def note_trouble(self, chunk: int, outcome: Outcome, tier: int) -> None:
        """A tier did not give a chunk."""
        if outcome is Outcome.MISSING:
            self.missing.setdefault(chunk, set()).add(tier)
        elif outcome is not Outcome.CANCELLED and self.troubles.get(chunk) is not Outcome.CORRUPT:
            self.troubles[chunk] = outcome

    def note_lost(self, chunk: int, tiers: Set[int]) -> None:
        """No tier gives a chunk; `tiers` are there now."""
        known = tiers & set(self.job.chunks[chunk].tiers)
        is_missing = known <= self.missing.pop(chunk, set())
        self.troubles.setdefault(chunk, Outcome.MISSING if is_missing else Outcome.FAILED)
