"""Work that a file system may hold for ever, and callers that wait no longer than they want to.

The caller leaves at its deadline; the thread stays with the work, and is used again when that ends.
What such work still does then must not matter to anybody: bytes go to a caller's buffer, and come
from one, through a `Gate`, which the caller shuts when it leaves.

The threads are daemons: one that hangs in a disk must not keep the process.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvfs.config import TIER_PIECE_BYTES, TIER_SHOWN_BYTES
from kvfs.errors import TierStalled, TierTrouble
from kvfs.file_io import allocate

Result = TypeVar("Result")


class Abandoned(Exception):
    """Nobody waits for this work any more."""


class Gate:
    """A caller's buffer, as long as the caller is there. Copies leave the interpreter to others."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer: npt.NDArray[np.uint8] | None = np.frombuffer(buffer, np.uint8)
        self._lock = threading.Lock()

    def fill(self, at: int, piece: memoryview) -> None:
        """Copy a piece to its place. Raises `Abandoned` when the caller has gone."""
        source = np.frombuffer(piece, np.uint8)
        for begin in range(0, len(source), TIER_SHOWN_BYTES):
            part = source[begin : begin + TIER_SHOWN_BYTES]
            with self._lock:
                if self._buffer is None:
                    raise Abandoned
                np.copyto(self._buffer[at + begin : at + begin + len(part)], part)

    def draw(self, at: int, piece: memoryview) -> None:
        """Fill a piece from a place. Raises `Abandoned` when the caller has gone."""
        target = np.frombuffer(piece, np.uint8)
        for begin in range(0, len(target), TIER_SHOWN_BYTES):
            part = target[begin : begin + TIER_SHOWN_BYTES]
            with self._lock:
                if self._buffer is None:
                    raise Abandoned
                np.copyto(part, self._buffer[at + begin : at + begin + len(part)])

    def shut(self) -> None:
        """The buffer is the caller's alone from now on."""
        with self._lock:
            self._buffer = None


class _Job(Generic[Result]):
    """Work and what became of it."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  (raised where the work was asked for)
            self._error = error

    def tell(self) -> None:
        self._ended.set()

    def wait(self, end_s: float) -> bool:
        return self._ended.wait(max(0.0, end_s - time.monotonic()))

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it has ended without an error


class Threads:
    """Threads for a tier's work, at most `count_max`, made when they are needed."""

    def __init__(self, tier: str, count_max: int) -> None:
        self._tier = tier
        self._count_max = count_max
        self._lock = threading.Lock()
        self._count = 0
        self._idle: list[queue.SimpleQueue[_Job[object] | None]] = []  # the last used at the end
        self._is_closed = False
        self._own = threading.local()

    def run(
        self,
        work: Callable[[], Result],
        end_s: float,
        refused: Callable[[], None] | None = None,
    ) -> Result:
        """What the work gives, or raises. Raises `TierStalled` when it has not ended by then; it
        goes on. Raises `TierTrouble` when too much work of before still goes on; it is not begun
        then, and `refused` lets go what it would have."""
        job = _Job(work)
        try:
            self._start(job)
        except BaseException:
            if refused is not None:
                refused()
            raise
        if not job.wait(end_s):
            raise TierStalled(self._tier, "did not end in time; its file system may hang")
        return job.result()

    def memory(self) -> memoryview:
        """`TIER_PIECE_BYTES` of the thread that asks, for the work that it does now."""
        kept: memoryview | None = getattr(self._own, "memory", None)
        if kept is None:
            kept = self._own.memory = allocate(TIER_PIECE_BYTES)
        return kept

    @property
    def busy(self) -> int:
        """Threads with work now."""
        with self._lock:
            return self._count - len(self._idle)

    def close(self) -> None:
        """Let the threads go, each when it has no work any more."""
        with self._lock:
            self._is_closed = True
            for todo in self._idle:
                todo.put(None)
            self._count -= len(self._idle)
            self._idle.clear()

    def _start(self, job: _Job[Result]) -> None:
        with self._lock:
            if self._is_closed:
                raise TierTrouble(self._tier, "is closed")
            if self._idle:
                todo = self._idle.pop()
            elif self._count < self._count_max:
                todo = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._work, args=(todo,), name=f"kvfs-tier-{self._tier}", daemon=True
                )
                thread.start()
                self._count += 1
            else:
                raise TierTrouble(self._tier, f"hangs: {self._count} threads wait for it")
        todo.put(job)  # type: ignore[arg-type]  # its result goes back through the job itself

    def _work(self, todo: "queue.SimpleQueue[_Job[object] | None]") -> None:
        while (job := todo.get()) is not None:
            job.run()
            with self._lock:  # before it is told, so that a caller's next work finds this thread
                is_closed = self._is_closed
                if is_closed:
                    self._count -= 1
                else:
                    self._idle.append(todo)
            job.tell()
            del job  # nothing is kept of what is done
            if is_closed:
                return
