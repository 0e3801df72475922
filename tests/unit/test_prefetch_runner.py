"""Prefetch on a node: what is brought for whom, from where, and what ends it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from kvfs.config import MIB, PREFETCH_ELSEWHERE_S_MAX, PREFETCH_READER_BYTES_S, PREFETCH_SWEEP_S
from kvfs.errors import Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Inode
from kvfs.node import Node
from kvfs.prefetch.runner import Prefetcher
from kvfs.replicate import Holder, HolderState
from kvfs.settings.words import PrefetchConfig

FILE = 0o100644
NAMESPACE = 5


def digest(ino: int) -> bytes:
    return ino.to_bytes(16, "big")


@dataclass
class FakeMeta:
    """Files by their number; a chunk continues the one of `parents`."""

    inodes: dict[int, Inode] = field(default_factory=dict)
    here: set[bytes] = field(default_factory=set)
    chunks: dict[int, ChunkInfo] = field(default_factory=dict)
    is_away: bool = False

    def add(self, ino: int, *, size_bytes: int = MIB, parent: int | None = None) -> Inode:
        inode = Inode(ino, FILE, 0, 0, 1, size_bytes, 0, 0, 0, digest=digest(ino), used_ns=ino)
        self.inodes[ino] = inode
        if parent is not None:
            above = b"%d" % parent if parent else b""
            at = self.chunks[parent].token_end if parent else 0
            self.chunks[ino] = ChunkInfo(b"%d" % ino, above, at, at + 256, 0, 0, b"")
        return inode

    def inode(self, ino: int) -> Inode | None:
        if self.is_away:
            raise Unavailable("the server does not answer")
        return self.inodes.get(ino)

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        return [Blob(d, 1, 1, 0, 1) if d in self.here else None for d in digests]

    def chunk(self, ino: int) -> ChunkInfo | None:
        return self.chunks.get(ino)

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        return [(NAMESPACE + 1, b"name")]

    def parent_of(self, ino: int) -> int:
        return ino - 1

    def children(self, namespace: int, parent: bytes, after: int, limit: int) -> list[ChunkEntry]:
        assert namespace == NAMESPACE
        found = [ino for ino, info in self.chunks.items() if info.parent == parent]
        return [ChunkEntry(self.chunks[ino], self.inodes[ino]) for ino in found[:limit]]


@dataclass
class FakeSpace:
    used: int = 0
    room: int = 100 * MIB

    def used_bytes(self, index: int) -> int:
        return self.used

    def room_bytes(self, index: int) -> int:
        return self.room


@dataclass
class FakeNeighbours:
    """Other nodes that have all blobs but those of `lacking`."""

    meta: FakeMeta
    lacking: set[bytes] = field(default_factory=set)
    brought: list[int] = field(default_factory=list)
    others: int = 0  # fetches that are not the prefetch's
    mine: int = 0
    gate: trio.Event | None = None
    failing: list[Exception] = field(default_factory=list)  # what the next calls raise

    @property
    def fetching(self) -> int:
        return self.others + self.mine

    def copies(self, digests: Sequence[bytes]) -> list[list[Holder]]:
        other = Holder(b"n" * 16, HolderState.PRESENT)
        return [[] if d in self.lacking else [other] for d in digests]

    async def bring(self, inodes: Iterable[Inode]) -> None:
        self.mine += 1
        try:
            if self.failing:
                raise self.failing.pop()
            if self.gate is not None:
                await self.gate.wait()
            for inode in inodes:
                if inode.digest not in self.lacking:
                    self.brought.append(inode.ino)
                    self.meta.here.add(inode.digest)
        finally:
            self.mine -= 1


@dataclass
class FakeNode:
    meta: FakeMeta = field(default_factory=FakeMeta)
    space: FakeSpace = field(default_factory=FakeSpace)
    directories: tuple[None, ...] = (None,)
    neighbours: FakeNeighbours | None = None
    tiering: None = None
    ahead: Prefetcher | None = None
    read: Callable[[Sequence[int], int | None], None] = lambda inos, reader: None

    def is_here(self, digests: Sequence[bytes]) -> list[bool]:
        return [blob is not None for blob in self.meta.blobs(digests)]

    def watch_uses(self, callback: Callable[[Sequence[int], int | None], None]) -> None:
        self.read = callback

    @property
    def fetching(self) -> "FakeNeighbours":
        return self

    async def fetch(self, inodes: Sequence[Inode]) -> None:
        assert self.neighbours is not None
        await self.neighbours.bring(inodes)


@dataclass
class World:
    node: FakeNode
    peers: FakeNeighbours
    prefetch: Prefetcher

    def tally(self, cause: str) -> dict[str, int]:
        causes = cast(dict[str, dict[str, int]], self.prefetch.describe()["causes"])
        return causes[cause]

    async def settle(self) -> None:
        """Have everything done that is to be done without another event."""
        await trio.sleep(1)
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def world(nursery: trio.Nursery) -> World:
    node = FakeNode()
    node.neighbours = FakeNeighbours(node.meta)
    prefetch = Prefetcher(cast(Node, node), PrefetchConfig())
    await nursery.start(prefetch.run)
    assert node.ahead is prefetch
    return World(node, node.neighbours, prefetch)


async def test_the_chunks_behind_one_that_was_read_come_from_other_nodes(
    world: World, autojump_clock: MockClock
) -> None:
    for ino in range(1, 4):
        world.node.meta.add(ino, parent=ino - 1)
    world.node.read([1], None)
    await world.settle()
    assert sorted(world.peers.brought) == [2, 3]
    world.node.read([2], None)
    await world.settle()
    assert (world.tally("child")["arrived"], world.tally("child")["used"]) == (2, 1)


async def test_what_its_reader_goes_on_to_read_is_left_to_it(
    world: World, autojump_clock: MockClock
) -> None:
    for ino in range(1, 4):
        world.node.meta.add(ino, parent=ino - 1)
    world.node.read([1, 2, 3], None)
    await world.settle()
    assert world.peers.brought == []


async def test_files_that_follow_each_other_are_brought_the_third_time(
    world: World, autojump_clock: MockClock
) -> None:
    for ino in (11, 12, 13):
        world.node.meta.here.add(world.node.meta.add(ino).digest)
    for _ in range(2):
        for ino in (11, 12, 13):
            world.node.read([ino], 99)
    await world.settle()
    world.node.meta.here.clear()
    world.node.read([11], 99)
    await world.settle()
    assert sorted(world.peers.brought) == [12, 13]


async def test_who_reads_from_the_source_has_it_cancelled_and_what_is_expected_comes_later(
    world: World, autojump_clock: MockClock
) -> None:
    expected = world.node.meta.add(20)
    world.peers.gate = trio.Event()
    world.prefetch.expect([expected])
    await world.settle()
    assert world.prefetch.describe()["under_way"] == 1
    world.peers.others = 1
    await world.settle()
    assert world.prefetch.describe()["under_way"] == 0
    assert world.tally("expected")["cancelled"] == 1
    world.peers.others = 0
    world.peers.gate.set()
    await world.settle()
    assert world.peers.brought == [20]


async def test_where_an_engine_reads_by_itself_is_left_to_it_for_as_long_as_that_takes(
    world: World, autojump_clock: MockClock
) -> None:
    world.prefetch.note_elsewhere(4 * PREFETCH_READER_BYTES_S, 0, is_at_peers=True)
    world.prefetch.expect([world.node.meta.add(2)])
    await world.settle()
    assert world.peers.brought == []
    await trio.sleep(4)
    assert world.peers.brought == [2]


async def test_what_fast_engines_read_is_not_believed_to_take_for_ever(
    world: World, autojump_clock: MockClock
) -> None:
    for _ in range(100):
        world.prefetch.note_elsewhere(4 * PREFETCH_READER_BYTES_S, 0, is_at_peers=True)
    world.prefetch.expect([world.node.meta.add(2)])
    await trio.sleep(PREFETCH_ELSEWHERE_S_MAX - 1)
    assert world.peers.brought == []
    await trio.sleep(2)
    assert world.peers.brought == [2]


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("error", [Unavailable("away"), OSError(5, "disk"), RuntimeError("bug")])
async def test_what_fails_is_tried_again_and_the_prefetch_goes_on(
    error: Exception,
    is_group: bool,
    world: World,
    autojump_clock: MockClock,
    allow_warnings: list[str],
) -> None:
    if isinstance(error, RuntimeError):
        allow_warnings.append("ERROR .*met a bug")
    world.peers.failing.append(ExceptionGroup("", [error]) if is_group else error)
    world.prefetch.expect([world.node.meta.add(1)])
    await world.settle()
    assert world.peers.brought == [1]
    assert world.tally("expected")["failed"] == 1


async def test_nothing_is_guessed_into_a_store_that_is_nearly_full(
    world: World, autojump_clock: MockClock
) -> None:
    for ino in range(1, 4):
        world.node.meta.add(ino, parent=ino - 1)
    world.node.space.used, world.node.space.room = 91 * MIB, 9 * MIB
    world.node.read([1], None)
    await world.settle()
    assert world.peers.brought == []
    world.prefetch.expect([world.node.meta.inodes[2]])
    await world.settle()
    assert world.peers.brought == [2]


async def test_a_person_is_told_what_is_still_coming_and_what_nobody_gives(
    world: World, autojump_clock: MockClock
) -> None:
    inodes = [world.node.meta.add(ino) for ino in (1, 2, 3)]
    world.peers.lacking.add(digest(3))
    world.peers.gate = trio.Event()
    assert await world.prefetch.warm(inodes, 0.5) == {digest(ino) for ino in (1, 2, 3)}
    world.peers.gate.set()
    assert await world.prefetch.warm(inodes, 0.5) == set()
    assert sorted(world.peers.brought) == [1, 2]
    assert world.tally("warm")["failed"] >= 1


async def test_what_hangs_is_given_up(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.prefetch.runner.PREFETCH_FETCH_S", 0.5)
    world.peers.gate = trio.Event()
    world.prefetch.expect([world.node.meta.add(1)])
    await trio.sleep(3)
    assert world.tally("expected")["failed"] == 3
    assert world.prefetch.describe()["under_way"] == 0


async def test_waste_is_noticed_after_eviction(world: World, autojump_clock: MockClock) -> None:
    for ino in range(1, 3):
        world.node.meta.add(ino, parent=ino - 1)
    world.node.read([1], None)
    await world.settle()
    world.node.meta.here.clear()
    await trio.sleep(2 * PREFETCH_SWEEP_S)
    assert world.tally("child")["wasted"] == 1
    assert world.prefetch.describe()["unread"] == 0


async def test_metadata_that_does_not_answer_costs_a_guess_only(
    world: World, autojump_clock: MockClock
) -> None:
    world.node.meta.add(1, parent=0)
    world.node.meta.is_away = True
    world.node.read([1], None)
    await world.settle()
    world.node.meta.is_away = False
    world.prefetch.expect([world.node.meta.inodes[1]])
    await world.settle()
    assert world.peers.brought == [1]


async def test_a_node_that_nobody_reads_from_wakes_for_nothing(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    node = FakeNode()
    looks = []
    node.space.room_bytes = lambda index: looks.append(index) or MIB  # type: ignore[method-assign,func-returns-value]  # counts
    await nursery.start(Prefetcher(cast(Node, node), PrefetchConfig()).run)
    await trio.sleep(3600)
    assert looks == []
