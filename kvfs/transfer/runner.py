"""Runs the schedule: reads from several tiers at once, on threads, into memory.

Each tier's calls take threads of their own, so that one that hangs costs only as many as it may
have reads (`kvfs.transfer.engine`).

**Bytes that are handed over are right and stay so.** A read counts for its chunk only when the
schedule keeps it, after its digest was compared; the memory of a read that is not wanted any more
goes to nobody until the tier's call has ended (`kvfs.transfer.memory`).

**Health.** The schedule judges tiers for reads, each tier itself for questions and writes. Reads
are not refused by a tier that is down, so the two do not wait for each other. What ended because
nobody wanted it counts for neither.
"""

import itertools
import time
from collections.abc import Callable, Sequence

from kvfs import config
from kvfs.errors import InvalidInput, QueueFull
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.schedule import TierDown, TierTerms, TierUp
from kvfs.settings.words import TierLimits
from kvfs.tiers.contract import Tier
from kvfs.transfer.engine import Engine
from kvfs.transfer.job import Job, Landed, Task
from kvfs.transfer.state import State
from kvfs.transfer.supply import PlainSupply, PoolSupply
from kvfs.transfer.words import (
    JobEnd,
    Pool,
    TransferTierView,
    TransferView,
    WantedChunk,
)


def terms_of(limits: TierLimits) -> TierTerms:
    """What a schedule is told of a tier with such limits."""
    return TierTerms(
        reads_max=limits.reads_max,
        request_cost_s=limits.cost_per_request,
        gib_cost_s=limits.cost_per_gib,
    )


class Transfer:
    """Reads chunks from several tiers at once. One for a process, for any threads of it. It neither
    opens nor closes tiers.

    With a pool, chunks get their memory from it when their reads start, and slots are the pool's
    again when who got a chunk gives it back. A few more, `scratch_reads`, are kept for reads that
    repeat others, as long as there are jobs. Without, each chunk brings memory, and what repeats
    a read gets some that is made for it.

    `on_gone`: a tier (its number) has a blob (its digest) no more: it said so when it was read, or
    its bytes were wrong and it took them away. On a thread of the transfer; must be short.
    """

    def __init__(
        self,
        pool: Pool | None = None,
        *,
        scratch_reads: int = config.TRANSFER_SCRATCH_READS,
        on_gone: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self._pool = pool
        supply = PlainSupply(scratch_reads) if pool is None else PoolSupply(pool, scratch_reads)
        self._state = State(supply)
        self._engine = Engine(self._state, pool, on_gone)
        self._numbers = itertools.count()

    # Tiers ----------------------------------------------------------------------------------------
    def add_tier(self, number: int, tier: Tier, terms: TierTerms | None = None) -> None:
        """Read from a tier from now on, under a number that the caller gives it. One that was there
        before under this number is replaced; what was measured of it is kept. Without terms, its
        limits say what it can do. Raises `QueueFull` for a tier too many."""
        if number < 0:
            raise InvalidInput("tier", f"{number} is no number of a tier; they begin with 0")
        up = TierUp(number, terms or terms_of(tier.limits))

        def add(now_ns: int) -> None:
            before = self._state.tiers.get(number)
            self._state.tiers[number] = tier  # first: it may have to read at once
            try:
                self._state.tell(up, now_ns)
            except QueueFull:
                assert before is None, "only a tier more can be one too many"
                del self._state.tiers[number]
                raise

        self._engine.do(add)

    def remove_tier(self, number: int) -> None:
        """Read no more from a tier: what was under way is read elsewhere. Calls of it may go on
        until they end. One that is not there is fine."""

        def remove(now_ns: int) -> None:
            self._state.tell(TierDown(number), now_ns)
            self._state.tiers.pop(number, None)

        self._engine.do(remove)

    # Jobs -----------------------------------------------------------------------------------------
    def start(
        self,
        chunks: Sequence[WantedChunk],
        on_chunk: Callable[[Landed], None],
        *,
        deadline_s: float,
        on_end: Callable[[JobEnd], None] | None = None,
        priority: int = 0,
        in_place: bool = True,
    ) -> Job:
        """Begin to read chunks, in their order. Does not wait.

        `on_chunk` gets each that landed, once, on a thread of the transfer, several at the same
        time. `on_end` is told last of all, once. Both must be short, since they keep a thread that
        could read, and may call what does not wait here. What they raise is logged; a chunk is
        given back then.

        `priority`: steps of `SCHEDULE_PRIORITY_S`, or `SCHEDULE_PRIORITY_IDLE` for what is read
        while nothing else is wanted.

        `in_place`: every chunk is handed over in the memory that it brought. When a repeated read
        was first, it waits until the late one's call has ended, which may be at the tier's
        deadline. If not, it is handed over at once in other memory (`Landed.is_in_place`).

        Raises `InvalidInput`, `QueueFull` for too much at a time, and
        `Unavailable` after `close`.
        """
        for chunk in chunks:
            self._check_wanted(chunk)
        if not deadline_s > 0:
            raise InvalidInput("deadline", f"{deadline_s!r} leaves no time")
        job = Job(next(self._numbers), tuple(chunks), on_chunk, on_end, self._engine.cancel)
        task = Task(job, time.monotonic() + deadline_s, is_in_place=in_place)

        def add(now_ns: int) -> None:
            self._state.add(task, priority, now_ns)

        self._engine.do(add)
        self._engine.balance()
        return job

    def note_room(self) -> None:
        """The pool may have a slot again that did not come back through here. From any thread."""
        self._engine.balance()

    def view(self) -> TransferView:
        """What people are shown."""
        with self._engine.lock:
            state = self._state
            schedule = state.schedule.view()
            supply, tally = state.supply, state.tally
            return TransferView(
                tiers=tuple(
                    TransferTierView(
                        view.tier, tier.name, tier.kind, schedule=view, counters=tier.counters
                    )
                    for view in schedule.tiers
                    if (tier := state.tiers.get(view.tier)) is not None
                ),
                jobs=len(state.tasks),
                unread_chunks=schedule.unread_chunks,
                unread_bytes=schedule.unread_bytes,
                reads=len(state.reads),
                threads=self._engine.thread_count,
                slots=supply.buffers + supply.scratch if isinstance(supply, PoolSupply) else 0,
                scratch_reads=supply.scratch_reads,
                landed_chunks=tally.landed_chunks,
                landed_bytes=tally.landed_bytes,
                lost_chunks=tally.lost_chunks,
                copied_bytes=tally.copied_bytes,
            )

    def close(self, deadline_s: float) -> bool:
        """End all jobs, and wait until the calls under way have ended. False when some have not by
        then: they hang, and their threads with them, which do not keep the process."""
        return self._engine.close(deadline_s)

    def _check_wanted(self, chunk: WantedChunk) -> None:
        size_bytes, memory = chunk.size_bytes, chunk.memory
        if len(chunk.digest) != DIGEST_BYTES:
            raise InvalidInput("digest", f"{chunk.digest!r:.80} does not have {DIGEST_BYTES} bytes")
        if not 0 < size_bytes <= config.CHUNK_BYTES_MAX:
            raise InvalidInput("chunk", f"{size_bytes} bytes is not in 1..{config.CHUNK_BYTES_MAX}")
        if self._pool is not None:
            if memory is not None:
                raise InvalidInput("chunk", "brings memory, and the transfer has a pool")
            if size_bytes > self._pool.slot_bytes:
                most = self._pool.slot_bytes
                raise InvalidInput("chunk", f"{size_bytes} bytes do not fit into slots of {most}")
        elif memory is None:
            raise InvalidInput("chunk", "brings no memory, and the transfer has no pool")
        elif memory.readonly or not memory.c_contiguous or memory.nbytes < size_bytes:
            raise InvalidInput(
                "memory", f"must be writable, in one piece, and have {size_bytes} bytes"
            )
