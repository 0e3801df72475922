"""A pool for who has no staging memory of its own: so many page-aligned buffers, made once."""

import threading

from kvfs.file_io import allocate
from kvfs.transfer.words import Slot


class Buffer:
    """`kvfs.transfer.words.Slot`."""

    __slots__ = ("memory",)

    def __init__(self, size_bytes: int) -> None:
        self.memory = allocate(size_bytes)


class BufferPool:
    """`kvfs.transfer.words.Pool`: buffers that nobody else looks at."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._free: list[Slot] = [Buffer(slot_bytes) for _ in range(count)]

    @property
    def free(self) -> int:
        """How many nobody holds."""
        with self._lock:
            return len(self._free)

    def take_nowait(self) -> Slot | None:
        """A buffer until `give_back`, or None when none is free."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: Slot, /) -> None:
        """Pairs with `take_nowait`."""
        with self._lock:
            self._free.append(slot)
