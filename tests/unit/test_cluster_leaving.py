"""Leaving, as a task of one node among others that are played."""

import random
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfs.cluster.drain import Drain
from kvfs.config import (
    CLUSTER_LEASE_S,
    COPIES_STEP,
    COPIES_STEP_S,
    DRAIN_AGAIN_S,
    DRAIN_FILES_MAX,
    DRAIN_LEFT_SHOWN,
    MIB,
)
from kvfs.open_blobs import OpenBlobs
from tests.played_cluster import ME, World, node_id, renew_always

pytestmark = pytest.mark.usefixtures("threads_take_no_time")


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
