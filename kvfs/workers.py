"""Threads for work that may hang: what one of them did not foresee is logged, and ends nothing.

They are daemon threads, since work may hang in a disk or a node, and the process must end all the
same. An executor's threads would be waited for at the interpreter's end.
"""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_Work = tuple[Callable[..., None], tuple[object, ...]]


class Workers:
    """Threads that take work in its order. One is made when there is work for more of them, and
    stays."""

    def __init__(self, name: str, count_max: int) -> None:
        """`count_max`: how many there may be, where `start` does not say it."""
        self._name = name
        self._count_max = count_max
        self._todo: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for what follows
        self._waiting = 0  # work that no thread has taken
        self._idle = 0
        self._count = 0
        self._is_closed = False

    @property
    def count(self) -> int:
        """How many threads there are."""
        with self._lock:
            return self._count

    def start(
        self, work: Callable[..., None], *arguments: object, count_max: int | None = None
    ) -> bool:
        """Hand work to a thread; False after `close`. A new one is made when all have something to
        do, and there are fewer than there may be; else the next that is done takes it. `count_max`:
        how many there may be now: one that hangs is one less for other work."""
        with self._lock:
            if self._is_closed:
                return False
            most = self._count_max if count_max is None else count_max
            if self._waiting >= self._idle and self._count < most:
                self._make(self._run, f"{self._name}-{self._count + 1}")
                self._count += 1
            self._waiting += 1
            self._todo.put((work, arguments))
        return True

    def start_alone(self, work: Callable[[], None]) -> None:
        """Make a thread for this alone, also after `close`: it is the end of something."""
        self._make(lambda: self._carry_out(work), self._name)

    def close(self) -> None:
        """Take nothing more, and let the threads go, each when it has nothing to do. What was taken
        is still done, and should see that it is not wanted: it may hold what must be let go."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._count):
                self._todo.put(None)

    def _make(self, run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            taken = self._todo.get()
            with self._lock:
                self._idle -= 1
                if taken is None:
                    self._count -= 1
                    return
                self._waiting -= 1
            self._carry_out(*taken)
            del taken  # of what is done nothing is kept while there is no more

    def _carry_out(self, work: Callable[..., None], arguments: tuple[object, ...] = ()) -> None:
        try:
            work(*arguments)
        except Exception:
            # The edge of this thread: without it nothing behind would be done.
            log.exception("kvfs: work on %s failed in an unforeseen way", self._name)
