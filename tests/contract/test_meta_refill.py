"""A metadata server that lost what it knew, and nodes that were away or far behind."""

import os
import secrets
import signal

import pytest
import redis

from kvfs.errors import Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.clusters import Cluster, names_in, tree_of
from tests.contract.meta_words import FILE, T0, chunk, digest, publication
from tests.processes import wait_until


def test_a_wiped_server_is_noticed(cluster: Cluster, server: RedisServer) -> None:
    a = cluster.join()
    a.publish([publication(1, b"f")], T0)
    with redis.Redis(port=server.port) as client:
        client.flushall()
    with pytest.raises(Unavailable, match="was emptied"):
        a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
    a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
    assert names_in(a) == [b"g"]


def test_a_wiped_server_is_filled_again_by_who_has_the_bytes(
    cluster: Cluster, server: RedisServer
) -> None:
    a, b = cluster.join(), cluster.join()
    [one, two] = a.publish(
        [publication(1, b"kv/m/00/1", chunk=chunk(b"k")), publication(2, b"x/2")], T0
    )
    a.link(two.inode.ino, ROOT_INO, b"again", T0)
    a.rename(two.parent, b"2", ROOT_INO, b"moved", T0)
    b.catch_up()
    b.publish([publication(3, b"kv/m/01/3", chunk=chunk(b"l", b"k", 256))], T0)
    a.catch_up()
    a.restamp([(one.inode.ino, T0 + 9)])
    before = sorted(path for path in tree_of(a) if path != b"x")
    with redis.Redis(port=server.port) as client:
        client.flushall()
    for engine in (a, b):
        with pytest.raises(Unavailable, match="was emptied"):
            engine.catch_up()
    assert tree_of(b) == []
    for engine in (a, b):
        while engine.refill_more(T0):
            pass
    for engine in (a, b):
        engine.catch_up()
        assert sorted(path for path in tree_of(engine) if path != b"x") == before
        while engine.recheck_more():
            pass
    assert a.inode(two.inode.ino) == b.inode(two.inode.ino)
    assert [c.used_ns for c in a.coldest(9)] == [T0 - 1, T0 + 9]
    assert [blob and blob.references for blob in a.blobs([digest(1), digest(2)])] == [1, 1]
    namespace = b.resolve([b"kv/m"])[0]
    assert namespace is not None
    assert [e.info.key for e in b.children(namespace.ino, b"k", 0, 9)] == [b"l"]
    root = a.inode(ROOT_INO)
    assert root is not None and root.nlink == 2 + sum(b"/" not in p for p in (b"kv", b"x"))
    assert a.copies(digest(1)) == [a.node_id]


def test_a_node_that_was_away_gives_up_what_has_no_name_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.commit_words.CLUSTER_FEED_ENTRIES", 4)
    a, b = cluster.join(), cluster.join()
    [gone, _] = a.publish([publication(1, b"f"), publication(2, b"kept")], T0)
    b.catch_up()
    b.forget([b.unlink(ROOT_INO, b"f", T0).ino])
    for n in range(200):
        b.make(ROOT_INO, b"d%d" % n, FILE, 0, 0, T0)
    a.catch_up()
    while a.recheck_more():
        pass
    assert [blob.digest for blob in a.doomed(9)] == [digest(1)]
    assert [c.digest for c in a.coldest(9)] == [digest(2)]
    assert a.inode(gone.inode.ino) is None


def is_made(engine: RedisEngine, name: bytes) -> bool:
    """Whether a file can be made; a server that did not answer is left alone for a moment."""
    try:
        engine.make(ROOT_INO, name, FILE, 0, 0, T0)
    except Unavailable:
        return False
    return True


def test_a_node_that_is_cut_off_knows_what_it_has(cluster: Cluster, server: RedisServer) -> None:
    a = cluster.join()
    [published] = a.publish([publication(1, b"d/f")], T0)
    a._known.clear()  # as a node whose cache has forgotten it
    a._cache.clear()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert a.resolve([b"d/f"]) == [published.inode]
        assert names_in(a) == [b"d"]
        with pytest.raises(Unavailable):
            a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    wait_until(lambda: is_made(a, b"g"))


def wipe(server: RedisServer, *engines: RedisEngine) -> None:
    """Have a server lose everything, and those engines tell it what they know."""
    with redis.Redis(port=server.port) as client:
        client.flushall()
    for engine in engines:
        with pytest.raises(Unavailable, match="was emptied"):
            engine.catch_up()
    for engine in engines:
        while engine.refill_more(T0):
            pass


def remember(engine: RedisEngine) -> None:
    engine.catch_up()
    while engine.recheck_more() or engine.remember_more():
        pass


def test_who_has_a_copy_knows_all_that_leads_to_it(cluster: Cluster, server: RedisServer) -> None:
    """Directories, name and chunk record were made by a node that is not there any more."""
    a, b = cluster.join(), cluster.join()
    a.publish([publication(1, b"kv/m/00/1.safetensors", chunk=chunk(b"k", b"j", 256))], T0)
    a.catch_up()
    before = tree_of(a)
    b.catch_up()
    assert b.add_copy(publication(1))
    remember(b)
    assert not b.remember_more()
    wipe(server, b)
    assert tree_of(b) == before
    namespace = b.resolve([b"kv/m"])[0]
    assert namespace is not None
    assert [e.info.key for e in b.children(namespace.ino, b"j", 0, 9)] == [b"k"]


def test_a_file_that_others_moved_is_given_back_where_it_is(
    cluster: Cluster, server: RedisServer
) -> None:
    a, b = cluster.join(), cluster.join()
    b.publish([publication(1, b"d/f"), publication(2, b"d/g")], T0)
    remember(b)
    a.catch_up()
    directory = a.resolve([b"d"])[0]
    assert directory is not None
    new = a.make_directories(b"new/deep", 0o755, 0, 0, T0)
    a.rename(directory.ino, b"f", new.ino, b"f", T0)
    a.rename(ROOT_INO, b"d", new.ino, b"moved", T0)
    remember(b)
    wipe(server, b)
    assert sorted(tree_of(b)) == [
        b"new", b"new/deep", b"new/deep/f", b"new/deep/moved", b"new/deep/moved/g"
    ]  # fmt: skip


def test_a_node_that_was_away_when_the_server_was_emptied_fills_it(
    cluster: Cluster, server: RedisServer
) -> None:
    node_id = secrets.token_bytes(16)
    a = cluster.join(node_id)
    a.publish([publication(1, b"d/f")], T0)
    before = tree_of(a)
    for _ in range(2):
        a.close()
        cluster.engines.remove(a)
        with redis.Redis(port=server.port) as client:
            client.flushall()
        a = cluster.join(node_id)
        assert tree_of(a) == []
        while a.refill_more(T0) or a.recheck_more() or a.remember_more():
            pass
        assert tree_of(a) == before
        assert (a.doomed(9), a.copies(digest(1))) == ([], [node_id])


def test_a_node_that_is_far_behind_does_not_hear_all_that_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.news.CLUSTER_NEWS_ENTRIES", 2)
    monkeypatch.setattr("kvfs.meta.following.CLUSTER_CATCH_UP_ENTRIES", 8, raising=False)
    a, b = cluster.join(), cluster.join()
    b.publish([publication(1, b"f"), publication(2, b"kept")], T0)
    a.catch_up()
    asked: list[int] = []
    news = b._server.news
    monkeypatch.setattr(b._server, "news", lambda after: asked.append(after) or news(after))
    a.forget([a.unlink(ROOT_INO, b"f", T0).ino])
    b.catch_up()
    assert [blob.digest for blob in b.doomed(9)] == [digest(1)]
    a.publish([publication(3, b"g")], T0)
    a.forget([a.unlink(ROOT_INO, b"kept", T0).ino])
    for n in range(8):
        a.make(ROOT_INO, b"%d" % n, FILE, 0, 0, T0)
    asked.clear()
    told = b.catch_up()
    assert len(asked) == 1
    assert any(one.moves_directories for one in told)
    assert b.sizes([b"kept", b"g"]) == [None, 103]
    while b.recheck_more():
        pass
    assert sorted(blob.digest for blob in b.doomed(9)) == sorted([digest(1), digest(2)])
    asked.clear()
    b.catch_up()
    assert len(asked) == 1
