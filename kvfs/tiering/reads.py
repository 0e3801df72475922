"""Whether anybody reads now, as far as the node knows: who copies in the background waits for
that. A read that the node does itself is counted. Who gets descriptors reads without the node, and
is taken to read for a moment."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_

import trio

from kvfs.config import READS_SETTLE_S


class Reads:
    """In the node's thread."""

    def __init__(self) -> None:
        self.count = 0  # under way now
        self._masks: Counter[int] = Counter()
        self._used_s = float("-inf")
        self._ended = trio.Event()

    @contextmanager
    def under_way(self, tiers: int = -1) -> Iterator[None]:
        """For the length of a read, from the tiers of this mask; from any, where it is not
        known."""
        self.count += 1
        self._masks[tiers] += 1
        try:
            yield
        finally:
            self.count -= 1
            self._masks[tiers] -= 1
            if not self.count:
                self._ended.set()
                self._ended = trio.Event()

    @property
    def busy(self) -> int:
        """A mask of the tiers that are read from now."""
        self._masks += Counter()  # without those that are not
        return reduce(or_, self._masks, 0)

    def note_use(self) -> None:
        """Descriptors were handed out just now."""
        self._used_s = trio.current_time()

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is known to read."""
        return not self.count and trio.current_time() >= self._used_s + READS_SETTLE_S

    async def wait_quiet(self, patience_s: float) -> bool:
        """Return True when nobody reads, or False when that took too long."""
        with trio.move_on_after(patience_s):
            while not self.is_quiet:
                if self.count:
                    await self._ended.wait()
                else:
                    await trio.sleep_until(self._used_s + READS_SETTLE_S)
            return True
        return False
