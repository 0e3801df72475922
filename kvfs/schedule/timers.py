"""When the schedule has to look at something though nothing happens."""

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush

_STALE_MIN = 256
_NEVER = float("inf")


class Timer(IntEnum):
    """What is to be looked at."""

    READ = 0  # it is late, or stalled
    TIER = 1  # it is asked again: what it left to others may still be there, or its pause is over


class Timers:
    """Times in order. Those that mean nothing any more are left until they come, or until they are
    most of all; `is_live` tells."""

    __slots__ = ("_heap", "_is_live", "_most")

    def __init__(self, is_live: Callable[[Timer, int, int], bool]) -> None:
        self._heap: list[tuple[int, Timer, int]] = []
        self._is_live = is_live
        self._most = _STALE_MIN

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first_ns(self) -> float:
        """When the first is due, whether or not it means anything."""
        return self._heap[0][0] if self._heap else _NEVER

    def add(self, when_ns: int, timer: Timer, number: int) -> None:
        """Look at a read or a tier then."""
        heappush(self._heap, (when_ns, timer, number))
        if len(self._heap) > self._most:
            self._heap = [
                (when_ns, timer, number)
                for when_ns, timer, number in self._heap
                if self._is_live(timer, number, when_ns)
            ]
            heapify(self._heap)
            self._most = max(_STALE_MIN, 2 * len(self._heap))

    def pop_due(self, now_ns: int) -> tuple[Timer, int] | None:
        """The next one that is due and still means something."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            when_ns, timer, number = heappop(heap)
            if self._is_live(timer, number, when_ns):
                return timer, number
        return None

    def next_ns(self) -> int | None:
        """When the first is due; it may mean nothing then."""
        heap = self._heap
        while heap and not self._is_live(heap[0][1], heap[0][2], heap[0][0]):
            heappop(heap)
        return heap[0][0] if heap else None
