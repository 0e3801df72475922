"""Copies by rule, as a task of one node among others that are played."""

from dataclasses import replace

import pytest
import trio
import trio.testing

from kvfs.cluster.copies import Copies
from kvfs.config import (
    CLUSTER_GONE_S,
    COPIES_ASKED_PER_S,
    COPIES_STEP,
    COPIES_SWEEP_S,
    COPIES_WAITING_MAX,
    MIB,
)
from kvfs.replicate import rank
from kvfs.settings.words import CopyRule
from tests.played_cluster import ME, World, node_id, renew_always

pytestmark = pytest.mark.usefixtures("threads_take_no_time")

RULES = (CopyRule(b"two/", 2), CopyRule(b"three/", 3))


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
