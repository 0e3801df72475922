"""Threads that are made when there is work for more of them, and stay.

They are daemons, since a read may hang in a disk for ever, and the process must end all the same.
"""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Threads:
    """Takes work in its order. A thread that hangs is one less for other work, so `start` is told
    how many there may be now."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for what follows
        self._waiting = 0  # work that no thread has taken
        self._idle = 0
        self._count = 0
        self._is_closed = False

    @property
    def count(self) -> int:
        with self._lock:
            return self._count

    def start(self, work: Callable[[], None], count_max: int) -> None:
        """Have a thread do something. A new one is made when all have something to do, and there
        are fewer than `count_max`; else the next that is done takes it. After `close` a thread is
        made for it alone: it is the end of something."""
        with self._lock:
            if self._is_closed:
                threading.Thread(
                    target=self._carry_out, args=(work,), name=self._name, daemon=True
                ).start()
                return
            self._waiting += 1
            if self._waiting > self._idle and self._count < count_max:
                self._count += 1
                name = f"{self._name}-{self._count}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
            self._todo.put(work)

    def close(self) -> None:
        """Let the threads go, each when it has nothing to do any more. What was started before is
        still done."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._count):
                self._todo.put(None)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._todo.get()
            with self._lock:
                self._idle -= 1
                if work is None:
                    self._count -= 1
                    return
                self._waiting -= 1
            self._carry_out(work)
            del work  # of what is done nothing is kept while there is no more

    def _carry_out(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # The edge of this thread: without it nothing behind would be done.
            log.exception("kvfs: work on %s failed in an unforeseen way", self._name)
