"""Copies that others want here: what is taken, what is not, and what a flood costs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfs.cluster.hints import Hints
from kvfs.config import HINTED_FETCHES_MAX, HINTS_WAITING_MAX, MIB
from kvfs.counters import Counters
from kvfs.errors import Unavailable
from kvfs.meta.contract import Blob, Candidate, HeldPath, Inode, Usage
from kvfs.node import Node

FILE = 0o100644


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


@dataclass
class FakeMeta:
    """Files by their digest; blobs that are here."""

    files: dict[bytes, Inode] = field(default_factory=dict)
    here: set[bytes] = field(default_factory=set)
    coldest_ns: int = 100
    is_away: bool = False

    def add(self, number: int, size_bytes: int = MIB, used_ns: int = 50) -> bytes:
        made = digest(number)
        self.files[made] = Inode(
            number, FILE, 0, 0, 1, size_bytes, 0, 0, 0, digest=made, used_ns=used_ns
        )
        return made

    def blobs(self, digests: list[bytes]) -> list[Blob | None]:
        return [Blob(d, 1, 1, 0, 1) if d in self.here else None for d in digests]

    def held_paths(self, wanted: bytes, after: Any, limit: int) -> list[HeldPath]:
        if self.is_away:
            raise Unavailable("the server does not answer")
        found = self.files.get(wanted)
        return [HeldPath(found.ino, 1, b"f", b"f")] if found else []

    def inode(self, ino: int) -> Inode | None:
        return self.files.get(digest(ino))

    def usage(self) -> Usage:
        return Usage(9, 4, 2 * MIB, (2 * MIB,))  # half a MiB each

    def coldest(self, limit: int) -> list[Candidate]:
        return [Candidate(1, self.coldest_ns, b"c" * 16, 0, 1, 1)]


@dataclass
class FakeSpace:
    room: list[int] = field(default_factory=lambda: [10 * MIB])
    used: int = 0
    largest: int = 1000 * MIB

    def room_bytes(self, index: int) -> int:
        return self.room[index]

    def used_bytes(self, index: int) -> int:
        return self.used

    def fits_ever(self, index: int, size_bytes: int) -> bool:
        return size_bytes <= self.largest


@dataclass
class FakeNode:
    meta: FakeMeta = field(default_factory=FakeMeta)
    space: FakeSpace = field(default_factory=FakeSpace)
    counters: Counters = field(default_factory=Counters)
    directories: tuple[None, ...] = (None,)
    brought: list[bytes] = field(default_factory=list)
    at_once: int = 0
    gate: trio.Event | None = None

    async def bring(self, inodes: Iterable[Inode]) -> None:
        self.at_once += 1
        if self.gate is not None:
            await self.gate.wait()
        for inode in inodes:
            self.brought.append(inode.digest)
            self.meta.here.add(inode.digest)


def hints_of(node: FakeNode) -> Hints:
    return Hints(cast(Node, node))


async def after_work(node: FakeNode, hints: Hints, nursery: trio.Nursery) -> None:
    nursery.start_soon(hints.work_always, node.bring)
    await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
def node() -> Iterator[FakeNode]:
    return FakeNode()  # type: ignore[return-value]  # a fixture may return as well


async def test_what_a_file_has_and_is_not_here_is_fetched_once(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    a, b = node.meta.add(1), node.meta.add(2)
    node.meta.here.add(b)
    hints = hints_of(node)
    hints.take([a, b, a, digest(99), b"garbage"])
    hints.take([a])
    await after_work(node, hints, nursery)
    assert node.brought == [a]
    assert (node.counters.hinted_files, len(hints._waiting)) == (1, 0)
    node.meta.here.discard(a)
    hints.take([a])  # evicted, and wanted again
    await trio.testing.wait_all_tasks_blocked()
    assert node.brought == [a, a]


async def test_a_full_node_takes_what_is_newer_than_its_coldest(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    node.space.room[0] = 0
    old, new = node.meta.add(1, used_ns=100), node.meta.add(2, used_ns=101)
    never = node.meta.add(3, size_bytes=node.space.largest + 1, used_ns=500)
    hints = hints_of(node)
    hints.take([old, new, never])
    await after_work(node, hints, nursery)
    assert node.brought == [new]


async def test_for_who_leaves_nothing_that_is_here_goes(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    node.space.room[0] = 3 * MIB
    first, second = (node.meta.add(n, 2 * MIB, used_ns=100 + n) for n in (1, 2))
    small = node.meta.add(3, MIB, used_ns=500)
    node.gate = trio.Event()
    hints = hints_of(node)
    hints.take([first, second, small], spare_only=True)
    await after_work(node, hints, nursery)
    node.gate.set()  # who came first has counted on two thirds of the room
    await trio.testing.wait_all_tasks_blocked()
    large = set(node.brought) - {small}
    assert len(node.brought) == 2 and large < {first, second}
    [left] = {first, second} - large
    hints.take([left])  # at the cost of something older
    node.space.room[0] = 0
    await trio.testing.wait_all_tasks_blocked()
    assert node.brought[2:] == [left]


async def test_what_eviction_frees_beyond_its_need_is_no_room_for_copies(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    node.space.room[0], node.space.used = 2 * MIB, 32 * MIB
    small, large = node.meta.add(1, MIB), node.meta.add(2, MIB + 1)
    hints = hints_of(node)
    assert hints.spare_bytes() == MIB
    hints.take([small, large])
    assert hints.spare_bytes() == 0  # as two of half a MiB will be here soon
    await after_work(node, hints, nursery)
    assert node.brought == [small]


async def test_who_leaves_takes_nothing_and_has_no_room(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    hints = hints_of(node)
    hints.take([node.meta.add(1)])
    hints.refuse()
    hints.take([node.meta.add(2)])
    assert hints.spare_bytes() == 0
    await after_work(node, hints, nursery)
    assert (node.brought, len(hints._waiting)) == ([], 0)


async def test_a_server_that_does_not_answer_costs_the_hint(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    node.meta.is_away = True
    hints = hints_of(node)
    hints.take([node.meta.add(1)])
    await after_work(node, hints, nursery)
    assert (node.brought, len(hints._waiting)) == ([], 0)
    node.meta.is_away = False
    hints.take([digest(1)])
    await trio.testing.wait_all_tasks_blocked()
    assert node.brought == [digest(1)]


async def test_a_flood_is_bounded_and_few_are_fetched_at_once(
    node: FakeNode, nursery: trio.Nursery
) -> None:
    hints = hints_of(node)
    node.gate = trio.Event()
    for number in range(1, 21):
        hints.take([node.meta.add(number)])
    await after_work(node, hints, nursery)
    assert node.at_once == HINTED_FETCHES_MAX
    hints.take([digest(10**6 + n) for n in range(HINTS_WAITING_MAX + 5)])
    assert len(hints._waiting) <= HINTS_WAITING_MAX + HINTED_FETCHES_MAX
    node.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(node.brought) == [digest(n) for n in range(1, 21)]
    assert len(hints._waiting) == 0
