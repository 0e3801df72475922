"""Connections that are kept for the next call: each has one user at a time, and there are few."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvfs.errors import Unavailable


class Poolable(Protocol):
    def close(self) -> None: ...

    def is_usable(self) -> bool:
        """Whether an idle connection is still open."""


Item = TypeVar("Item", bound=Poolable)


class Pool(Generic[Item]):
    """At most `size` connections. Safe in several threads."""

    def __init__(self, size: int, what: str) -> None:
        self._size = size
        self._what = what
        self._changed = threading.Condition()
        self._idle: deque[Item] = deque()  # the last used at the right
        self._used: set[Item] = set()
        self._making = 0
        self._closed = False

    def take(self, make: Callable[[], Item], end_s: float) -> tuple[Item, bool]:
        """A connection, and whether it was used before; `make` makes one where none is idle. Raises
        `Unavailable` when all stay in use until `end_s`, or the pool is closed."""
        with self._changed:
            while True:
                if self._closed:
                    raise Unavailable(f"{self._what}: the client is closed")
                if (item := self._take_idle()) is not None:
                    return item, True
                if len(self._used) + self._making < self._size:
                    break
                if not self._changed.wait(max(0.0, end_s - time.monotonic())):
                    raise Unavailable(f"{self._what}: all {self._size} are in use")
            self._making += 1
        try:
            made = make()
        except BaseException:
            with self._changed:
                self._making -= 1
                self._changed.notify()
            raise
        if not self._adopt(made):
            made.close()
            raise Unavailable(f"{self._what}: the client is closed")
        return made, False

    def _adopt(self, made: Item) -> bool:
        with self._changed:
            self._making -= 1
            if not self._closed:
                self._used.add(made)
            return not self._closed

    def put(self, item: Item) -> None:
        """Keep a connection for the next one."""
        with self._changed:
            self._used.discard(item)
            if self._closed:
                item.close()
            else:
                self._idle.append(item)
            self._changed.notify()

    def drop(self, item: Item) -> None:
        """Close a connection that failed."""
        with self._changed:
            self._used.discard(item)
            item.close()  # here: `close` must not abort one whose number is another's by now
            self._changed.notify()

    def drop_idle(self) -> None:
        """Close those that nobody uses: their peer may have gone."""
        with self._changed:
            while self._idle:
                self._idle.pop().close()

    def close(self, abort: Callable[[Item], None] | None = None) -> None:
        """Close what is idle; what is in use goes when it is given back, which `abort` hastens."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            if abort is not None:
                for item in self._used:
                    abort(item)
            self._changed.notify_all()

    def _take_idle(self) -> Item | None:
        while self._idle:
            item = self._idle.pop()
            if item.is_usable():
                self._used.add(item)
                return item
            item.close()
        return None
