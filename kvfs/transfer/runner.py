"""Runs the schedule: reads from several tiers at once, on threads, into memory.

Each tier's calls take threads of their own, so that one that hangs costs only as many as it may
have reads. A thread whose read has ended tells the schedule, and does what follows: it compares
digests, hands chunks over, begins the next read. Nothing but the schedule and the books about
memory is done under the lock.

**Bytes that are handed over are right and stay so.** A read counts for its chunk only when the
schedule keeps it, after its digest was compared; the memory of a read that is not wanted any more
goes to nobody until the tier's call has ended (`kvfs.transfer.memory`).

**Health.** The schedule judges tiers for reads, each tier itself for questions and writes. Reads
are not refused by a tier that is down, so the two do not wait for each other. What ended because
nobody wanted it counts for neither.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvfs import config
from kvfs.config import TierLimits
from kvfs.errors import InvalidInput, QueueFull, Unavailable
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.schedule.words import Outcome, TierDown, TierTerms, TierUp
from kvfs.tiers.contract import Tier
from kvfs.transfer.clock import Clock
from kvfs.transfer.job import Job, Landed, Task
from kvfs.transfer.memory import Memory, Role
from kvfs.transfer.reads import Check, Read
from kvfs.transfer.rechecks import Rechecks
from kvfs.transfer.state import State
from kvfs.transfer.supply import PlainSupply, PoolSupply
from kvfs.transfer.threads import Threads
from kvfs.transfer.todo import Gone, Handover, Over, Todo, Work, Wrong
from kvfs.transfer.words import (
    Ending,
    JobEnd,
    Pool,
    Slot,
    TransferTierView,
    TransferView,
    WantedChunk,
)

log = logging.getLogger(__name__)


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
        self._on_gone = on_gone
        self._lock = threading.Lock()  # for the next two
        supply = PlainSupply(scratch_reads) if pool is None else PoolSupply(pool, scratch_reads)
        self._state = State(supply)
        self._is_closed = False
        self._ended = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._threads = Threads("kvfs-transfer")
        self._rechecks = Rechecks(self._note_gone)
        self._clock = Clock(self._lock, lambda: self._state.wake_ns, self._wake)

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

        self._spread(self._change(add))

    def remove_tier(self, number: int) -> None:
        """Read no more from a tier: what was under way is read elsewhere. Calls of it may go on
        until they end. One that is not there is fine."""

        def remove(now_ns: int) -> None:
            self._state.tell(TierDown(number), now_ns)
            self._state.tiers.pop(number, None)

        self._spread(self._change(remove))

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
        job = Job(next(self._numbers), tuple(chunks), on_chunk, on_end, self._cancel)
        task = Task(job, time.monotonic() + deadline_s, is_in_place=in_place)

        def add(now_ns: int) -> None:
            if self._is_closed:
                raise Unavailable("this transfer is closed; nothing is read any more")
            self._state.add(task, priority, now_ns)

        self._spread(self._change(add))
        if self._pool is not None:
            self._balance()
        return job

    def note_room(self) -> None:
        """The pool may have a slot again that did not come back through here. From any thread."""
        if self._pool is not None:
            self._balance()

    def view(self) -> TransferView:
        """What people are shown."""
        with self._lock:
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
                threads=self._threads.count,
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

        def end(now_ns: int) -> None:
            self._is_closed = True
            for task in list(self._state.tasks.values()):
                self._state.cancel(task, Ending.CLOSED, now_ns)

        self._spread(self._change(end))
        with self._lock:
            is_ended = self._ended.wait_for(self._state.is_at_rest, deadline_s)
            self._clock.close()
        self._threads.close()
        return is_ended

    # Under the lock -------------------------------------------------------------------------------
    def _change(self, change: Callable[[int], None]) -> Todo:
        """Change the state. What is to be done then."""
        with self._lock:
            change(time.monotonic_ns())
            self._clock.look()
            if self._is_closed and self._state.is_at_rest():
                self._ended.notify_all()
            return self._state.take_todo()

    def _cancel(self, job: Job) -> None:
        def cancel(now_ns: int) -> None:
            task = self._state.tasks.get(job.number)
            if task is not None:
                self._state.cancel(task, Ending.CANCELLED, now_ns)

        self._spread(self._change(cancel))

    def _give_back(self, memory: Memory) -> None:
        self._spread(self._change(lambda now_ns: self._state.give_back(memory, now_ns)))

    def _wake(self) -> None:
        self._spread(self._change(self._state.wake))

    # Without it -----------------------------------------------------------------------------------
    def _spread(self, todo: Todo) -> None:
        """Have threads do what is to be done."""
        self._settle(todo)
        for read in todo.reads:
            self._begin(Todo(reads=[read]))
        if todo.work:
            self._begin(Todo(work=todo.work))

    def _settle(self, todo: Todo) -> None:
        """Do what takes no time."""
        for task in todo.quiet:
            task.job.tell_quiet()
        if todo.is_unbalanced:
            self._balance()

    def _begin(self, todo: Todo) -> None:
        most = len(self._state.reads) + config.TRANSFER_CALLBACKS_MAX
        self._threads.start(partial(self._run, todo), most)

    def _run(self, todo: Todo) -> None:
        """On a thread: what is to be done, and what follows from it. Reads are given to others,
        but for the last thing to do: it needs no other thread."""
        work: deque[Work] = deque()
        while True:
            self._settle(todo)
            work.extend(todo.work)
            own = todo.reads.pop() if todo.reads and not work else None
            for read in todo.reads:
                self._begin(Todo(reads=[read]))
            if own is not None:
                todo = self._read(own)
            elif work:
                todo = self._do(work.popleft())
            else:
                return

    def _read(self, read: Read) -> Todo:
        outcome = Outcome.CANCELLED if read.is_cancelled else read.carry_out()
        return self._change(lambda now_ns: self._state.end_read(read, outcome, now_ns))

    def _do(self, work: Work) -> Todo:
        match work:
            case Handover():
                return self._hand_over(work)
            case Check():
                outcome = work.carry_out()
                return self._change(lambda now_ns: self._state.end_check(work, outcome, now_ns))
            case Over():
                work.task.job.tell_end(work.task.ending, work.task.troubles)
                return self._change(lambda _: self._state.end_task(work.task))
            case Wrong():
                self._rechecks.add(work.number, work.tier, work.digest)
            case Gone():
                self._note_gone(work.number, work.digest)
        return Todo()

    def _hand_over(self, handover: Handover) -> Todo:
        task, target = handover.task, handover.target
        if handover.copies:
            for part in handover.copies:
                part.copy_to(target)
            self._spread(self._change(lambda now_ns: self._state.end_copy(handover, now_ns)))
        is_own = target.role is Role.OWN
        landed = Landed(
            handover.chunk,
            target.view[: task.job.chunks[handover.chunk].size_bytes],
            None if is_own else target,
            self._give_back,
            is_in_place=is_own or self._pool is not None,
        )
        is_given = task.job.hand_over(landed)
        return self._change(
            lambda now_ns: self._state.end_handover(handover, now_ns, is_given=is_given)
        )

    def _note_gone(self, number: int, digest: bytes) -> None:
        if self._on_gone is None:
            return
        try:
            self._on_gone(number, digest)
        except Exception:
            # The edge of what is ours: without it a thread that reads would end.
            log.exception("kvfs: a callback for a blob that a tier has no more failed")

    def _balance(self) -> None:
        """Take slots from the pool that chunks wait for, and give back those that none does."""
        pool = self._pool
        assert pool is not None
        while True:
            with self._lock:
                balance = self._state.balance(time.monotonic_ns())
            for slot in balance.surplus:
                pool.give_back(slot)
            slots: list[Slot] = []
            while len(slots) < balance.short and (taken := pool.take_nowait()) is not None:
                slots.append(taken)
            if not slots:
                return
            self._spread(self._change(partial(self._state.stock, slots)))

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
