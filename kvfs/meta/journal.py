"""What a node did last, for as long as a server might forget it.

A replica that is promoted may be behind: what its primary had answered for last, it never heard of.
So has a server that starts from an older file. Each transaction therefore has a mark, made of the
one before and of its own name: whoever knows the number and the mark of one transaction can say
whether a server's history is the one that it knows. Of its own transactions a node keeps the last
ones, to do those again that a server has lost.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvfs.config import CLUSTER_JOURNAL_ENTRIES, CLUSTER_JOURNAL_RECORDS, CLUSTER_REDO_TRIES
from kvfs.meta.shared import Commit

_ANCHOR_EVERY = 1024  # transactions of others between two that are noted


class Standing(IntEnum):
    """What a server says of a transaction, by number and mark."""

    UNKNOWN = -1  # its feed does not go back as far
    LOST = 0
    DONE = 1


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a server's history."""

    sequence: int
    mark: bytes


@dataclass(frozen=True, slots=True)
class Deed:
    """A transaction of this node, or of others where there is no `commit`."""

    at: Point
    commit: Commit | None = None
    news: bytes = b""
    inodes: int = 0

    @property
    def records(self) -> int:
        return 0 if self.commit is None else len(self.commit.values) + len(self.commit.writes)


class Journal:
    """The last ones, in the order in which this node learned of them."""

    def __init__(self, at: Point) -> None:
        self._deeds = deque([Deed(at)])
        self._records = 0
        self._heard_to = at.sequence
        self._unheard: dict[int, bytes] = {}  # this node's own, which the feed must show: the marks
        self._is_broken = False

    def note(self, deed: Deed) -> None:
        """This node did it."""
        at = deed.at
        self._is_broken |= at.sequence <= self._heard_to or at.sequence in self._unheard
        self._unheard[at.sequence] = at.mark
        self._keep(deed)

    def _keep(self, deed: Deed) -> None:
        """The oldest ones go."""
        self._deeds.append(deed)
        self._records += deed.records
        while self._records > CLUSTER_JOURNAL_RECORDS or len(self._deeds) > CLUSTER_JOURNAL_ENTRIES:
            self._records -= self._deeds.popleft().records

    def hear(self, at: Point) -> bool:
        """The feed shows this one, after all before it; whether this node knows that it did it."""
        known = self._unheard.pop(at.sequence, None)
        self._is_broken |= known is not None and known != at.mark
        self._heard_to = at.sequence
        if not self._deeds or at.sequence >= self._deeds[-1].at.sequence + _ANCHOR_EVERY:
            self._keep(Deed(at))
        return known is not None

    def is_broken(self, last: Point) -> bool:
        """Whether a server whose feed was heard to its end has lost something of this node's."""
        return self._is_broken or any(number > last.sequence for number in self._unheard)

    def begin_at(
        self, last: Point, ask: Callable[[Sequence[Point]], Sequence[Standing]]
    ) -> tuple[list[Deed], bool]:
        """Go on from here, whatever was before. Returns what the server has lost of this node's,
        oldest first, and whether there may be more than is known here."""
        standings = ask([deed.at for deed in self._deeds])
        lost = [d for d, s in zip(self._deeds, standings, strict=True) if s is Standing.LOST]
        if lost:
            first = self._deeds.index(lost[0])
            is_all = Standing.DONE in standings[:first]
            kept: Iterable[Deed] = [d for d in self._deeds if d not in lost]
            self._deeds = deque(kept)
            self._records = sum(deed.records for deed in self._deeds)
        else:
            is_all = True
        self._heard_to, self._is_broken = last.sequence, False
        self._unheard.clear()
        self._keep(Deed(last))
        return [deed for deed in lost if deed.commit is not None], not is_all


class Redo:
    """Transactions that a server has lost, to be done again in their order. One that finds other
    records than it saw is put off for a round: others may have to do theirs first."""

    def __init__(self) -> None:
        self._round: deque[tuple[Deed, int]] = deque()
        self._next: list[tuple[Deed, int]] = []

    @property
    def is_over(self) -> bool:
        return not (self._round or self._next)

    def add(self, deeds: Iterable[Deed]) -> None:
        self._round += ((deed, 1) for deed in deeds)

    def first(self) -> tuple[Deed, bool] | None:
        """The next one of this round, and whether it is tried for the last time."""
        if self._round:
            deed, tries = self._round[0]
            return deed, tries >= CLUSTER_REDO_TRIES
        self._round += self._next
        self._next.clear()
        return None

    def done(self) -> None:
        """With the first one."""
        self._round.popleft()

    def put_off(self) -> None:
        """The first one, to the next round."""
        deed, tries = self._round.popleft()
        self._next.append((deed, tries + 1))
