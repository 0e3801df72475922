"""Which files leave when room is needed: a pure decision over a view of the metadata.

Least recently used first, with four exceptions. A pinned or kept file never goes. A chunk never
goes before the cached chunks that continue it, since they are useless without it. So the ancestors
of a file that stays, stay. And of the coldest files of all those go first whose bytes other nodes
have as well: they are missed less than a last copy.

`plan` walks the eviction order from its cold end. A chunk that comes up while its continuations are
cached moves just behind the newest of them, and so does each chunk on the way down to that one: a
chain of N chunks that are in the wrong order is put right in one walk, and what was put right is
remembered by `restamp`, so that the work is done once. What must stay moves to the hot end.
"""

import heapq
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvfs.config import EVICTION_QUESTIONS_MAX, EVICTION_WINDOW
from kvfs.meta.contract import Candidate

_PAGE = 32  # candidates read at once
_CONTINUATIONS = 64  # of a chunk, looked at in one step; the others get their turn when these went


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: `restamp` first, then remove all names of `evict`, in this order.

    Without `evict`, the stamps are what a walk found that was cut short: those that stay are out of
    the way of the next. With neither, nothing can go.
    """

    evict: tuple[int, ...]
    restamp: tuple[tuple[int, int], ...]  # ino, used_ns
    freed_bytes: int


class EvictionView(Protocol):
    """What eviction needs to know; `MetaEngine` has it."""

    def coldest(
        self, limit: int, after: tuple[int, int] = (0, 0), directory: int | None = None
    ) -> list[Candidate]: ...

    def continuations(self, ino: int, after: int, limit: int) -> list[Candidate]: ...

    def newest_used_ns(self) -> int: ...


def plan(
    view: EvictionView,
    need_bytes: int,
    limit: int,
    *,
    directory: int | None = None,
    kept: Container[int] = (),
    until_ns: int | None = None,
    elsewhere: Callable[[Sequence[bytes]], Container[bytes]] | None = None,
) -> Decision:
    """Choose at most `limit` files whose going frees `need_bytes`; fewer, or none yet, when that
    takes long. Plan again while room is needed and the decision is not empty.

    `directory`: only bytes in this store directory count, and only its files go, but for those that
    continue one of them. `kept`: files in use, treated as if pinned. `until_ns`: the newest stamp
    when the first of several plans was made; where they come to what has a newer one, all have been
    looked at. `elsewhere`: which of these digests other nodes have as well.
    """
    made = _Plan(view, directory, kept, need_bytes, limit, until_ns)
    if elsewhere is not None:
        made.take_copies(elsewhere)
    return made.run()


class _Plan:
    """One decision in the making: the order of eviction as `view` has it, overlaid with what was
    decided so far."""

    def __init__(
        self,
        view: EvictionView,
        directory: int | None,
        kept: Container[int],
        need_bytes: int,
        limit: int,
        until_ns: int | None,
    ) -> None:
        self._view = view
        self._directory = directory
        self._kept = kept
        self._need_bytes = need_bytes
        self._limit = limit
        self._until_ns = until_ns
        self._evicted: dict[int, None] = {}
        self._stays: dict[int, None] = {}  # kept, or with a continuation that stays
        self._stamps: dict[int, int] = {}
        self._moved: list[tuple[int, int, Candidate]] = []  # heap: those out of `view`'s order
        self._gone_references: dict[bytes, int] = {}
        self._freed_bytes = 0
        self._questions = 0

    def take_copies(self, elsewhere: Callable[[Sequence[bytes]], Container[bytes]]) -> None:
        """Evict, of the coldest files, those that other nodes have as well; the others are left
        for `run`, as if nobody had looked at them."""
        coldest = list(islice(self._stream(), EVICTION_WINDOW))
        if self._until_ns is not None:
            coldest = [c for c in coldest if c.used_ns <= self._until_ns]
        copied = elsewhere([candidate.digest for candidate in coldest]) if coldest else ()
        for candidate in coldest:
            if self._is_enough() or self._questions >= EVICTION_QUESTIONS_MAX:
                break
            if candidate.digest not in copied or self._must_stay(candidate):
                continue
            if not self._cached_continuations(candidate.ino):
                self._evict(candidate)

    def _is_enough(self) -> bool:
        return self._freed_bytes >= self._need_bytes or len(self._evicted) >= self._limit

    def run(self) -> Decision:
        is_cut = False
        until_ns = self._until_ns
        for candidate in self._in_order():
            if self._is_enough():
                break
            if until_ns is not None and not self._evicted and candidate.used_ns > until_ns:
                break
            if self._questions >= EVICTION_QUESTIONS_MAX:
                is_cut = True
                break
            self._judge(candidate)
        if not self._evicted and not is_cut:
            return Decision((), (), 0)
        end_ns = self._view.newest_used_ns()
        stays = [(ino, end_ns + place) for place, ino in enumerate(self._stays, 1)]
        moved = [
            (ino, used_ns)
            for ino, used_ns in self._stamps.items()
            if ino not in self._evicted and ino not in self._stays
        ]
        return Decision(tuple(self._evicted), (*moved, *stays), self._freed_bytes)

    def _in_order(self) -> Iterator[Candidate]:
        """Candidates by (stamp, ino), each where it belongs by now."""
        stream = self._stream()
        head = next(stream, None)
        while head is not None or self._moved:
            if head is not None and head.ino in self._stamps:
                head = next(stream, None)  # it is among the moved ones, or was
                continue
            if head is None or (self._moved and self._moved[0][:2] < (head.used_ns, head.ino)):
                stamp, ino, candidate = heapq.heappop(self._moved)
                if self._stamps[ino] == stamp:
                    yield candidate
            else:
                yield head
                head = next(stream, None)

    def _stream(self) -> Iterator[Candidate]:
        after = (0, 0)
        while page := self._view.coldest(_PAGE, after, self._directory):
            yield from page
            after = (page[-1].used_ns, page[-1].ino)

    def _judge(self, candidate: Candidate) -> None:
        if candidate.ino in self._evicted or candidate.ino in self._stays:
            return
        if self._must_stay(candidate):
            self._questions += 1
            self._stays[candidate.ino] = None
            return
        line = [candidate]
        while continuations := self._cached_continuations(line[-1].ino):
            if any(self._must_stay(c) for c in continuations):
                self._stays.update(dict.fromkeys(c.ino for c in reversed(line)))
                return
            newest = max(continuations, key=lambda c: (self._stamp(c), c.ino))
            is_ordered = self._stamp(newest) < self._stamp(line[-1])
            line.append(newest)
            if is_ordered or self._questions >= EVICTION_QUESTIONS_MAX:
                break
        if len(line) == 1:
            self._evict(candidate)
            return
        behind_ns = 0
        for member in reversed(line):
            behind_ns = max(self._stamp(member), behind_ns + 1)
            self._move(member, behind_ns)

    def _must_stay(self, candidate: Candidate) -> bool:
        return candidate.is_pinned or candidate.ino in self._kept or candidate.ino in self._stays

    def _stamp(self, candidate: Candidate) -> int:
        return self._stamps.get(candidate.ino, candidate.used_ns)

    def _cached_continuations(self, ino: int) -> Sequence[Candidate]:
        after = 0
        self._questions += 1
        while page := self._view.continuations(ino, after, _CONTINUATIONS):
            cached = [c for c in page if c.ino not in self._evicted]
            if cached:
                return cached
            after = page[-1].ino
        return ()

    def _move(self, candidate: Candidate, used_ns: int) -> None:
        self._stamps[candidate.ino] = used_ns
        heapq.heappush(self._moved, (used_ns, candidate.ino, candidate))

    def _evict(self, candidate: Candidate) -> None:
        self._evicted[candidate.ino] = None
        gone = self._gone_references.get(candidate.digest, 0) + 1
        self._gone_references[candidate.digest] = gone
        is_wanted = self._directory is None or candidate.directory == self._directory
        if is_wanted and gone == candidate.references:
            self._freed_bytes += candidate.allocated_bytes
