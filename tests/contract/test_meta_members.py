"""Who is a member of a cluster, as its nodes hear it from the metadata server."""

from dataclasses import replace
from typing import Any

import pytest
import redis

from kvfs.errors import Unavailable
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.clusters import Cluster
from tests.processes import wait_until


def member(engine: RedisEngine, port: int = 1, boot_id: str = "") -> Member:
    return Member(engine.node_id, f"10.0.0.1:{port}", "", "host", "/store", 0, boot_id)


def ids_of(found: tuple[Member, ...]) -> set[bytes]:
    return {one.node_id for one in found}


def test_members_hear_who_came_and_went(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [cluster.join() for _ in range(4)]
    a, b, c, d = (engine.members(member(engine)) for engine in engines)
    ids = [engine.node_id for engine in engines]
    for count, one in enumerate((a, b, c), 1):
        assert ids_of(one.renew()) == set(ids[:count])
    answers: list[list[Any]] = []
    renew = engines[0]._server.renew_lease
    monkeypatch.setattr(
        engines[0]._server,
        "renew_lease",
        lambda *words, **rest: answers.append(renew(*words, **rest)) or answers[-1],
    )
    assert ids_of(a.renew()) == set(ids[:3])
    assert a.renew() is a.renew()
    b.leave()
    d.renew()
    assert ids_of(a.renew()) == {ids[0], ids[2], ids[3]}
    # The two that are new to it; nothing, twice; one that went and one that came.
    assert [answer[1:] for answer in answers[1:3]] == [[3], [3]]
    assert [set(answer[3][::2]) for answer in (answers[0], answers[3])] == [
        set(ids[1:3]),
        {ids[1], ids[3]},
    ]


def test_a_member_that_missed_more_than_is_remembered_is_told_all(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.server.CLUSTER_CHANGES_KEPT", 2)
    engines = [cluster.join() for _ in range(6)]
    lists = [engine.members(member(engine)) for engine in engines]
    lists[0].renew()
    lists[1].renew()
    lists[0].renew()
    for one in lists[2:5]:
        one.renew()
    lists[1].leave()
    lists[5].renew()
    assert ids_of(lists[0].renew()) == {e.node_id for e in (engines[0], *engines[2:])}


def test_members_of_a_wiped_server_and_of_one_that_lost_its_last_words(
    cluster: Cluster, server: RedisServer
) -> None:
    engines = [cluster.join() for _ in range(3)]
    a, b, c = (engine.members(member(engine)) for engine in engines)
    ids = [engine.node_id for engine in engines]
    for _ in range(2):
        for one in (a, b, c):
            one.renew()
    prefix = engines[0]._server.prefix
    with redis.Redis(port=server.port) as client:
        client.flushall()
        assert not b.was_away
        assert ids_of(b.renew()) == {ids[1]}
        assert b.was_away
        assert ids_of(a.renew()) == {ids[0], ids[1]}
        c.renew()
        assert ids_of(a.renew()) == set(ids)
        # As after a failover: a replica knows the number, but not all that led to it.
        client.zrem(prefix + b"leases", ids[2])
        client.hdel(prefix + b"members", ids[2])
        a.renew()
        assert ids_of(a.renew()) == {ids[0], ids[1]}


def test_a_node_that_died_takes_its_own_place_at_once_and_nobody_else_does(
    cluster: Cluster,
) -> None:
    engine = cluster.join()
    engine.members(member(engine, 1, "boot")).renew()
    assert ids_of(engine.members(member(engine, 2, "boot")).renew()) == {engine.node_id}
    for boot_id in ("another", ""):
        with pytest.raises(Unavailable, match="copy of its directory"):
            engine.members(member(engine, 3, boot_id)).renew()
    moved = replace(member(engine, 3, "boot"), store="/copy")
    with pytest.raises(Unavailable, match="copy of its directory"):
        engine.members(moved).renew()


def test_a_lease_that_is_not_renewed_ends(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    one, two = a.members(member(a)), b.members(member(b), lease_s=2.0)
    two.renew()
    assert ids_of(one.renew()) == {a.node_id, b.node_id}
    wait_until(lambda: ids_of(one.renew()) == {a.node_id})
    assert ids_of(two.renew()) == {a.node_id, b.node_id}
