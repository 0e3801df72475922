"""What the server did of a transaction that its node gave up: the answer was lost, the node died,
or it was only done later. Nobody may count on bytes that are not there."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest

from kvfs.errors import OutOfSpace, Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import FILE, T0, digest, publication

Open = Callable[[int], RedisEngine]


@pytest.fixture
def open_node(tmp_path: Path, server: RedisServer) -> Iterator[Open]:
    """A node by its number; one that is opened again has died before."""
    there: dict[int, RedisEngine] = {}
    cluster = secrets.token_hex(8)

    def open_again(number: int) -> RedisEngine:
        if number in there:
            there.pop(number).close()
        directory, node_id = tmp_path / str(number), bytes([number]) * 16
        engine = RedisEngine.join(directory, server.url, cluster, node_id, now_ns=T0)
        settle(engine)
        there[number] = engine
        return engine

    yield open_again
    for engine in there.values():
        engine.close()


def settle(engine: RedisEngine) -> None:
    """As the node does in the background."""
    while engine.refill_more(T0) or engine.recheck_more():
        pass


def lose_the_answer(engine: RedisEngine, patch: pytest.MonkeyPatch, *, dies: bool = False) -> None:
    """Have the server do the next transactions, and the node not hear of it."""
    commit = engine._server.commit

    def lost(*words: Any) -> Never:
        commit(*words)
        if dies:
            raise KeyboardInterrupt
        raise Unavailable("lost")

    patch.setattr(engine._server, "commit", lost)


def put_off(engine: RedisEngine, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Have the next transaction not be done until the function that is returned is called: as one
    that a kernel sends again once a cable is back."""
    commit, late = engine._server.commit, []

    def never(commit: Any, news: Any, inodes: int) -> Never:
        commit.was_sent = True
        late.append((commit, news, inodes))
        raise Unavailable("lost")

    patch.setattr(engine._server, "commit", never)
    return lambda: commit(*late.pop())


def fail_to_take(engine: RedisEngine, n: int) -> None:
    """As a node that fetches a file, whose publisher gives up what was not noted."""
    engine.intend([(digest(n), 0)])
    with pytest.raises(Unavailable):
        engine.add_copy(publication(n))
    engine.bury([digest(n)])


def leave_in_doubt(a: RedisEngine, b: RedisEngine, patch: pytest.MonkeyPatch) -> None:
    """`a` stores a file; `b` fetches it, and the server's answer to that is lost."""
    a.publish([publication(1, b"f")], T0)
    b.catch_up()
    lose_the_answer(b, patch)
    fail_to_take(b, 1)
    patch.undo()


def test_a_lost_answer_leaves_no_copy_that_is_not_there(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node(1), open_node(2)
    leave_in_doubt(a, b, monkeypatch)
    assert a.ask_copies([digest(1)]) == [{a.node_id, b.node_id}]
    settle(b)
    a.catch_up()
    assert a.ask_copies([digest(1)]) == [{a.node_id}]
    assert a.end_copies([digest(1)], {b.node_id}) == []
    assert b.recover().intended == ()


def test_what_a_lost_answer_said_is_settled_after_a_start_as_well(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node(1), open_node(2)
    leave_in_doubt(a, b, monkeypatch)
    b = open_node(2)
    assert b.recover().intended == ((digest(1), 0),)
    assert a.ask_copies([digest(1)]) == [{a.node_id}]
    b.bury([digest(1)])
    assert b.recover().intended == ()


def test_who_died_before_its_own_tables_knew_of_a_copy_has_none(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node(1), open_node(2)
    a.publish([publication(n, b"%d" % n) for n in (1, 2)], T0)
    b.catch_up()
    assert b.add_copy(publication(2))
    b.intend([(digest(1), 0), (digest(2), 0)])
    lose_the_answer(b, monkeypatch, dies=True)
    with pytest.raises(KeyboardInterrupt):
        b.add_copy(publication(1))
    monkeypatch.undo()
    b = open_node(2)
    b.recover()
    assert a.ask_copies([digest(1), digest(2)]) == [{a.node_id}, {a.node_id, b.node_id}]


def test_a_copy_that_is_there_after_all_stays_one(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node(1), open_node(2)
    leave_in_doubt(a, b, monkeypatch)
    assert b.add_copy(publication(1))
    settle(b)
    assert a.ask_copies([digest(1)]) == [{a.node_id, b.node_id}]


def test_a_full_disk_leaves_no_copy_that_is_not_there(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node(1), open_node(2)
    a.publish([publication(1, b"f")], T0)
    b.catch_up()

    def fill(_: object) -> Never:
        raise OutOfSpace("no room")

    monkeypatch.setattr("kvfs.meta.cluster.ClusterBatch.finish", fill)
    with pytest.raises(OutOfSpace):
        b.add_copy(publication(1))
    monkeypatch.undo()
    settle(b)
    assert a.ask_copies([digest(1)]) == [{a.node_id}]


def test_what_the_server_does_late_is_heard(
    open_node: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the node had found that nothing was done, and cached that."""
    a, b = open_node(1), open_node(2)
    a.publish([publication(1, b"f")], T0)
    b.catch_up()
    do_it = put_off(b, monkeypatch)
    fail_to_take(b, 1)
    monkeypatch.undo()
    settle(b)
    do_it()
    assert a.ask_copies([digest(1)]) == [{a.node_id, b.node_id}]
    b.catch_up()
    settle(b)
    assert a.ask_copies([digest(1)]) == [{a.node_id}]

    do_it = put_off(b, monkeypatch)
    with pytest.raises(Unavailable):
        b.make(ROOT_INO, b"late", FILE, 0, 0, T0)
    monkeypatch.undo()
    assert b.resolve([b"late"]) == [None]
    do_it()
    told = b.catch_up()
    assert [e.name for e in b.entries(ROOT_INO, b"", 9)] == [b"f", b"late"]
    assert [inode is not None for inode in b.resolve([b"late"])] == [True]
    assert any(one.records for one in told)  # the mount is told as of what others do


def test_what_a_node_knows_that_it_did_it_is_not_told(open_node: Open) -> None:
    b = open_node(2)
    b.catch_up()
    b.publish([publication(1, b"f")], T0)
    assert b.catch_up() == []
