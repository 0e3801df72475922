"""What a node left unfinished that died: dropped by another one once, and not while it may live."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.config import ABANDONED_STEP
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.members import Member, Members
from kvfs.meta.redis import RedisEngine
from kvfs.meta.shared import Page, SharedTable
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import FILE, T0, digest, publication
from tests.processes import wait_until

SHORT_S = 0.05


class Nodes:
    """Engines of one cluster; each may be closed and opened again."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._url = url
        self._name = secrets.token_hex(8)
        self.opened: list[RedisEngine] = []

    def open(self, number: int) -> RedisEngine:
        node_id = bytes([number]) * 16
        directory = self._directory / str(number)
        engine = RedisEngine.join(directory, self._url, self._name, node_id, now_ns=T0)
        self.opened.append(engine)
        return engine

    def kill(self, engine: RedisEngine) -> None:
        self.opened.remove(engine)
        engine.close()


@pytest.fixture
def nodes(tmp_path: Path, server: RedisServer) -> Iterator[Nodes]:
    made = Nodes(tmp_path, server.url)
    yield made
    for engine in made.opened:
        engine.close()


def lease(engine: RedisEngine, lease_s: float = 60.0) -> Members:
    me = Member(engine.node_id, f"10.0.0.{engine.node_id[0]}:1", "", "host", "/store", 0)
    return engine.members(me, lease_s)


def wait_gone(engine: RedisEngine, watcher: Members, gone: RedisEngine) -> None:
    def is_gone() -> bool:
        watcher.renew()
        return engine.gone_nodes(0.0) == [gone.node_id]

    wait_until(is_gone)


def loose_of(engine: RedisEngine, node: RedisEngine) -> tuple[bytes, ...]:
    return engine._server.members(Page(SharedTable.LOOSE, node.node_id, b"", 1000))


def drop_all(engine: RedisEngine, node: RedisEngine) -> list[bytes]:
    dropped = []
    while (names := engine.drop_loose(node.node_id)) is not None:
        assert len(names) <= ABANDONED_STEP
        dropped += [name for _, name, _ in names]
    return dropped


def test_what_is_finished_is_on_no_list(nodes: Nodes) -> None:
    a = nodes.open(1)
    made = a.make(ROOT_INO, b"f", FILE, 0, 0, T0)
    assert len(loose_of(a, a)) == 1
    a.publish([publication(1, ino=made.ino)], T0)
    assert loose_of(a, a) == ()
    a.unlink(ROOT_INO, b"f", T0)
    assert len(loose_of(a, a)) == 1
    a.forget([made.ino])
    assert loose_of(a, a) == ()


def test_what_a_dead_node_left_goes_once(nodes: Nodes) -> None:
    a, b = nodes.open(1), nodes.open(2)
    lease(a, SHORT_S).renew()
    watcher = lease(b)
    left = [b"%d" % n for n in range(2 * ABANDONED_STEP)]
    for name in left:
        a.make(ROOT_INO, name, FILE, 0, 0, T0)
    [kept, orphan] = a.publish([publication(1, b"kept"), publication(2, b"orphan")], T0)
    a.unlink(ROOT_INO, b"orphan", T0)
    finished = a.make(ROOT_INO, b"finished", FILE, 0, 0, T0)
    b.catch_up()
    b.publish([publication(3, ino=finished.ino)], T0)  # by another node
    wait_gone(b, watcher, a)
    assert sorted(drop_all(b, a)) == sorted(left)
    assert b.gone_nodes(0.0, settled=a.node_id) == []
    assert loose_of(b, a) == ()
    names = [entry.name for entry in b.entries(ROOT_INO, b"", 100)]
    assert names == [b"finished", b"kept"]
    assert b.usage().inodes == 3
    a.catch_up()  # it was only away
    assert [blob.digest for blob in a.doomed(9)] == [digest(2)]
    assert a.inode(orphan.inode.ino) is None
    assert a.inode(kept.inode.ino) == kept.inode
    nodes.kill(a)
    assert nodes.open(1).recover().dropped_inodes == 0


def test_a_node_that_is_back_loses_nothing_that_it_begins(nodes: Nodes) -> None:
    a, b = nodes.open(1), nodes.open(2)
    lease(a, SHORT_S).renew()
    watcher = lease(b)
    wait_gone(b, watcher, a)
    a.make(ROOT_INO, b"f", FILE, 0, 0, T0)  # before its next renewal
    assert b.drop_loose(a.node_id) is None
    b.catch_up()
    assert [entry.name for entry in b.entries(ROOT_INO, b"", 9)] == [b"f"]
    lease(a).renew()
    assert b.gone_nodes(0.0) == []


def test_who_is_away_for_a_short_time_is_not_gone(nodes: Nodes) -> None:
    a, b = nodes.open(1), nodes.open(2)
    lease(a, SHORT_S).renew()
    wait_gone(b, lease(b), a)
    assert b.gone_nodes(600.0) == []


def test_a_start_drops_what_only_the_server_knows(nodes: Nodes) -> None:
    """As after a crash between the server's part of a transaction and the node's own."""
    a = nodes.open(1)
    made = a.make(ROOT_INO, b"f", FILE, 0, 0, T0)
    with a._writing() as txn:
        txn.drop(a._tables.loose, delete=False)
    nodes.kill(a)
    a = nodes.open(1)
    a.recover()
    assert (a.inode(made.ino), a.entries(ROOT_INO, b"", 9), loose_of(a, a)) == (None, [], ())


def test_a_node_that_goes_again_is_noticed_by_who_saw_it_back(nodes: Nodes) -> None:
    """Leases are no entries of the feed, so that what was cached of one is compared when used."""
    a, b = nodes.open(1), nodes.open(2)
    watcher = lease(b)
    a.make(ROOT_INO, b"f", FILE, 0, 0, T0)
    lease(a, SHORT_S).renew()
    assert b.drop_loose(a.node_id) is None
    wait_gone(b, watcher, a)
    assert drop_all(b, a) == [b"f"]
