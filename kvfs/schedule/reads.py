"""What is under way: reads, the ranges that they bring, and which of them are late."""

from bisect import bisect_left, insort

from kvfs.schedule.words import Memory, ReadKind


class Piece:
    """A range of a chunk that is under way, and the reads that bring it: more than one where it is
    hedged."""

    __slots__ = ("begin", "chunk", "end", "flow", "flow_end", "job", "reads")

    def __init__(self, job: int, chunk: int, begin: int, end: int) -> None:
        self.job = job
        self.chunk = chunk
        self.begin = begin
        self.end = end
        self.reads: list[Read] = []
        self.flow = 0.0  # bytes in a nanosecond that are expected to come, and how many of such
        self.flow_end = 0.0  # there would be from the beginning of time until its end


class Read:
    """A slot of a tier in use. `piece` is None once its bytes are not wanted any more."""

    __slots__ = (
        "began_ns", "beside", "end_ns", "into", "is_hedgeable", "is_late", "is_stalled", "is_trial",
        "kind", "number", "piece", "share_ns", "size_bytes", "tears", "tier",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        tier: int,
        piece: Piece,
        kind: ReadKind,
        into: Memory,
        began_ns: int,
        end_ns: int,
        beside: int,
    ) -> None:
        self.number = number
        self.tier = tier
        self.piece: Piece | None = piece
        self.kind = kind
        self.into = into
        self.size_bytes = piece.end - piece.begin
        self.began_ns = began_ns
        self.end_ns = end_ns  # expected
        self.beside = beside  # reads of its tier, with it, when it began
        self.share_ns = 0.0  # of its tier, when it began
        self.is_hedgeable = False
        self.is_late = False
        self.is_stalled = False
        self.is_trial = False
        self.tears: Piece | None = None  # its range, once cancelled, while it may still write there

    def left_ns(self, now_ns: int) -> int:
        """How much longer it is expected to take: what is late by some time, by as much again."""
        return abs(self.end_ns - now_ns)


class Hedgeable:
    """Reads of which one more copy may be made, by when they are expected to end."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: list[tuple[int, int, Read]] = []  # when, read's number, read

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_late(self) -> bool:
        """Whether the first is late."""
        return bool(self._order) and self._order[0][2].is_late

    def add(self, read: Read) -> None:
        """From now on, one more copy of it may be made."""
        if not read.is_hedgeable:
            read.is_hedgeable = True
            insort(self._order, (read.end_ns, read.number, read))

    def discard(self, read: Read) -> None:
        """No more."""
        if read.is_hedgeable:
            read.is_hedgeable = False
            del self._order[bisect_left(self._order, (read.end_ns, read.number))]

    def earliest(self, most: int) -> list[Read]:
        """Those expected first: among them are all that should have ended by now."""
        return [read for _, _, read in self._order[:most]]

    def latest(self, most: int) -> list[Read]:
        """Those expected last, the last of all first."""
        return [read for _, _, read in self._order[: -most - 1 : -1]]
