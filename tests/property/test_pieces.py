"""A fetch's pieces, by chance: whatever is wanted, fails, stalls and comes, in any order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.cluster.pieces import Pieces, Run, Want


class Fetch(RuleBasedStateMachine):
    """Against a set of the bytes that have landed. A blob's bytes are few, so that all are looked
    at one by one."""

    @initialize(
        size=st.integers(0, 40), piece=st.integers(1, 7), run=st.integers(1, 4)
    )  # fmt: skip
    def begin(self, size: int, piece: int, run: int) -> None:
        self.pieces = Pieces(size, piece)
        self.piece = piece
        self.run = run
        self.size = size
        self.taken: list[Run] = []
        self.landed: set[int] = set()
        self.shown: set[int] = set()
        self.waiting: list[Want] = []

    # A reader's side
    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        begin = data.draw(st.integers(0, self.size + 3))
        end = begin + data.draw(st.integers(0, 9))
        if self.pieces.is_given_up:
            assert not self.pieces.shows(begin, end)
        elif self.pieces.shows(begin, end):
            self.note_shown(begin, end)
        else:
            self.waiting.append(self.pieces.want(begin, end))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        want = data.draw(st.sampled_from(self.waiting))
        self.pieces.forget(want)
        self.waiting.remove(want)

    def note_shown(self, begin: int, end: int) -> None:
        read = set(range(begin, min(end, self.size)))
        assert read <= self.landed
        self.shown |= read

    def note_told(self, told: list[Want], is_here: bool) -> None:
        for want in told:
            assert want.is_here is is_here
            self.waiting.remove(want)  # which fails for one that was told before
            if is_here:
                self.note_shown(want.run.begin, want.run.end)

    # A fetcher's side
    @precondition(lambda self: not self.pieces.is_confirmed and not self.pieces.is_given_up)
    @rule()
    def take(self) -> None:
        run = self.pieces.take(self.run)
        under_way = {at for one in self.taken for at in range(one.begin, one.end)}
        if run is None:
            assert under_way | self.landed == set(range(self.size))
            return
        assert 0 < run.size_bytes <= self.run * self.piece
        bytes_of_run = set(range(run.begin, run.end))
        assert not bytes_of_run & (under_way | self.landed)
        wanted = [
            want for want in self.waiting
            if set(range(want.run.begin, want.run.end)) - under_way - self.landed
        ]  # fmt: skip
        if wanted:  # the first who waits for what nobody fetches is served
            assert bytes_of_run & set(range(wanted[0].run.begin, wanted[0].run.end))
        self.taken.append(run)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.taken))
        self.taken.remove(run)
        self.landed |= set(range(run.begin, run.end))
        if not self.pieces.is_given_up:
            self.note_told(self.pieces.land(run), is_here=True)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.taken))
        self.taken.remove(run)
        self.pieces.fail(run)

    @precondition(lambda self: self.pieces.has_landed and not self.pieces.is_given_up)
    @rule()
    def confirm(self) -> None:
        told = self.pieces.confirm()
        self.note_told(told, is_here=True)
        assert not self.waiting, "all is here, so nobody waits"

    @precondition(lambda self: self.pieces.has_landed and not self.pieces.is_confirmed)
    @precondition(lambda self: not self.shown and not self.pieces.is_given_up)
    @rule()
    def find_wrong(self) -> None:
        self.pieces.start_over()
        self.landed.clear()

    @precondition(lambda self: not self.pieces.is_confirmed and not self.pieces.is_given_up)
    @rule()
    def give_up(self) -> None:
        self.note_told(self.pieces.give_up(), is_here=False)
        assert not self.waiting

    # Always
    @invariant()
    def the_last_is_not_shown_before_the_check(self) -> None:
        if self.size and not self.pieces.is_confirmed:
            assert self.shown != set(range(self.size))
            assert not self.pieces.shows(0, self.size)

    @invariant()
    def what_has_landed_in_order_is_counted(self) -> None:
        missing = set(range(self.size)) - self.landed
        if not self.pieces.is_given_up:
            assert self.pieces.prefix_bytes == min(missing, default=self.size)
            assert self.pieces.has_landed == (not missing)

    def teardown(self) -> None:
        """Whatever happened before: who goes on fetching gets all, and everybody is told."""
        pieces = getattr(self, "pieces", None)
        if pieces is None or pieces.is_given_up or pieces.is_confirmed:
            return
        for run in self.taken:
            pieces.fail(run)
        while (run := pieces.take(2)) is not None:
            self.landed |= set(range(run.begin, run.end))
            self.note_told(pieces.land(run), is_here=True)
        self.note_told(pieces.confirm(), is_here=True)
        assert not self.waiting


TestFetch = Fetch.TestCase


def test_a_reader_who_seeks_is_next_and_what_follows_comes_after() -> None:
    pieces = Pieces(100, 10)
    assert pieces.take(3) == Run(0, 10)  # alone, so that it is here soon
    assert pieces.take(3) == Run(10, 40)
    pieces.want(75, 82)
    assert pieces.take(3) == Run(70, 80)
    assert pieces.take(3) == Run(80, 100)
    assert pieces.take(3) == Run(40, 70)
    assert pieces.take(3) is None
