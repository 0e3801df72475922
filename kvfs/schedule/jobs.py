"""The chunks of one job: which are unread, which tier may give them, what is still to come.

Which chunk comes next for a tier is found in bit masks, a thousand chunks in one: what is unread
and what the tier holds, both at once. So a tier that holds a job's last chunk only finds it without
a walk over the others, and tiers forget nothing when another takes a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.schedule.reads import Piece
from kvfs.schedule.tiers import Holders
from kvfs.schedule.words import Chunk

_BITS = 10  # of a chunk's number that are inside a mask
_SPAN = 1 << _BITS


@dataclass(slots=True)
class Split:
    """A chunk that is read in parts: what nobody has begun of it, and what is there."""

    rest: list[tuple[int, int]]  # ranges; the last is next
    landed_bytes: int = 0
    cut: int = 1  # parts that it was ever cut into
    gave: set[int] = field(default_factory=set)  # tiers of the ranges that are there


@dataclass(slots=True)
class Trouble:
    """What went wrong with one chunk so far."""

    tries: int = 0
    resting: set[int] = field(default_factory=set)  # tiers that failed, and may do better later
    without: set[int] = field(default_factory=set)  # those that have it not, or wrong: never again
    is_whole: bool = False  # it may not be split any more: its parts did not fit together

    def rest(self, tier: int) -> None:
        """A tier failed with it."""
        if tier not in self.without:
            self.resting.add(tier)

    def exclude(self, tier: int) -> None:
        """A tier has it not, or wrong."""
        self.without.add(tier)
        self.resting.discard(tier)


class Job:
    """One job's chunks. `order` is its place among jobs: the least is served first."""

    __slots__ = (
        "_bare", "_held", "_near", "_unread", "chunks", "holders", "is_idle", "is_pooled", "left",
        "listed", "lost", "number", "order", "pieces", "splits", "tiers", "torn", "troubles",
        "unread_bytes", "unread_count",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        order: tuple[float, int],
        chunks: tuple[Chunk, ...],
        holders: list[Holders],
        *,
        is_idle: bool,
        is_pooled: bool = False,
    ) -> None:
        self.number = number
        self.order = order
        self.chunks = chunks
        self.holders = holders  # of each chunk
        self.is_idle = is_idle
        self.is_pooled = is_pooled
        self.left = len(chunks)  # neither done nor lost
        self.unread_count = len(chunks)
        self.unread_bytes = sum(chunk.size_bytes for chunk in chunks)
        self.lost: list[int] = []
        self.pieces: dict[tuple[int, int], Piece] = {}  # under way, by chunk and where they begin
        self.splits: dict[int, Split] = {}
        self.troubles: dict[int, Trouble] = {}
        self.listed: set[int] = set()  # tiers in whose list of jobs this one is
        # Ranges of chunks' memory to which reads that were cancelled may still write.
        self.torn: dict[int, list[tuple[int, int]]] = {}
        self._unread: list[int] = []
        self._held: dict[int, list[int]] = {}
        self._near: dict[int, int] = {}  # masks that may have something for a tier: a mask of them
        self._fill()
        self._bare = self._unread.copy() if is_pooled else []  # chunks that have no buffer yet
        self.tiers = tuple(self._held)

    @property
    def entry(self) -> "tuple[float, int, Job]":
        """What it is in lists of jobs in which the last is the next one."""
        return -self.order[0], -self.order[1], self

    def _fill(self) -> None:
        count = len(self.chunks)
        masks = -(-count // _SPAN)
        for at in range(masks):
            begin, end = at * _SPAN, min(count, at * _SPAN + _SPAN)
            self._unread.append((1 << (end - begin)) - 1)
            together: dict[int, tuple[Holders, int]] = {}  # a pass over tiers for each set of them
            for number in range(begin, end):
                holders = self.holders[number]
                found = together.get(id(holders))
                mask = (found[1] if found else 0) | 1 << (number - begin)
                together[id(holders)] = (holders, mask)
            for holders, mask in together.values():
                for tier in holders.tiers:
                    held = self._held.get(tier)
                    if held is None:
                        held = self._held[tier] = [0] * masks
                    held[at] |= mask
        for tier, held in self._held.items():
            self._near[tier] = sum(1 << at for at, mask in enumerate(held) if mask)

    def next_for(self, tier: int) -> int:
        """The first unread chunk that a tier may give; -1: none."""
        near = self._near.get(tier, 0)
        while near:
            low = near & -near
            at = low.bit_length() - 1
            found = self._unread[at] & self._held[tier][at]
            if found:
                self._near[tier] = near
                return (at << _BITS) + (found & -found).bit_length() - 1
            near ^= low  # until something of it is put back
        self._near[tier] = 0
        return -1

    # Memory ---------------------------------------------------------------------------------------
    def with_memory(self, tier: int, first: int, has_buffers: bool, has_scratch: bool) -> int:
        """The first unread chunk that a tier may give and that there is memory for, from the one
        that is `first` of all; -1: none."""
        for at in range(first >> _BITS, len(self._unread)):
            found = self._unread[at] & self._held[tier][at]
            if self.is_pooled and not has_buffers:
                found &= ~self._bare[at]
            while found:
                low = found & -found
                found ^= low
                chunk = (at << _BITS) + low.bit_length() - 1
                if has_scratch or not self.torn or not self._is_torn(chunk, *self._next_of(chunk)):
                    return chunk
        return -1

    def needs_buffer(self, chunk: int) -> bool:
        """Whether a chunk has no memory yet: its next read takes a buffer of the pool."""
        return self.is_pooled and bool(self._bare[chunk >> _BITS] >> (chunk & (_SPAN - 1)) & 1)

    def take_buffer(self, chunk: int) -> None:
        """It has one from now on, until it is done or lost."""
        self._bare[chunk >> _BITS] &= ~(1 << (chunk & (_SPAN - 1)))

    def is_torn(self, piece: Piece) -> bool:
        """Whether a read that was cancelled may still write where a piece's bytes go."""
        return self._is_torn(piece.chunk, piece.begin, piece.end)

    def _is_torn(self, chunk: int, begin: int, end: int) -> bool:
        return any(begin < other[1] and other[0] < end for other in self.torn.get(chunk, ()))

    def _next_of(self, chunk: int) -> tuple[int, int]:
        """The range of an unread chunk of which the next read takes some, or all."""
        split = self.splits.get(chunk)
        return split.rest[-1] if split is not None else (0, self.chunks[chunk].size_bytes)

    def may_give(self, tier: int, chunk: int) -> bool:
        """Whether a tier holds a chunk and has not failed with it."""
        held = self._held.get(tier)
        return held is not None and bool(held[chunk >> _BITS] >> (chunk & (_SPAN - 1)) & 1)

    def is_unread(self, chunk: int) -> bool:
        """Whether nobody has begun some of a chunk."""
        return bool(self._unread[chunk >> _BITS] >> (chunk & (_SPAN - 1)) & 1)

    def bar(self, tier: int, chunk: int) -> None:
        """A tier gives this chunk no more."""
        self._held[tier][chunk >> _BITS] &= ~(1 << (chunk & (_SPAN - 1)))

    def admit(self, tier: int, chunk: int) -> None:
        """It may again."""
        at = chunk >> _BITS
        self._held[tier][at] |= 1 << (chunk & (_SPAN - 1))
        self._near[tier] |= 1 << at

    # What is unread -------------------------------------------------------------------------------
    def take(self, chunk: int, size_bytes: int) -> tuple[int, int]:
        """Take so many of a chunk's unread bytes, or fewer where they lie apart; the range."""
        size = self.chunks[chunk].size_bytes
        split = self.splits.get(chunk) if self.splits else None
        if split is None:
            if size_bytes >= size:
                self._unread[chunk >> _BITS] ^= 1 << (chunk & (_SPAN - 1))
                self.unread_count -= 1
                self.unread_bytes -= size
                return 0, size
            split = self.splits[chunk] = Split([(0, size)])
        begin, end = split.rest.pop()
        cut = min(end, begin + size_bytes)
        if cut < end:
            split.rest.append((cut, end))
            split.cut += 1
        elif not split.rest:
            self._close(chunk)
        self.unread_bytes -= cut - begin
        return begin, cut

    def rest_of(self, chunk: int) -> int:
        """How many bytes `take` gives of an unread chunk at most."""
        split = self.splits.get(chunk) if self.splits else None
        if split is None:
            return self.chunks[chunk].size_bytes
        begin, end = split.rest[-1]
        return end - begin

    def put_back(self, chunk: int, begin: int, end: int) -> None:
        """A range that was taken is unread again."""
        split = self.splits.get(chunk)
        if split is not None:
            split.rest.append((begin, end))
        self.unread_bytes += end - begin
        at, bit = chunk >> _BITS, 1 << (chunk & (_SPAN - 1))
        if not self._unread[at] & bit:
            self._unread[at] |= bit
            self.unread_count += 1
        for tier in self.holders[chunk].tiers:
            self._near[tier] |= 1 << at

    def drop(self, chunk: int) -> None:
        """What is unread of a chunk is not wanted any more."""
        at, bit = chunk >> _BITS, 1 << (chunk & (_SPAN - 1))
        split = self.splits.pop(chunk, None)
        if self._unread[at] & bit:
            ranges = split.rest if split else [(0, self.chunks[chunk].size_bytes)]
            self.unread_bytes -= sum(end - begin for begin, end in ranges)
            self._close(chunk)

    def _close(self, chunk: int) -> None:
        self._unread[chunk >> _BITS] ^= 1 << (chunk & (_SPAN - 1))
        self.unread_count -= 1

    # When a tier goes -----------------------------------------------------------------------------
    def without(self, usable: frozenset[int]) -> Iterator[int]:
        """Unread chunks that none of these tiers may give. A walk over masks, not over chunks."""
        held = [masks for tier, masks in self._held.items() if tier in usable]
        for at, unread in enumerate(self._unread):
            left = unread
            for masks in held:
                left &= ~masks[at]
            while left:
                low = left & -left
                left ^= low
                yield (at << _BITS) + low.bit_length() - 1
