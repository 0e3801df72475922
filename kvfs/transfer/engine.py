"""The state of a transfer under its lock, and the threads that do what it says.

A thread whose read has ended changes the state, and does what follows from that: it compares
digests, hands chunks over, begins the next read. Nothing but the schedule and the books about
memory is done under the lock.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvfs.config import TRANSFER_CALLBACKS_MAX
from kvfs.schedule import Outcome
from kvfs.transfer.clock import Clock
from kvfs.transfer.job import Job, Landed
from kvfs.transfer.memory import Memory, Role
from kvfs.transfer.reads import Check, Read
from kvfs.transfer.rechecks import Rechecks
from kvfs.transfer.state import State
from kvfs.transfer.todo import Gone, Handover, Over, Todo, Work, Wrong
from kvfs.transfer.words import Ending, Pool, Slot
from kvfs.workers import Workers

log = logging.getLogger(__name__)


class Engine:
    """Changes the state for whoever asks, and has threads do what is to be done then."""

    def __init__(
        self, state: State, pool: Pool | None, on_gone: Callable[[int, bytes], None] | None
    ) -> None:
        self._state = state
        self._pool = pool
        self._on_gone = on_gone
        self.lock = threading.Lock()  # for the state
        self._rested = threading.Condition(self.lock)
        self._workers = Workers("kvfs-transfer", TRANSFER_CALLBACKS_MAX)
        self._rechecks = Rechecks(self._note_gone)
        self._clock = Clock(self.lock, lambda: state.wake_ns, partial(self.do, state.wake))

    @property
    def thread_count(self) -> int:
        return self._workers.count

    def do(self, change: Callable[[int], None]) -> None:
        """Change the state, with the time, under the lock. Threads do the rest. What the change
        raises passes."""
        self._spread(self._change(change))

    def cancel(self, job: Job) -> None:
        """Nobody wants a job any more."""

        def cancel(now_ns: int) -> None:
            task = self._state.tasks.get(job.number)
            if task is not None:
                self._state.cancel(task, Ending.CANCELLED, now_ns)

        self.do(cancel)

    def close(self, deadline_s: float) -> bool:
        """End all jobs; whether all calls have ended by then."""

        def end(now_ns: int) -> None:
            self._state.is_closed = True
            for task in list(self._state.tasks.values()):
                self._state.cancel(task, Ending.CLOSED, now_ns)

        end_s = time.monotonic() + deadline_s
        self.do(end)
        with self.lock:
            is_at_rest = self._rested.wait_for(self._state.is_at_rest, deadline_s)
            self._clock.close()
        self._workers.close()
        return self._rechecks.close(max(0.0, end_s - time.monotonic())) and is_at_rest

    def balance(self) -> None:
        """Take slots from the pool that chunks wait for, and give back those that none does."""
        pool = self._pool
        while pool is not None:
            with self.lock:
                balance = self._state.balance(time.monotonic_ns())
                self._clock.look()
                todo = self._state.take_todo()
            for slot in balance.surplus:
                pool.give_back(slot)
            self._spread(todo)
            slots: list[Slot] = []
            while len(slots) < balance.short and (taken := pool.take_nowait()) is not None:
                slots.append(taken)
            if not slots:
                return
            self._spread(self._change(partial(self._state.stock, slots)))

    # Under the lock -------------------------------------------------------------------------------
    def _change(self, change: Callable[[int], None]) -> Todo:
        """Change the state. What is to be done then."""
        with self.lock:
            change(time.monotonic_ns())
            self._clock.look()
            if self._state.is_closed and self._state.is_at_rest():
                self._rested.notify_all()
            return self._state.take_todo()

    # Without the lock -----------------------------------------------------------------------------
    def _give_back(self, memory: Memory) -> None:
        self.do(lambda now_ns: self._state.give_back(memory, now_ns))

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
            self.balance()

    def _begin(self, todo: Todo) -> None:
        most = len(self._state.reads) + TRANSFER_CALLBACKS_MAX
        if not self._workers.start(self._run, todo, count_max=most):
            self._workers.start_alone(partial(self._run, todo))

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
            self.do(lambda now_ns: self._state.end_copy(handover, now_ns))
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
