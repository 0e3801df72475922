"""Which bytes of a blob are fetched next, and which may be read: decisions, without I/O.

A blob is cut into pieces. Who fetches takes a *run* of pieces, and says whether it landed or
failed; a run that failed is taken again by whoever comes next. Runs follow each other from the
start to the end, and from where a reader waits: that piece is next, alone, so that its reader has
it soon, and what follows it comes after it. What is left behind is taken when the end was reached.

The digest of a blob is known only when all of it has landed. So the last run to land is shown to
nobody before `confirm`: who has read every byte has read bytes that were checked.
"""

from dataclasses import dataclass

_MISSING, _TAKEN, _LANDED = b"\0", b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes from `begin` up to `end`."""

    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, eq=False)
class Want:
    """Bytes that a reader waits for. It is told once: `is_here` says what became of them."""

    run: Run
    is_here: bool | None = None


class Pieces:
    """The pieces of one blob."""

    def __init__(self, size_bytes: int, piece_bytes: int) -> None:
        assert size_bytes >= 0 and piece_bytes > 0
        self.size_bytes = size_bytes
        self._piece_bytes = piece_bytes
        self._count = -(-size_bytes // piece_bytes)
        self._states = bytearray(self._count)
        self._next = 0  # where the next run begins, if nobody waits for another place
        self._prefix = 0  # so many pieces from the start have landed
        self._landed = 0
        self._last: Run | None = None  # the run that landed last of all, until `confirm`
        self._wants: list[Want] = []
        self.is_confirmed = False
        self.is_given_up = False

    @property
    def prefix_bytes(self) -> int:
        """So many bytes from the start have landed."""
        return min(self.size_bytes, self._prefix * self._piece_bytes)

    @property
    def has_landed(self) -> bool:
        """Whether all bytes have."""
        return self._landed == self._count

    def shows(self, begin: int, end: int) -> bool:
        """Whether bytes may be read now. What lies behind the end is no byte."""
        end = min(end, self.size_bytes)
        if self.is_confirmed or begin >= end:
            return not self.is_given_up
        first, behind = begin // self._piece_bytes, -(-end // self._piece_bytes)
        if self.is_given_up or self._states.count(_LANDED, first, behind) < behind - first:
            return False
        last = self._last
        return last is None or end <= last.begin or begin >= last.end

    # For who reads --------------------------------------------------------------------------------
    def want(self, begin: int, end: int) -> Want:
        """Have bytes fetched next that are not shown yet."""
        assert not self.shows(begin, end) and not self.is_given_up
        want = Want(Run(begin, min(end, self.size_bytes)))
        self._wants.append(want)
        return want

    def forget(self, want: Want) -> None:
        """Nobody waits for it any more, or it was told."""
        if want in self._wants:
            self._wants.remove(want)

    # For who fetches ------------------------------------------------------------------------------
    def take(self, pieces_max: int) -> Run | None:
        """What to fetch now, of so many pieces at most; None while all that is left is under way or
        here."""
        assert pieces_max > 0
        for want in self._wants:
            first = want.run.begin // self._piece_bytes
            behind = -(-want.run.end // self._piece_bytes)
            index = self._states.find(_MISSING, first, behind)
            if index >= 0:
                return self._take(index, pieces_max)
        index = self._states.find(_MISSING, self._next)
        if index < 0:
            index = self._states.find(_MISSING, self._prefix)
        return None if index < 0 else self._take(index, pieces_max)

    def _take(self, index: int, pieces_max: int) -> Run:
        """A run that begins with a piece: only that where it begins at a new place."""
        is_new_place = index == 0 or self._states[index - 1] == _MISSING[0]
        behind = index + 1
        most = index + (1 if is_new_place else pieces_max)
        while behind < min(most, self._count) and self._states[behind] == _MISSING[0]:
            behind += 1
        self._states[index:behind] = _TAKEN * (behind - index)
        self._next = behind
        return Run(index * self._piece_bytes, min(self.size_bytes, behind * self._piece_bytes))

    def land(self, run: Run) -> list[Want]:
        """A run that was taken is here; who may read now what they waited for."""
        self._mark(run, _LANDED)
        while self._prefix < self._count and self._states[self._prefix] == _LANDED[0]:
            self._prefix += 1
        if self.has_landed:
            self._last = run
        return self._settle()

    def fail(self, run: Run) -> None:
        """A run that was taken did not come: somebody else may take it."""
        self._mark(run, _MISSING)
        self._next = min(self._next, run.begin // self._piece_bytes)

    def _mark(self, run: Run, state: bytes) -> None:
        first, behind = run.begin // self._piece_bytes, -(-run.end // self._piece_bytes)
        assert self._states.count(_TAKEN, first, behind) == behind - first, "taken once"
        self._states[first:behind] = state * (behind - first)
        if state == _LANDED:
            self._landed += behind - first

    def confirm(self) -> list[Want]:
        """All have landed and their digest is right; who may read now."""
        assert self.has_landed
        self.is_confirmed, self._last = True, None
        return self._settle()

    def start_over(self) -> None:
        """All have landed and are wrong, and nobody was shown any: fetch them once more."""
        assert self.has_landed and not self.is_confirmed
        self._states = bytearray(self._count)
        self._next = self._prefix = self._landed = 0
        self._last = None

    def give_up(self) -> list[Want]:
        """The rest does not come, or what came is wrong: who waits is told so, and nothing is shown
        any more."""
        assert not self.is_confirmed
        self.is_given_up = True
        told, self._wants = self._wants, []
        for want in told:
            want.is_here = False
        return told

    def _settle(self) -> list[Want]:
        told = [want for want in self._wants if self.shows(want.run.begin, want.run.end)]
        for want in told:
            want.is_here = True
            self._wants.remove(want)
        return told
