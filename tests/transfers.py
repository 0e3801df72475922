"""What tests of transfers read from and into: tiers that are held, and a pool that spoils what
comes back."""

import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from kvfs.digest import digest_of
from kvfs.errors import TierTrouble
from kvfs.file_io import allocate
from kvfs.settings.words import TierKind, TierLimits
from kvfs.tiers.contract import Tier
from kvfs.transfer.buffers import BufferPool
from kvfs.transfer.job import Landed
from kvfs.transfer.words import Slot, WantedChunk

DEADLINE_S = 30.0  # for what should not take long, on a busy machine
POISON = 0xDB
GARBAGE = 0xEE


def make_blobs(count: int, size_bytes: int) -> dict[bytes, bytes]:
    blobs = [os.urandom(size_bytes) for _ in range(count)]
    return {digest_of(blob): blob for blob in blobs}


class StoredTier(Tier):
    """Blobs in memory. `hang` has reads of some wait, with no regard for their deadline, as a local
    disk that hangs does; when they go on they write garbage, as late as that is. `hold` has them
    wait and then be right."""

    def __init__(self, name: str, blobs: dict[bytes, bytes], reads_max: int = 4) -> None:
        limits = TierLimits(reads_max, 2, DEADLINE_S, DEADLINE_S)
        super().__init__(name, TierKind.OBJECT, limits)
        self.blobs = blobs
        self.wrong: set[bytes] = set()  # of which one byte is another
        self.is_failing = False
        self.rechecked: list[bytes] = []
        self.began = threading.Semaphore(0)  # once for each read
        self._held: dict[bytes, threading.Event] = {}
        self._hung: dict[bytes, threading.Event] = {}

    def hold(self, digests: Iterable[bytes]) -> threading.Event:
        """Reads of these wait until the event is set."""
        event = threading.Event()
        self._held.update(dict.fromkeys(digests, event))
        return event

    def hang(self, digests: Iterable[bytes]) -> threading.Event:
        """The same, and they write garbage then."""
        event = threading.Event()
        self._hung.update(dict.fromkeys(digests, event))
        return event

    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        self.began.release()
        held = self._held.get(digest) or self._hung.get(digest)
        if held is not None:
            assert held.wait(2 * DEADLINE_S), "the test never lets this read go"
        if digest in self._hung:
            np.frombuffer(buffer, np.uint8)[:] = GARBAGE
            return True
        if self.is_failing:
            raise TierTrouble(self.name, "was told to fail")
        blob = self.blobs.get(digest)
        if blob is None or len(blob) < offset_bytes + len(buffer):
            return False
        buffer[:] = blob[offset_bytes : offset_bytes + len(buffer)]
        if digest in self.wrong:
            buffer[len(buffer) // 2] ^= 0xFF
        return True

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        return [len(self.blobs[d]) if d in self.blobs else None for d in digests]

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        self.rechecked.append(digest)
        if digest in self.wrong:
            self.blobs.pop(digest, None)
        return digest in self.blobs


class SlotPool(BufferPool):
    """Buffers that are filled with poison when they come back: who still reads one finds it."""

    def give_back(self, slot: Slot, /) -> None:
        assert slot not in self._free
        np.frombuffer(slot.memory, np.uint8)[:] = POISON
        super().give_back(slot)


class Taker:
    """Callbacks of a job: keeps what it gets, and what it was then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.landed: dict[int, Landed] = {}
        self.digests: dict[int, bytes] = {}
        self.count = threading.Semaphore(0)  # once for each chunk

    def take(self, landed: Landed) -> None:
        digest = digest_of(landed.memory)
        with self._lock:
            assert landed.chunk not in self.landed, "a chunk is handed over once"
            self.landed[landed.chunk] = landed
            self.digests[landed.chunk] = digest
        self.count.release()

    def take_and_give_back(self, landed: Landed) -> None:
        self.take(landed)
        landed.give_back()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.count.acquire(timeout=DEADLINE_S), "a chunk was not handed over in time"

    def give_back(self) -> None:
        for landed in self.landed.values():
            landed.give_back()


def wanted(
    blobs: dict[bytes, bytes], tiers: tuple[int, ...], *, is_pooled: bool = False
) -> list[WantedChunk]:
    return [
        WantedChunk(digest, len(blob), tiers, None if is_pooled else allocate(len(blob)))
        for digest, blob in blobs.items()
    ]
