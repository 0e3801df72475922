"""What was brought here and not read yet: what becomes of it, and what was no good guess."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvfs.config import PREFETCH_SWEPT_MAX, PREFETCH_UNUSED_MAX, PREFETCH_WASTED_MAX
from kvfs.prefetch.words import Cause, Tally


@dataclass(frozen=True, slots=True)
class _Brought:
    cause: Cause
    size_bytes: int


class Unread:
    """Counts into `tallies`. Of too many blobs the oldest are forgotten, and count as nothing."""

    def __init__(self, tallies: Mapping[Cause, Tally]) -> None:
        self._tallies = tallies
        self._brought: OrderedDict[bytes, _Brought] = OrderedDict()
        self._wasted: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._brought)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._brought

    def add(self, digest: bytes, cause: Cause, size_bytes: int) -> None:
        """A blob is here, and nobody has read it."""
        self._brought[digest] = _Brought(cause, size_bytes)
        if len(self._brought) > PREFETCH_UNUSED_MAX:
            self._brought.popitem(last=False)

    def use(self, digest: bytes) -> None:
        """Somebody reads a blob."""
        one = self._brought.pop(digest, None)
        if one is not None:
            self.count_used(one.cause, one.size_bytes)

    def count_used(self, cause: Cause, size_bytes: int) -> None:
        """What was brought for a cause is read."""
        self._tallies[cause].used += 1
        self._tallies[cause].used_bytes += size_bytes

    def waste(self, digest: bytes) -> None:
        """A blob is not here any more."""
        one = self._brought.pop(digest, None)
        if one is not None:
            self._tallies[one.cause].wasted += 1
            self._tallies[one.cause].wasted_bytes += one.size_bytes
            self._wasted[digest] = None
            if len(self._wasted) > PREFETCH_WASTED_MAX:
                self._wasted.popitem(last=False)

    def sweep(self, is_here: Callable[[bytes], bool]) -> None:
        """Look at some of all, others each time."""
        for digest in list(islice(self._brought, PREFETCH_SWEPT_MAX)):
            if is_here(digest):
                self._brought.move_to_end(digest)
            else:
                self.waste(digest)

    def is_wasted(self, digest: bytes) -> bool:
        """Whether a blob was brought in vain, and not read since."""
        return digest in self._wasted

    def forgive(self, digest: bytes) -> None:
        """Somebody did read a blob."""
        self._wasted.pop(digest, None)
