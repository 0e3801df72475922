"""Which answers to opens pyfuse3 gives again, and what becomes of who has them open."""

from collections.abc import Sequence

import pytest
import trio
import trio.testing

pytest.importorskip("pyfuse3", reason="mount.reuse is about pyfuse3")

from kvfs.config import REUSED_LOOK_S, REUSED_MAX, REUSED_S
from mount.reuse import ReusedOpens


class Pyfuse3:
    """Its table of answers: how many are open with each, and how often it was given."""

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.lists_all = True  # else it has no memory for that

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
        items = self.kept.items() if self.lists_all else ()
        return [(number, opens, times) for number, (opens, times) in items]


class Rig:
    def __init__(self) -> None:
        self.pyfuse3 = Pyfuse3()
        self.ended: list[int] = []
        self.touched: list[int] = []
        self.changed: set[int] = set()  # handles whose files an open would find changed
        self.reuse = ReusedOpens(
            self.pyfuse3,
            self.ended.append,
            self.touched.extend,
            lambda fh: fh not in self.changed,
        )

    def open(self, number: int) -> None:
        """An open with the handle 100 + number, of the inode 200 + number."""
        assert self.reuse.keep(number, 200 + number, 100 + number)
        self.pyfuse3.answer(number)

    def reopen(self, number: int) -> None:
        """Open and close it again, with the answer that was kept."""
        self.pyfuse3.answer(number)
        self.pyfuse3.release(number)


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


async def test_the_bound_pushes_out_what_is_not_used(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    for number in range(1, REUSED_MAX + 1):
        rig.open(number)
        rig.pyfuse3.release(number)
    rig.reopen(1)
    await trio.sleep(1.5 * REUSED_LOOK_S)
    rig.open(REUSED_MAX + 1)
    assert rig.ended == [102]


async def test_they_end_in_time_and_their_uses_are_noted(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    rig.open(1)
    rig.open(2)
    for number in (1, 2):
        rig.pyfuse3.release(number)
    rig.reopen(2)
    await trio.sleep(1.5 * REUSED_LOOK_S)
    assert rig.touched == [202], "the first open has noted itself"
    rig.open(3)
    await trio.sleep(REUSED_S - 2 * REUSED_LOOK_S)
    assert rig.ended == []
    await trio.sleep(2 * REUSED_LOOK_S)
    assert rig.ended == [101, 102]
    await trio.sleep(2 * REUSED_LOOK_S)
    assert set(rig.pyfuse3.kept) == set()
    assert rig.ended == [101, 102], "the third is open"
    assert rig.reuse.is_last(103)
    assert rig.touched == [202], "once for one use"


async def test_what_is_used_is_kept_and_each_use_is_noted(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    rig.open(1)
    rig.pyfuse3.release(1)
    for _ in range(5):
        rig.reopen(1)
        await trio.sleep(0.9 * REUSED_S)
    assert rig.ended == []
    assert rig.touched == 5 * [201]
    await trio.sleep(REUSED_S)
    assert rig.ended == [101]


async def test_what_was_changed_ends_at_the_next_look_used_or_not(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    for number in range(1, 41):  # more than are looked at in one turn
        rig.open(number)
        rig.pyfuse3.release(number)
    await trio.sleep(1.5 * REUSED_LOOK_S)
    rig.changed = {101, 120, 140}
    rig.reopen(20)
    await trio.sleep(REUSED_LOOK_S)
    assert sorted(rig.ended) == [101, 120, 140]
    assert rig.touched == [220], "it was used, and what its bytes are is for the next open"


async def test_what_is_withdrawn_while_others_are_looked_at_is_let_be(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """In the middle of a look others have a turn, and one of them opens a file anew."""

    def look(fh: int) -> bool:
        if fh == 101:
            rig.reuse.withdraw(40)
            rig.reuse.withdraw(39)
            assert rig.reuse.keep(39, 239, 150)
            rig.pyfuse3.answer(39)
        assert fh not in (139, 140)
        return True

    rig.reuse = ReusedOpens(rig.pyfuse3, rig.ended.append, rig.touched.extend, look)
    for number in range(1, 41):
        rig.open(number)
        rig.pyfuse3.release(number)
    nursery.start_soon(rig.reuse.run)
    await trio.sleep(1.5 * REUSED_LOOK_S)
    assert sorted(rig.ended) == [139, 140]
    assert len(rig.pyfuse3.kept) == 39


async def test_an_answer_that_there_was_no_memory_for_is_an_open_as_others(rig: Rig) -> None:
    assert rig.reuse.keep(1, 201, 101)
    rig.reuse.withdraw(1)
    assert rig.ended == []
    assert rig.reuse.is_last(101), "its release ends it"


async def test_uses_that_there_was_no_memory_to_list_are_noted_later(
    rig: Rig, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(rig.reuse.run)
    rig.open(1)
    rig.reopen(1)
    rig.pyfuse3.lists_all = False
    await trio.sleep(1.5 * REUSED_LOOK_S)
    assert rig.touched == []
    rig.pyfuse3.lists_all = True
    await trio.sleep(REUSED_LOOK_S)
    assert rig.touched == [201]


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
