"""Threads for work that may hang: what one of them did not foresee is logged, and ends nothing.

They are daemon threads, since work may hang in a disk or a node, and the engine must end all the
same. An executor's threads would be waited for at the interpreter's end.
"""

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_Work = tuple[Callable[..., None], tuple[object, ...]]


class Workers:
    """A number of threads that take work in its order."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def start(self, work: Callable[..., None], *arguments: object) -> bool:
        """Hand work to a thread; False after `close`."""
        with self._lock:
            if self._is_closed:
                return False
            self._todo.put((work, arguments))
        return True

    def close(self) -> None:
        """Take nothing more. What was taken is still done, and should see that it is not wanted: it
        may hold what must be let go."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._count):
                self._todo.put(None)

    def _run(self) -> None:
        while (taken := self._todo.get()) is not None:
            work, arguments = taken
            try:
                work(*arguments)
            except Exception:
                # The edge of this thread: without it nothing behind would be done.
                log.exception("kvfs: work on %s failed in an unforeseen way", self._name)
            del taken, work, arguments  # of what is done nothing is kept while there is no more
