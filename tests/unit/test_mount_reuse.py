"""Which answers to opens pyfuse3 gives again, and what becomes of who has them open."""

from collections.abc import Sequence

import pytest
import trio
import trio.testing

pytest.importorskip("pyfuse3", reason="mount.reuse is about pyfuse3")

from kvfs.config import REUSED_MAX, REUSED_S
from mount.reuse import ReusedOpens


class Pyfuse3:
    """Its table of answers: how many are open with each, and how often it was given."""

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}

    def answer(self, number: int) -> None:
        """The open whose answer is kept, or one that gets it again."""
        counts = self.kept.setdefault(number, [0, 0])
        counts[0] += 1
        counts[1] += 1

    def release(self, number: int) -> None:
        self.kept[number][0] -= 1

    def withdraw_open(self, inode: int) -> int:
        return self.kept.pop(inode)[0]

    def reusable_opens(self) -> Sequence[tuple[int, int, int]]:
        return [(number, opens, times) for number, (opens, times) in self.kept.items()]


class Rig:
    def __init__(self) -> None:
        self.pyfuse3 = Pyfuse3()
        self.ended: list[int] = []
        self.touched: list[int] = []
        self.reuse = ReusedOpens(self.pyfuse3, self.ended.append, self.touched.extend)

    def open(self, number: int) -> None:
        """An open with the handle 100 + number, of the inode 200 + number."""
        assert self.reuse.keep(number, 200 + number, 100 + number)
        self.pyfuse3.answer(number)


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_an_inode_has_one_answer_at_a_time(rig: Rig) -> None:
    rig.open(1)
    assert not rig.reuse.keep(1, 201, 150)
    rig.reuse.withdraw(1)
    assert rig.reuse.keep(1, 201, 150)


async def test_what_nobody_has_open_ends_when_it_is_withdrawn(rig: Rig) -> None:
    rig.open(1)
    rig.pyfuse3.answer(1)
    rig.pyfuse3.release(1)
    rig.pyfuse3.release(1)
    assert rig.reuse.count_idle() == 1
    rig.reuse.withdraw(1)
    rig.reuse.withdraw(1)  # it is no more
    assert rig.ended == [101]
    assert rig.pyfuse3.kept == {}
    assert rig.reuse.count_idle() == 0


async def test_who_has_it_open_ends_it_by_the_last_release(rig: Rig) -> None:
    rig.open(1)
    rig.pyfuse3.answer(1)
    rig.reuse.withdraw(1)
    assert not rig.reuse.is_last(101)
    assert rig.reuse.is_last(101)
    assert rig.ended == [], "the release ends it"
    assert rig.reuse.is_last(77), "a handle of its own"


async def test_more_than_the_bound_push_the_oldest_out(rig: Rig) -> None:
    for number in range(1, REUSED_MAX + 2):
        rig.open(number)
        rig.pyfuse3.release(number)
    assert rig.ended == [101]
    assert len(rig.pyfuse3.kept) == REUSED_MAX


async def test_they_end_in_time_and_their_uses_are_noted(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    rig.open(1)
    rig.open(2)
    rig.pyfuse3.answer(2)
    for number in (1, 2, 2):
        rig.pyfuse3.release(number)
    await trio.sleep(0.75 * REUSED_S)
    assert rig.ended == []
    assert set(rig.touched) == {202}, "the first open has noted itself"
    rig.open(3)
    await trio.sleep(0.5 * REUSED_S)
    assert rig.ended == [101, 102]
    await trio.sleep(REUSED_S)
    assert set(rig.pyfuse3.kept) == set()
    assert rig.ended == [101, 102], "the third is open"
    assert rig.reuse.is_last(103)


async def test_all_end_when_room_is_short(rig: Rig) -> None:
    for number in (1, 2):
        rig.open(number)
        rig.pyfuse3.answer(number)
    rig.pyfuse3.release(1)
    rig.pyfuse3.release(1)
    rig.reuse.withdraw_all()
    assert rig.ended == [101]
    assert sorted(rig.touched) == [201, 202]
    assert rig.pyfuse3.kept == {}
