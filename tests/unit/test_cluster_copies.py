"""Copies by rule and leaving, as tasks of one node among others that are played."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfs.cluster.copies import Copies
from kvfs.cluster.drain import Drain
from kvfs.cluster.membership import Membership
from kvfs.cluster.takers import Takers
from kvfs.config import (
    CLUSTER_GONE_S,
    CLUSTER_LEASE_S,
    COPIES_ASKED_PER_S,
    COPIES_STEP,
    COPIES_STEP_S,
    COPIES_SWEEP_S,
    COPIES_WAITING_MAX,
    DRAIN_AGAIN_S,
    DRAIN_FILES_MAX,
    DRAIN_LEFT_SHOWN,
    MIB,
)
from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.contract import Blob, HeldPath, Inode
from kvfs.meta.members import Member, Members
from kvfs.meta.redis import RedisEngine
from kvfs.open_blobs import OpenBlobs
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Health
from kvfs.replicate import rank
from kvfs.settings.words import CopyRule

RULES = (CopyRule(b"two/", 2), CopyRule(b"three/", 3))
FILE = 0o100644


def node_id(number: int) -> bytes:
    return bytes([number]) * 16


ME = node_id(0)


@dataclass
class Peer:
    """Another node: it fetches what it is told to, if it has room."""

    member: Member
    world: "World"
    free_bytes: int = 1000 * MIB
    is_away: bool = False
    is_deaf: bool = False  # it takes hints and does nothing
    heard: list[bytes] = field(default_factory=list)
    spare_only: set[bool] = field(default_factory=set)  # as the hints said

    def hint(self, digests: Sequence[bytes], deadline_s: float, *, spare_only: bool) -> None:
        if self.is_away:
            raise Unavailable("away")
        self.spare_only.add(spare_only)
        self.heard += digests
        for digest in digests:
            if not self.is_deaf:
                self.free_bytes -= self.world.sizes[digest]
                self.world.held.setdefault(digest, set()).add(self.member.node_id)

    def health(self, deadline_s: float) -> Health:
        if self.is_away:
            raise Unavailable("away")
        return Health(max(0, self.free_bytes), 0.0, 1.0)

    def abandon(self) -> None:
        pass


class World:
    """This node, number 0, and others; what each holds. Plays the engine and the members' list."""

    def __init__(self, others: int) -> None:
        members = [
            Member(node_id(n), f"h{n}:1", "", f"h{n}", f"/s{n}", 1) for n in range(others + 1)
        ]
        self.me = members[0]
        self.peers = {m.node_id: Peer(m, self) for m in members[1:]}
        self.held: dict[bytes, set[bytes]] = {}
        self.sizes: dict[bytes, int] = {}
        self.paths: dict[bytes, bytes] = {}
        self.is_away = False
        self.is_list_away = False
        self.asked = 0  # digests, of the server
        self.membership = Membership(cast(Members, self), self.me, {}, self.connect)
        self.takers = Takers(self.membership)
        self.open_blobs: set[bytes] = set()
        self.directories: list[object] = [object()]
        self.engine = cast(RedisEngine, self)

    def connect(self, member: Member) -> PeerClient:
        if member.address == "of no such form":
            raise InvalidInput(member.address, "is no address")
        return cast(PeerClient, self.peers[member.node_id])

    def store(self, number: int, path: bytes, size_bytes: int = MIB, by: int = 0) -> Inode:
        digest = number.to_bytes(16, "big")
        self.held.setdefault(digest, set()).add(node_id(by))
        self.sizes[digest], self.paths[digest] = size_bytes, path
        return Inode(number, FILE, 0, 0, 1, size_bytes, 0, 0, 0, digest=digest)

    def end(self, peer: bytes) -> None:
        """A node is gone with all that it has."""
        self.peers[peer].is_away = True

    def counts(self) -> list[int]:
        alive = {ME} | {i for i, peer in self.peers.items() if not peer.is_away}
        return [len(held & alive) for _, held in sorted(self.held.items())]

    # As the list of members.
    was_away = False

    def renew(self) -> tuple[Member, ...]:
        if self.is_list_away:
            raise Unavailable("the metadata server does not answer")
        return (self.me, *(p.member for p in self.peers.values() if not p.is_away))

    def describe(self, me: Member) -> None:
        self.me = me

    # As the engine.
    def _ask(self) -> None:
        if self.is_away:
            raise Unavailable("the metadata server does not answer")

    def ask_copies(self, digests: Sequence[bytes]) -> list[set[bytes]]:
        self._ask()
        self.asked += len(digests)
        return [set(self.held.get(digest, ())) for digest in digests]

    known_copies = ask_copies

    def own_blobs(self, after: bytes, limit: int) -> list[Blob]:
        mine = sorted(d for d, held in self.held.items() if ME in held and d > after)
        return [Blob(d, self.sizes[d], self.sizes[d], 0, 1) for d in mine[:limit]]

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        return [Blob(d, 1, 1, 0, 1) if ME in self.held.get(d, ()) else None for d in digests]

    def held_paths(self, digest: bytes, after: Any, limit: int) -> list[HeldPath]:
        self._ask()
        path = self.paths.get(digest)
        return [HeldPath(1, 1, b"f", path)] if path else []


@pytest.fixture(autouse=True)
def _threads_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of these tests jumps when all tasks wait, and does not know of threads."""

    async def run_sync(call: Callable[..., Any], *words: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*words)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


async def renew_always(world: World) -> None:
    while True:
        with suppress(Unavailable):
            await world.membership.renew()
        await trio.sleep(0.5)


# Copies -------------------------------------------------------------------------------------------
async def start_copies(world: World, nursery: trio.Nursery) -> Copies:
    copies = Copies(world.engine, world.membership, world.takers, RULES)
    nursery.start_soon(renew_always, world)
    nursery.start_soon(copies.run)
    await trio.sleep(0.1)
    return copies


async def test_what_is_stored_is_soon_where_the_rules_want_it(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(5)
    copies = await start_copies(world, nursery)
    for number, path in enumerate([b"two/a", b"three/b", b"one", b"two/c"]):
        copies.published(world.store(number, path))
    await trio.sleep(1.0)
    assert world.counts() == [2, 3, 1, 2]
    digest = (1).to_bytes(16, "big")
    assert world.held[digest] == {ME, *rank(digest, world.peers)[:2]}
    await trio.sleep(10 * COPIES_SWEEP_S)
    assert world.counts() == [2, 3, 1, 2]  # and no more


async def test_a_node_that_is_gone_for_good_is_made_up_for(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(3)
    copies = await start_copies(world, nursery)
    for number in range(300):
        copies.published(world.store(number, b"two/%d" % number))
    await trio.sleep(3.0)
    assert world.counts() == [2] * 300
    lost = node_id(1)
    world.end(lost)
    await trio.sleep(CLUSTER_GONE_S / 2)
    before = world.counts()
    assert 1 in before
    await trio.sleep(CLUSTER_GONE_S + 2 * COPIES_SWEEP_S)
    after = {number: count for number, count in enumerate(world.counts()) if count < 2}
    assert after == {}


async def test_one_that_comes_back_soon_costs_nothing(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(3)
    copies = await start_copies(world, nursery)
    for number in range(50):
        copies.published(world.store(number, b"two/%d" % number))
    await trio.sleep(2.0)
    peer = world.peers[node_id(1)]
    peer.is_away = True
    await trio.sleep(CLUSTER_GONE_S - 2)
    peer.is_away = False
    await trio.sleep(4 * COPIES_SWEEP_S)
    assert world.counts() == [2] * 50


async def test_all_nodes_together_ask_the_server_no_more_than_it_bears(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(199)
    for number in range(4 * COPIES_STEP):
        world.store(number, b"one")
    await start_copies(world, nursery)
    await trio.sleep(COPIES_SWEEP_S)
    world.asked = 0
    began_s = trio.current_time()
    while world.asked < 3 * COPIES_STEP:
        await trio.sleep(0.01)
    assert 2 * COPIES_STEP * 200 / (trio.current_time() - began_s) <= COPIES_ASKED_PER_S


async def test_another_holder_in_front_sees_to_it(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(6)
    await start_copies(world, nursery)
    for number in range(40):
        world.store(number, b"three/x")
        world.store(number, b"three/x", by=1)
    await trio.sleep(3 * COPIES_SWEEP_S)
    for digest, held in world.held.items():
        is_mine = rank(digest, {ME, node_id(1)})[0] == ME
        assert len(held) == (3 if is_mine else 2)


async def test_full_nodes_get_new_files_and_no_old_ones(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    for peer in world.peers.values():
        peer.free_bytes, peer.is_deaf = 0, True
    copies = await start_copies(world, nursery)
    copies.published(world.store(1, b"two/a"))
    await trio.sleep(2.0)
    heard = [peer.heard for peer in world.peers.values()]
    assert sum(map(len, heard)) == 1
    await trio.sleep(5 * COPIES_SWEEP_S)
    assert sum(map(len, heard)) == 1
    world.peers[node_id(2)].free_bytes = MIB
    world.peers[node_id(2)].is_deaf = False
    await trio.sleep(2 * COPIES_SWEEP_S)
    assert world.counts() == [2]


async def test_a_server_that_does_not_answer_delays_copies(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    copies = await start_copies(world, nursery)
    world.is_away = True
    copies.published(world.store(1, b"two/a"))
    await trio.sleep(3 * COPIES_SWEEP_S)
    assert world.counts() == [1]
    world.is_away = False
    await trio.sleep(2 * COPIES_SWEEP_S)
    assert world.counts() == [2]


async def test_of_too_many_new_files_the_oldest_wait_for_the_walk() -> None:
    world = World(1)
    copies = Copies(world.engine, world.membership, world.takers, RULES)
    inode = world.store(0, b"two/a")
    for number in range(COPIES_WAITING_MAX + 10):
        copies.published(replace(inode, digest=number.to_bytes(16, "big")))
    assert len(copies._fresh) == COPIES_WAITING_MAX
    assert (9).to_bytes(16, "big") not in copies._fresh


async def test_without_a_rule_there_is_nothing_to_do() -> None:
    world = World(1)
    copies = Copies(world.engine, world.membership, world.takers, (CopyRule(b"", 1),))
    copies.published(world.store(0, b"two/a"))
    with trio.fail_after(5):
        await copies.run()
    assert not copies._fresh


# Leaving ------------------------------------------------------------------------------------------
async def start_leaving(world: World, nursery: trio.Nursery) -> Drain:
    drain = Drain(
        world.engine,
        world.membership,
        world.takers,
        cast(OpenBlobs, world.open_blobs),
        world.directories,
    )
    nursery.start_soon(renew_always, world)
    nursery.start_soon(drain.run)
    await trio.sleep(0.1)
    assert not drain.describe()["is_leaving"]
    drain.begin()
    await trio.sleep(0.1)
    assert world.me.is_leaving
    return drain


async def wait_done(drain: Drain) -> dict[str, Any]:
    with trio.fail_after(1000):
        while not drain.describe()["is_done"]:
            await trio.sleep(0.1)
    return drain.describe()


async def test_last_copies_move_to_who_has_most_room(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(3)
    sizes = random.Random(1)
    for number in range(3 * DRAIN_FILES_MAX):
        world.store(number, b"f%d" % number, sizes.randrange(4 * MIB))
    for number in range(0, 100, 2):
        world.store(number, b"f%d" % number, world.sizes[number.to_bytes(16, "big")], by=2)
    world.peers[node_id(1)].free_bytes = 10 * MIB
    drain = await start_leaving(world, nursery)
    done = await wait_done(drain)
    assert all(len(held - {ME}) == 1 for held in world.held.values())
    assert (done["moved_files"], done["left_files"]) == (3 * DRAIN_FILES_MAX - 50, 0)
    assert done["to_move_bytes"] == 0
    assert all(peer.free_bytes >= 0 for peer in world.peers.values())
    spread = [len(peer.heard) for peer in world.peers.values()]
    assert spread[0] <= 10 and min(spread[1:]) > 100


async def test_what_is_written_meanwhile_moves_too(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    world.store(1, b"a")
    drain = await start_leaving(world, nursery)
    await wait_done(drain)
    world.store(2, b"b")
    drain.published()
    await trio.sleep(1.0)
    assert world.counts() == [2, 2]
    world.store(3, b"c")  # of which nobody said a word
    drain.begin()
    assert not drain.describe()["is_done"]
    assert (await wait_done(drain))["moved_files"] == 3


async def test_without_room_elsewhere_it_is_said_and_tried_again(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    for number in range(DRAIN_LEFT_SHOWN + 20):
        world.store(number, b"f%d" % number)
    for peer in world.peers.values():
        peer.free_bytes = 8 * MIB
    drain = await start_leaving(world, nursery)
    done = await wait_done(drain)
    assert (done["moved_files"], done["left_files"]) == (16, DRAIN_LEFT_SHOWN + 4)
    assert len(done["left"]) == DRAIN_LEFT_SHOWN
    assert {item["reason"] for item in done["left"]} == {"no other node has room for it"}
    assert done["left"][0]["path"].startswith("/f")
    world.peers[node_id(1)].free_bytes = 1000 * MIB
    drain.begin()
    done = await wait_done(drain)
    assert (done["moved_files"], done["left_files"]) == (DRAIN_LEFT_SHOWN + 20, 0)


async def test_a_node_that_takes_nothing_or_goes_is_replaced(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(3)
    for number in range(20):
        world.store(number, b"f%d" % number)
    world.peers[node_id(1)].is_deaf = True
    world.peers[node_id(2)].is_deaf = True
    world.peers[node_id(3)].free_bytes = 900 * MIB
    drain = await start_leaving(world, nursery)
    await trio.sleep(CLUSTER_LEASE_S + 1)
    world.end(node_id(2))
    done = await wait_done(drain)
    assert (done["moved_files"], done["left_files"]) == (20, 0)
    assert all(node_id(3) in held for held in world.held.values())


async def test_who_has_nobody_to_move_to_keeps_it_all(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(1)
    world.store(1, b"a")
    world.end(node_id(1))
    drain = await start_leaving(world, nursery)
    done = await wait_done(drain)
    assert [item["reason"] for item in done["left"]] == ["no other node is there"]
    assert world.held[(1).to_bytes(16, "big")] == {ME}


async def test_what_is_open_for_writing_or_has_no_name_is_not_moved(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(1)
    world.open_blobs.add(world.store(1, b"a").digest)
    del world.paths[world.store(2, b"b").digest]
    drain = await start_leaving(world, nursery)
    done = await wait_done(drain)
    assert [item["reason"] for item in done["left"]] == ["it is still open for writing here"]
    assert world.counts() == [1, 1]
    world.open_blobs.clear()
    world.directories[0] = None
    drain.begin()
    done = await wait_done(drain)
    assert [item["reason"] for item in done["left"]] == ["its directory is not there"]
    world.directories[0] = object()
    drain.begin()
    assert (await wait_done(drain))["moved_files"] == 1


async def test_leaving_goes_on_after_the_server_was_away(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(1)
    world.store(1, b"a")
    drain = await start_leaving(world, nursery)
    world.is_away = True
    await trio.sleep(60)
    said = drain.describe()
    assert (said["is_done"], said["problem"]) == (False, "the metadata server does not answer")
    world.is_away = False
    done = await wait_done(drain)
    assert (done["moved_files"], done["problem"]) == (1, "")


async def test_nothing_moves_before_all_have_heard_that_it_leaves(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(1)
    world.store(1, b"a")
    world.is_list_away = True
    drain = await start_leaving(world, nursery)
    await trio.sleep(20 * CLUSTER_LEASE_S)
    assert drain.describe()["problem"] == "the metadata server does not answer"
    world.is_list_away = False
    await trio.sleep(CLUSTER_LEASE_S - 0.1)
    assert not world.peers[node_id(1)].heard
    assert (await wait_done(drain))["moved_files"] == 1


async def test_it_is_done_only_when_nothing_had_to_be_moved_any_more(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """What another had when the pass came to it may be only here when the pass is at its end."""
    world = World(1)
    passed = world.store(1, b"a", by=1).digest
    world.store(1, b"a")
    slow = world.store(2, b"b").digest
    world.peers[node_id(1)].is_deaf = True
    drain = await start_leaving(world, nursery)
    await trio.sleep(CLUSTER_LEASE_S + 1)
    assert world.peers[node_id(1)].heard == [slow]
    assert world.peers[node_id(1)].spare_only == {True}
    world.peers[node_id(1)].is_deaf = False
    world.held[passed].discard(node_id(1))
    world.held[slow].add(node_id(1))
    assert (await wait_done(drain))["moved_files"] == 2
    assert world.counts() == [2, 2]


async def test_a_node_that_has_left_costs_the_server_little_until_it_is_asked_again(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(1)
    for number in range(100 * COPIES_STEP):
        world.store(number, b"f%d" % number, by=1)
        world.store(number, b"f%d" % number)
    drain = await start_leaving(world, nursery)
    await wait_done(drain)
    asked = world.asked
    await trio.sleep(DRAIN_AGAIN_S + 50 * COPIES_STEP_S)
    assert 0 < world.asked - asked <= 51 * COPIES_STEP
    drain.begin()
    with trio.fail_after(1):
        await wait_done(drain)


# Who counts ---------------------------------------------------------------------------------------
async def test_who_went_just_now_counts_for_a_while_unless_it_was_leaving(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    peer = world.peers[node_id(2)]
    peer.member = replace(peer.member, is_leaving=True)
    nursery.start_soon(renew_always, world)
    await trio.sleep(1)
    assert world.membership.standing().staying == {ME, node_id(1)}
    client = world.membership.client(peer.member)
    assert world.membership.client(replace(peer.member, is_leaving=False)) is client
    world.end(node_id(1))
    world.end(node_id(2))
    await trio.sleep(1)
    standing = world.membership.standing()
    assert (standing.staying, standing.counted) == ({ME}, {ME, node_id(1)})
    await trio.sleep(CLUSTER_GONE_S)
    assert world.membership.standing().counted == {ME}


async def test_who_does_not_answer_takes_not_even_empty_files(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(3)
    nursery.start_soon(renew_always, world)
    a, b, c = world.peers
    world.peers[a].free_bytes = 0
    world.peers[c].member = replace(world.peers[c].member, address="of no such form")
    await trio.sleep(1)
    world.peers[b].is_away = True  # which its lease does not say yet
    assert await world.takers.with_room((c, b, a), 3, 0) == (a,)
    assert await world.takers.roomiest(0) == a
    assert await world.takers.roomiest(0, {a}) is None
    await world.takers.hint({b: [b"d"], c: [b"d"], node_id(9): [b"d"]})
    assert world.peers[b].heard == []


async def test_room_that_is_forgotten_meanwhile_is_none(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    nursery.start_soon(renew_always, world)
    await trio.sleep(1)

    async def forget_always() -> None:
        while True:
            world.takers.forget_rooms()
            await trio.lowlevel.checkpoint()

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(forget_always)
            for size_bytes in (0, MIB) * 20:
                found = await world.takers.with_room(tuple(world.peers), 2, size_bytes)
                assert set(found) <= world.peers.keys()
                assert await world.takers.roomiest(size_bytes) in (None, *world.peers)
            scope.cancel()


async def test_room_is_asked_for_once_in_a_while_and_counted_meanwhile(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(2)
    nursery.start_soon(renew_always, world)
    await trio.sleep(1)
    a, b = world.peers
    world.peers[a].free_bytes, world.peers[b].free_bytes = 2 * MIB, 3 * MIB + 1
    assert [await world.takers.roomiest(MIB) for _ in range(6)] == [b, b, a, b, a, None]
    world.peers[a].free_bytes = 9 * MIB
    assert await world.takers.with_room((a, b), 1, MIB) == ()
    await trio.sleep(5)
    assert await world.takers.with_room((b, a), 1, 4 * MIB) == (a,)
