"""Requests that were sent back with ESTALE, and will come again.

The kernel repeats such a request once, at once, from the same thread, after it has looked the name
up again. A thread that cannot be told from others (one of another PID namespace shows as 0) may be
taken for a repetition, which costs it a version of its own, no more.
"""

from collections import OrderedDict

import trio

from kvfs.config import REPEATED_OPEN_S, SENT_BACK_MAX


class SentBack:
    """Threads that will come again, with the inode that they were sent to look for."""

    def __init__(self) -> None:
        self._threads: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._awaited: dict[int, int] = {}  # inode -> how many threads

    def note(self, thread: int, ino: int) -> None:
        """A thread is sent back."""
        self.take(thread)
        self._threads[thread] = (ino, trio.current_time() + REPEATED_OPEN_S)
        self._awaited[ino] = self._awaited.get(ino, 0) + 1
        if len(self._threads) > SENT_BACK_MAX:
            self.take(next(iter(self._threads)))

    def take(self, thread: int) -> int | None:
        """The inode for which a request of a thread comes again, if it is such a one; it is not
        expected any more."""
        found = self._threads.pop(thread, None)
        if found is None:
            return None
        ino, until_s = found
        self._awaited[ino] -= 1
        if not self._awaited[ino]:
            del self._awaited[ino]
        return ino if trio.current_time() < until_s else None

    def note_found(self, thread: int, ino: int) -> bool:
        """A thread looked a name up; one that was sent back is now on its way to what it found.
        Whether it is such a one."""
        is_sent_back = thread in self._threads
        if is_sent_back:
            self.note(thread, ino)
        return is_sent_back

    def awaits(self, ino: int) -> bool:
        """Whether a thread is on its way to an inode."""
        while self._threads:
            thread, (_, until_s) = next(iter(self._threads.items()))
            if trio.current_time() < until_s:
                break
            self.take(thread)
        return ino in self._awaited
