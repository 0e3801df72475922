"""A server that is behind what its nodes saw: a replica that lagged when it was promoted, or one
that started from an older file. Here most start from an older file, which is the same to nodes."""

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_groups import watched_servers
from scripts.redis_rig import RedisServer, redis_server
from tests.contract.meta_words import FILE, T0, chunk, digest, publication
from tests.processes import wait_until


@pytest.fixture
def allow_warnings() -> list[str]:
    return ["the metadata server (has )?lost"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "server") as started:
        yield started


class Nodes:
    """Engines of one cluster, by what they are called."""

    def __init__(self, directory: Path, url: str) -> None:
        self.url = url
        self._directory = directory
        self._ids: dict[str, bytes] = {}
        self._there: dict[str, RedisEngine] = {}

    def join(self, name: str) -> RedisEngine:
        node_id = self._ids.setdefault(name, secrets.token_bytes(16))
        engine = RedisEngine.join(self._directory / name, self.url, "c", node_id, now_ns=T0)
        self._there[name] = engine
        return engine

    def leave(self, name: str) -> None:
        self._there.pop(name).close()

    def close(self) -> None:
        for name in list(self._there):
            self.leave(name)


@pytest.fixture
def nodes(tmp_path: Path, server: RedisServer) -> Iterator[Nodes]:
    made = Nodes(tmp_path, server.url)
    yield made
    made.close()


def remember(server: RedisServer) -> None:
    """What it is to know after `go_back`."""
    assert server.say("save").strip() == "OK"


def go_back(server: RedisServer) -> None:
    server.kill()
    server.start()


def when_there(act: Callable[[], object]) -> None:
    """Do it once the server is asked again."""

    def went() -> bool:
        try:
            act()
        except Unavailable:
            return False
        return True

    wait_until(went)


def settle(*engines: RedisEngine) -> None:
    """What nodes do in the background: round after round, as all of them would."""
    for engine in engines:
        when_there(engine.catch_up)
    for _ in range(8):
        for engine in engines:
            while engine.refill_more(T0) or engine.recheck_more():
                pass
    for engine in engines:
        engine.catch_up()


def names_of(engine: RedisEngine, directory: int = ROOT_INO) -> list[bytes]:
    return [entry.name for entry in engine.entries(directory, b"", 1000)]


def test_what_was_lost_is_done_again(server: RedisServer, nodes: Nodes) -> None:
    a, b = nodes.join("a"), nodes.join("b")
    [old, gone] = a.publish([publication(1, b"old"), publication(2, b"gone")], T0)
    remember(server)
    a.publish([publication(3, b"kv/m/00/3", chunk=chunk(b"k"))], T0)
    a.rename(ROOT_INO, b"old", ROOT_INO, b"new", T0)
    a.forget([a.unlink(ROOT_INO, b"gone", T0).ino])
    a.bury([blob.digest for blob in a.doomed(9)])
    b.catch_up()
    assert names_of(b) == [b"kv", b"new"]
    go_back(server)
    settle(a, b)
    for engine in (a, b):
        assert names_of(engine) == [b"kv", b"new"]
        assert engine.sizes([b"kv/m/00/3", b"new", b"old", b"gone"]) == [103, 101, None, None]
        assert engine.inode(gone.inode.ino) is None
        assert engine.copies(digest(3)) == [a.node_id]
        assert engine.copies(digest(2)) == []
    assert (a.inode(old.inode.ino), a.doomed(9)) == (b.inode(old.inode.ino), [])
    assert [blob and blob.references for blob in a.blobs([digest(1), digest(3)])] == [1, 1]


def test_nodes_do_again_what_builds_on_what_the_other_did(
    server: RedisServer, nodes: Nodes
) -> None:
    a, b = nodes.join("a"), nodes.join("b")
    a.publish([publication(1, b"first")], T0)
    remember(server)
    for n in range(2, 8):
        a.publish([publication(n, b"d%d/a" % n)], T0)
        b.catch_up()
        b.publish([publication(n + 10, b"d%d/b" % n)], T0)
        a.catch_up()
    go_back(server)
    settle(b, a)
    paths = [b"d%d/%b" % (n, who) for n in range(2, 8) for who in (b"a", b"b")]
    expected = [100 + n + more for n in range(2, 8) for more in (0, 10)]
    for engine in (a, b):
        assert engine.sizes(paths) == expected
        assert engine.usage().inodes == 1 + 1 + 6 * 3


def test_a_server_that_was_behind_and_went_on_is_noticed(server: RedisServer, nodes: Nodes) -> None:
    a, b, c = nodes.join("a"), nodes.join("b"), nodes.join("c")
    remember(server)
    a.publish([publication(1, b"lost")], T0)
    b.catch_up()
    assert b.sizes([b"lost", b"0", b"7"]) == [101, None, None]
    go_back(server)
    for n in range(8):  # past the number that the others saw, before they look
        when_there(lambda n=n: c.publish([publication(n + 10, b"%d" % n)], T0))  # type: ignore[misc]
    when_there(b.catch_up)
    assert b.sizes([b"lost", b"0", b"7"]) == [None, 110, 117]
    settle(a, b, c)
    for engine in (a, b, c):
        assert engine.sizes([b"lost", b"0", b"7"]) == [101, 110, 117]
        assert engine.copies(digest(1)) == [a.node_id]


def test_what_others_made_meanwhile_stays(server: RedisServer, nodes: Nodes) -> None:
    a, b = nodes.join("a"), nodes.join("b")
    a.publish([publication(9, b"before")], T0)
    remember(server)
    a.publish([publication(1, b"f")], T0)
    a.forget([a.unlink(ROOT_INO, b"before", T0).ino])
    a.bury([blob.digest for blob in a.doomed(9)])
    go_back(server)
    when_there(lambda: b.publish([publication(2, b"f")], T0))
    settle(a, b)
    for engine in (a, b):
        assert engine.sizes([b"f"]) == [102]
        assert engine.copies(digest(9)) == []  # its bytes went, though its name may be back
    assert [blob.digest for blob in a.doomed(9)] == [digest(1)]
    a.bury([digest(1)])
    b.catch_up()
    assert b.copies(digest(1)) == []


def test_more_was_lost_than_a_node_remembers(
    server: RedisServer, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.journal.CLUSTER_JOURNAL_ENTRIES", 3)
    a, b = nodes.join("a"), nodes.join("b")
    remember(server)
    for n in range(10):
        a.publish([publication(n, b"d/%d" % n)], T0)
    b.catch_up()
    go_back(server)
    settle(a, b)
    for engine in (a, b):
        assert engine.sizes([b"d/%d" % n for n in range(10)]) == [100 + n for n in range(10)]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_server_that_lost_names_while_a_node_was_away(
    server: RedisServer, nodes: Nodes, *, is_emptied: bool
) -> None:
    a = nodes.join("a")
    if not is_emptied:
        remember(server)
    a.publish([publication(1, b"d/f")], T0)
    nodes.leave("a")
    go_back(server)
    a = nodes.join("a")
    settle(a)
    assert a.sizes([b"d/f"]) == [101]
    assert [blob and blob.references for blob in a.blobs([digest(1)])] == [1]
    nodes.leave("a")
    settle(nodes.join("a"))


def test_a_replica_that_lagged_is_promoted(tmp_path: Path) -> None:
    with watched_servers(tmp_path / "servers") as servers:
        nodes = Nodes(tmp_path, servers.url)
        try:
            a, b = nodes.join("a"), nodes.join("b")
            a.publish([publication(1, b"kept")], T0)
            wait_until(lambda: "lag=0" in servers.primary.say("info", "replication"))
            servers.replica.say("config", "set", "masteruser", "nobody")
            servers.replica.say("config", "set", "masterauth", "nothing")
            servers.primary.say("client", "kill", "type", "replica")
            wait_until(lambda: "connected_slaves:0" in servers.primary.say("info", "replication"))
            a.publish([publication(2, b"d/lost")], T0)
            a.rename(ROOT_INO, b"kept", ROOT_INO, b"renamed", T0)
            b.catch_up()
            assert names_of(b) == [b"d", b"renamed"]
            servers.primary.kill()
            servers.wait_for_failover()
            begun_s = time.monotonic()
            settle(b, a)
            assert time.monotonic() - begun_s < 30
            for engine in (a, b):
                assert names_of(engine) == [b"d", b"renamed"]
                assert engine.sizes([b"d/lost", b"renamed"]) == [102, 101]
            a.make(ROOT_INO, b"goes-on", FILE, 0, 0, T0)
        finally:
            nodes.close()
