"""Calls somebody when it is time, though nothing else happens."""

import threading
import time
from collections.abc import Callable

_NEVER = 1 << 63


class Clock:
    """A thread that sleeps until `wake_ns` (by the monotonic clock; None: for now never), which it
    asks under `lock`, and then calls `wake` without it."""

    def __init__(
        self, lock: threading.Lock, wake_ns: Callable[[], int | None], wake: Callable[[], None]
    ) -> None:
        self._changed = threading.Condition(lock)
        self._wake_ns = wake_ns
        self._wake = wake
        self._sleeps_until_ns = -1  # not asleep: it looks by itself before it is
        self._is_begun = False
        self._is_closed = False

    def look(self) -> None:
        """`wake_ns` may be another. Under the lock."""
        wake_ns = self._wake_ns()
        if wake_ns is None or self._is_closed:
            return
        if not self._is_begun:
            self._is_begun = True
            threading.Thread(target=self._run, name="kvfs-transfer-clock", daemon=True).start()
        elif wake_ns < self._sleeps_until_ns:
            self._changed.notify()

    def close(self) -> None:
        """Under the lock."""
        self._is_closed = True
        self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            self._wake()

    def _wait(self) -> bool:
        """Sleep until it is time; False when there is no more to wait for."""
        with self._changed:
            while not self._is_closed:
                wake_ns = self._wake_ns()
                left_ns = (_NEVER if wake_ns is None else wake_ns) - time.monotonic_ns()
                if left_ns <= 0:
                    return True
                self._sleeps_until_ns = _NEVER if wake_ns is None else wake_ns
                self._changed.wait(None if wake_ns is None else left_ns / 1e9)
                self._sleeps_until_ns = -1
        return False
