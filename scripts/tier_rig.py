"""A tier for tests and benchmarks that is as slow, late, frozen or wrong as it is told to be."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfs.errors import TierStalled
from kvfs.settings.words import TierLimits
from kvfs.tiers.contract import Capacity, Source, WritableTier


class TokenBucket:
    """Bytes that may pass, at a rate that may change. Pure: times are the caller's, in seconds."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = burst_bytes
        self._at_s = now_s

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """From now on; 0 stops it."""
        self._fill(now_s)
        self._bytes_per_s = bytes_per_s

    def take(self, bytes_wanted: float, now_s: float) -> float | None:
        """Take what is wanted, if it is there; else how long until it is, at this rate; None for
        never."""
        self._fill(now_s)
        missing = min(bytes_wanted, self._burst_bytes) - self._left_bytes
        if missing < 1e-6:  # bytes; less is an error of rounding, and no time would pass for it
            self._left_bytes -= bytes_wanted  # below 0 for more than a burst: who is next waits
            return 0.0
        return missing / self._bytes_per_s if self._bytes_per_s > 0 else None

    def empty(self, now_s: float) -> None:
        """Let nothing through that was saved up until now."""
        self._left_bytes = min(0.0, self._left_bytes)
        self._at_s = max(self._at_s, now_s)

    def _fill(self, now_s: float) -> None:
        more = max(0.0, now_s - self._at_s) * self._bytes_per_s
        self._left_bytes = min(self._burst_bytes, self._left_bytes + more)
        self._at_s = max(self._at_s, now_s)


@dataclass(slots=True)
class Troubles:
    """What the tier does from now on; any field may be set at any time."""

    latency_s: float = 0.0  # before each call
    slow_share: float = 0.0  # of reads, that take `slow_factor` times their latency
    slow_factor: float = 20.0
    corrupt_share: float = 0.0  # of reads, that get one byte wrong
    is_frozen: bool = False  # calls end at their deadline


class RigTier(WritableTier):
    """Another tier behind a token bucket. `seed` decides what is slow or wrong; `burst_bytes`: what
    passes at once after a pause."""

    def __init__(
        self,
        inner: WritableTier,
        *,
        name: str = "",
        limits: TierLimits | None = None,
        bytes_per_s: float | None = None,
        burst_bytes: float = 256 * 1024,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name or inner.name, inner.kind, limits or inner.limits)
        self.troubles = Troubles()
        self._inner = inner
        self._burst_bytes = burst_bytes
        self._clock = clock
        self._random = random.Random(seed)
        self._bucket: TokenBucket | None = None
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # who waits for bytes; the next first
        self.set_rate(bytes_per_s)

    def set_rate(self, bytes_per_s: float | None) -> None:
        """None: as fast as it is."""
        with self._changed:
            now_s = self._clock()
            if bytes_per_s is None:
                self._bucket = None
            elif self._bucket is None:
                self._bucket = TokenBucket(bytes_per_s, self._burst_bytes, now_s)
            else:
                self._bucket.set_rate(bytes_per_s, now_s)
            self._changed.notify_all()

    def drain(self) -> None:
        """What a pause has saved up is gone."""
        with self._changed:
            if self._bucket is not None:
                self._bucket.empty(self._clock())

    def set_frozen(self, is_frozen: bool) -> None:
        """Calls under way are frozen as well, and go on when it thaws."""
        with self._changed:
            self.troubles.is_frozen = is_frozen
            self._changed.notify_all()

    def close(self) -> None:
        self._inner.close()

    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        with self._changed:
            is_slow = self._random.random() < self.troubles.slow_share
            is_wrong = self._random.random() < self.troubles.corrupt_share
            place = self._random.randrange(len(buffer))
        self._delay(end_s, self.troubles.slow_factor if is_slow else 1.0)
        step = max(4096, int(self._burst_bytes) // 4096 * 4096)
        for begin in range(0, len(buffer), step):
            piece = buffer[begin : begin + step]
            self._pass(len(piece), end_s)
            if not self._inner.read_into(digest, offset_bytes + begin, piece, self._left_s(end_s)):
                return False
        if is_wrong:
            buffer[place] ^= 0xFF
        return True

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        self._delay(end_s)
        return self._inner.has(digests, self._left_s(end_s))

    def _put(self, digest: bytes, source: Source, size_bytes: int, end_s: float) -> None:
        self._delay(end_s)
        self._pass(size_bytes, end_s)
        self._inner.put(digest, source, size_bytes, self._left_s(end_s))

    def _remove(self, digest: bytes, end_s: float) -> None:
        self._delay(end_s)
        self._inner.remove(digest, self._left_s(end_s))

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        return self._inner.recheck(digest, self._left_s(end_s))

    def _begin_scan(self) -> Callable[[float], list[tuple[bytes, int]] | None]:
        batches = self._inner.scan()
        return lambda end_s: next(batches, None)

    def _capacity(self, end_s: float) -> Capacity | None:
        return self._inner.capacity(self._left_s(end_s))

    def _delay(self, end_s: float, factor: float = 1.0) -> None:
        """Wait as long as it takes to be asked, and while it is frozen."""
        until_s = self._clock() + self.troubles.latency_s * factor
        with self._changed:
            while self.troubles.is_frozen or self._clock() < until_s:
                self._wait(None if self.troubles.is_frozen else until_s - self._clock(), end_s)

    def _pass(self, count: int, end_s: float) -> None:
        """Wait for so many bytes, in the order in which they were asked for."""
        turn = object()
        with self._changed:
            self._line.append(turn)
            try:
                while True:
                    wait_s: float | None = None
                    if self._line[0] is turn and not self.troubles.is_frozen:
                        wait_s = self._bucket.take(count, self._clock()) if self._bucket else 0.0
                        if wait_s == 0.0:
                            return
                    self._wait(wait_s, end_s)
            finally:
                self._line.remove(turn)
                self._changed.notify_all()

    def _wait(self, wait_s: float | None, end_s: float) -> None:
        left_s = self._left_s(end_s)
        self._changed.wait(left_s if wait_s is None else min(wait_s, left_s))

    def _left_s(self, end_s: float) -> float:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TierStalled(self.name, "was told to be slow")
        return left_s
