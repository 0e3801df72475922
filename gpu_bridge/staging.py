"""A bounded pool of page-aligned buffers between chunk files and the engine's blocks.

With CUDA the memory is pinned, so that the device copies in and out of it on its own; without, it
is ordinary memory that costs nothing until it is used. Running out of slots is a miss, not a wait
without end.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvfs.config import PAGE_BYTES
from kvfs.errors import InvalidInput
from kvfs.file_io import allocate
from kvfs.transfer.words import Slot as PoolSlot


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One buffer, twice the same bytes: for files and for copies. Its holder alone touches it,
    until it goes back to the pool."""

    memory: memoryview
    tensor: torch.Tensor


class StagingPool:
    """`count` slots of `slot_bytes` (whole pages) each. Thread-safe."""

    def __init__(self, count: int, slot_bytes: int, *, pin: bool) -> None:
        assert count > 0 and slot_bytes % PAGE_BYTES == 0
        self.count = count
        self.slot_bytes = slot_bytes
        whole = _pinned(count * slot_bytes) if pin else _pageable(count * slot_bytes)
        self._free = [_slot(whole, index * slot_bytes, slot_bytes) for index in range(count)]
        self._changed = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, callback: Callable[[], None]) -> None:
        """Call back, on any thread, when a slot that `slot` gave is free again."""
        self._watchers.append(callback)

    @property
    def free(self) -> int:
        with self._changed:
            return len(self._free)

    @contextmanager
    def slot(self, deadline_s: float, *, spare: int = 0) -> Iterator[Slot | None]:
        """A slot for the length of the `with`, or None when none is free in time. `spare`: so many
        stay free for others (loads go before saves)."""
        slot = self._acquire(deadline_s, spare)
        try:
            yield slot
        finally:
            if slot is not None:
                self.give_back(slot)
                for callback in self._watchers:
                    callback()

    def take_nowait(self) -> Slot | None:
        """A slot until `give_back`, or None when none is free."""
        with self._changed:
            return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        """Pairs with `take_nowait`."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def _acquire(self, deadline_s: float, spare: int) -> Slot | None:
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while len(self._free) <= spare:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            return self._free.pop()


class StagingShare:
    """What one user may take of a pool at most, so that the others always find some.
    `kvfs.transfer.words.Pool`; thread-safe."""

    def __init__(self, pool: StagingPool, count: int) -> None:
        self.count = min(count, pool.count)
        self.slot_bytes = pool.slot_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._taken = 0

    def take_nowait(self) -> Slot | None:
        """A slot until `give_back`, or None when there is none for this user."""
        with self._lock:
            if self._taken == self.count:
                return None
            slot = self._pool.take_nowait()
            self._taken += slot is not None
            return slot

    def give_back(self, slot: PoolSlot, /) -> None:
        """Pairs with `take_nowait`."""
        assert isinstance(slot, Slot), "only its own"
        with self._lock:
            self._taken -= 1
        self._pool.give_back(slot)


def slots_for(staging_bytes: int | None, usual_bytes: int, slot_bytes: int, threads: int) -> int:
    """How many slots a pool gets. Raises `InvalidInput` when what a person allows holds fewer than
    two, one to load and one to save."""
    if staging_bytes is None:
        return max(usual_bytes // slot_bytes, threads + 1)
    if staging_bytes < 2 * slot_bytes:
        raise InvalidInput(
            "kvfs.staging_bytes",
            f"{staging_bytes} bytes hold fewer than two chunks of {slot_bytes} bytes;"
            f" write at least {2 * slot_bytes}, or a smaller kvfs.chunk_tokens",
        )
    return staging_bytes // slot_bytes


def _slot(whole: torch.Tensor, offset_bytes: int, size_bytes: int) -> Slot:
    tensor = whole[offset_bytes : offset_bytes + size_bytes]
    return Slot(tensor.numpy().data, tensor)


def _pageable(size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(allocate(size_bytes), dtype=torch.uint8)


def _pinned(size_bytes: int) -> torch.Tensor:
    memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    skip_bytes = -memory.data_ptr() % PAGE_BYTES
    return memory[skip_bytes : skip_bytes + size_bytes]
