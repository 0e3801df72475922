"""The engine of a cluster against the contract, and what several of them promise each other."""

import errno
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
import redis

from kvfs.errors import InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.meta.contract import ROOT_INO, MetaEngine
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer, free_port
from tests.contract.meta_suite import MetaSuite
from tests.contract.meta_tiers import MetaTiersSuite
from tests.contract.meta_words import FILE, T0, chunk, digest, publication, refused
from tests.processes import wait_until


class TestRedis(MetaSuite, MetaTiersSuite):
    @pytest.fixture
    def reopen(self, tmp_path: Path, server: RedisServer) -> Iterator[Callable[[], MetaEngine]]:
        opened: list[RedisEngine] = []
        cluster, node_id = secrets.token_hex(8), secrets.token_bytes(16)

        def open_again() -> MetaEngine:
            for engine in opened:
                engine.close()
            opened[:] = [
                RedisEngine.join(tmp_path / "meta", server.url, cluster, node_id, now_ns=T0)
            ]
            return opened[0]

        yield open_again
        for engine in opened:
            engine.close()


class Cluster:
    """Engines of several nodes on one server."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._url = url
        self._name = secrets.token_hex(8)
        self.engines: list[RedisEngine] = []

    def join(self, node_id: bytes = b"") -> RedisEngine:
        node_id = node_id or secrets.token_bytes(16)
        directory = self._directory / node_id.hex()
        engine = RedisEngine.join(directory, self._url, self._name, node_id, now_ns=T0)
        self.engines.append(engine)
        return engine


@pytest.fixture
def cluster(tmp_path: Path, server: RedisServer) -> Iterator[Cluster]:
    made = Cluster(tmp_path, server.url)
    yield made
    for engine in made.engines:
        engine.close()


def names_in(engine: RedisEngine, directory: int = ROOT_INO) -> list[bytes]:
    return [entry.name for entry in engine.entries(directory, b"", 1000)]


def test_what_one_node_does_another_sees(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    assert b.resolve([b"kv/f"]) == [None]
    [published] = a.publish([publication(1, b"kv/f")], T0)
    b.catch_up()
    [seen] = b.resolve([b"kv/f"])
    assert seen == published.inode
    assert b.sizes([b"kv/f"]) == [101]
    a.rename(published.parent, b"f", ROOT_INO, b"g", T0)
    b.catch_up()
    assert b.sizes([b"kv/f", b"g"]) == [None, 101]
    b.unlink(ROOT_INO, b"g", T0)
    a.catch_up()
    assert (names_in(a), a.usage().inodes) == ([b"kv"], b.usage().inodes)


def test_numbers_of_two_nodes_differ(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    inos = [(a, b)[n % 2].make(ROOT_INO, b"%d" % n, FILE, 0, 0, T0).ino for n in range(8)]
    assert len(set(inos)) == 8
    assert max(inos) < 1 << 58


def test_a_write_on_old_knowledge_runs_again(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    assert (names_in(a), names_in(b)) == ([], [])
    assert [e.lookup(ROOT_INO, b"f") for e in (a, b)] == [None, None]
    a.make(ROOT_INO, b"f", FILE, 0, 0, T0)
    refused(errno.EEXIST, b.make, ROOT_INO, b"f", FILE, 0, 0, T0)  # without having been told
    a.unlink(ROOT_INO, b"f", T0)
    b.make(ROOT_INO, b"f", FILE, 0, 0, T0)
    made = a.make_directories(b"d/e", 0o755, 0, 0, T0)
    assert b.make_directories(b"d/e", 0o755, 0, 0, T0).ino == made.ino
    b.rmdir(b.parent_of(made.ino), b"e", T0)
    refused(errno.ENOENT, a.make, made.ino, b"x", FILE, 0, 0, T0)


def test_a_name_that_is_replaced_is_there_at_all_times(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    a.publish([publication(1, b"f"), publication(2, b"g")], T0)
    b.catch_up()
    assert b.sizes([b"f"]) == [101]  # it knows the entry, and not the file
    a.forget([a.rename(ROOT_INO, b"g", ROOT_INO, b"f", T0).replaced.ino])  # type: ignore[union-attr]
    found = b.lookup(ROOT_INO, b"f")
    assert found is not None and found.digest == digest(2)
    refused(errno.ENOENT, b.lookup, 1 << 40, b"f")


def test_nodes_that_fill_one_directory_lose_nothing(cluster: Cluster) -> None:
    engines = [cluster.join() for _ in range(3)]
    failures: list[KvfsError] = []

    def fill(index: int) -> None:
        try:
            for n in range(40):
                engines[index].publish([publication(n, b"d/%d-%d" % (index, n))], T0 + n)
        except KvfsError as error:
            failures.append(error)

    threads = [threading.Thread(target=fill, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for engine in engines:
        engine.catch_up()
        directory = engine.lookup(ROOT_INO, b"d")
        assert directory is not None
        assert names_in(engine, directory.ino) == sorted(
            b"%d-%d" % (i, n) for i in range(3) for n in range(40)
        )
        assert engine.usage().inodes == 122


def test_a_blob_goes_where_it_lies_when_another_node_removes_its_last_name(
    cluster: Cluster,
) -> None:
    a, b = cluster.join(), cluster.join()
    [published] = a.publish([publication(1, b"f")], T0)
    b.catch_up()
    assert (b.blobs([digest(1)]), b.coldest(9)) == ([None], [])
    assert b.copies(digest(1)) == [a.node_id]
    b.unlink(ROOT_INO, b"f", T0)
    b.forget([published.inode.ino])
    assert a.doomed(9) == []
    a.catch_up()
    assert [blob.digest for blob in a.doomed(9)] == [digest(1)]
    assert a.coldest(9) == []
    a.bury([digest(1)])
    b.catch_up()
    assert b.copies(digest(1)) == []


def test_equal_bytes_on_two_nodes_are_two_copies(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    a.publish([publication(1, b"f")], T0)
    [second] = b.publish([publication(1, b"g")], T0 + 1)
    a.catch_up()
    assert sorted(a.copies(digest(1))) == sorted([a.node_id, b.node_id])
    for engine in (a, b):
        [blob] = engine.blobs([digest(1)])
        assert blob is not None and blob.references == 2
        assert len(engine.coldest(9)) == 2
    a.restamp([(second.inode.ino, T0 + 50)])  # each node has its own order of use
    assert [c.used_ns for c in a.coldest(9)] == [T0, T0 + 50]
    assert [c.used_ns for c in b.coldest(9)] == [T0, T0 + 1]


def test_a_lost_copy_costs_names_only_where_it_was_the_last(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    a.publish([publication(1, b"f")], T0)
    assert b.add_copy(publication(1))
    assert a.lose(digest(1), T0) == []
    assert (a.blobs([digest(1)]), a.coldest(9), a.usage().blobs) == ([None], [], 0)
    assert a.copies(digest(1)) == [b.node_id]
    assert [name for _, name, _ in b.lose(digest(1), T0)] == [b"f"]
    a.catch_up()
    assert names_in(a) == []


def test_what_a_lost_answer_said_is_learned(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = cluster.join()
    assert names_in(a) == []
    commit = a._server.commit

    def lose_the_answer(*arguments: Any) -> Never:
        commit(*arguments)
        raise Unavailable("lost")

    monkeypatch.setattr(a._server, "commit", lose_the_answer)
    with pytest.raises(Unavailable):
        a.publish([publication(1, b"f")], T0)
    monkeypatch.undo()
    assert names_in(a) == [b"f"]
    a.publish([publication(2, b"g")], T0)  # under a number of its own
    assert a.sizes([b"f", b"g"]) == [101, 102]
    assert [i and i.digest for i in a.resolve([b"f", b"g"])] == [digest(1), digest(2)]


def test_a_node_that_died_before_it_knew_what_it_did_gives_no_number_twice(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = cluster.join()
    commit = a._server.commit

    def die_then(*arguments: Any) -> Never:
        commit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(a._server, "commit", die_then)
    with pytest.raises(KeyboardInterrupt):
        a.publish([publication(1, b"f")], T0)
    a.close()
    cluster.engines.remove(a)
    again = cluster.join(a.node_id)
    again.publish([publication(2, b"g")], T0)
    assert [i and i.digest for i in again.resolve([b"f", b"g"])] == [digest(1), digest(2)]


def test_a_node_whose_tables_take_nothing_stops_giving_numbers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.numbers.CLUSTER_NUMBERS_SKIPPED", 4)
    a = cluster.join()

    def fill(batch: Any) -> Never:
        raise OutOfSpace("no room")

    monkeypatch.setattr("kvfs.meta.cluster.ClusterBatch.finish", fill)
    for n in range(3):
        with pytest.raises(OutOfSpace):
            a.make(ROOT_INO, b"f%d" % n, FILE, 0, 0, T0)
    with pytest.raises(Unavailable, match="could not be written"):
        a.make(ROOT_INO, b"g", FILE, 0, 0, T0)


def test_a_doomed_blob_goes_though_its_bytes_get_a_name_elsewhere(cluster: Cluster) -> None:
    a, b = cluster.join(), cluster.join()
    a.publish([publication(1, b"f")], T0)
    a.forget([a.unlink(ROOT_INO, b"f", T0).ino])
    assert [blob.digest for blob in a.doomed(9)] == [digest(1)]
    b.catch_up()
    b.publish([publication(1, b"g")], T0)
    a.catch_up()
    assert [blob.digest for blob in a.doomed(9)] == [digest(1)]
    a.bury([digest(1)])
    assert (a.copies(digest(1)), a.coldest(9)) == ([b.node_id], [])


def test_a_node_that_missed_the_feed_forgets_what_it_knew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.server.CLUSTER_FEED_ENTRIES", 4)
    a, b = cluster.join(), cluster.join()
    assert b.sizes([b"f0", b"f199"]) == [None, None]
    for n in range(200):  # the feed is cut in steps of about a hundred
        a.publish([publication(1, b"f%d" % n)], T0)
    b.catch_up()
    assert b.sizes([b"f0", b"f199"]) == [101, 101]


def test_a_wiped_server_is_noticed(cluster: Cluster, server: RedisServer) -> None:
    a = cluster.join()
    a.publish([publication(1, b"f")], T0)
    with redis.Redis(port=server.port) as client:
        client.flushall()
    with pytest.raises(Unavailable, match="was emptied"):
        a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
    a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
    assert names_in(a) == [b"g"]


def test_a_url_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"write redis://host:6379"):
        RedisEngine.join(tmp_path, "http://here", "c", bytes(16))


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        RedisEngine.join(tmp_path, f"redis://127.0.0.1:{free_port()}", "c", bytes(16))
    assert not (tmp_path / "data.mdb").exists()


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
    monkeypatch.setattr("kvfs.meta.server.CLUSTER_FEED_ENTRIES", 4)
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


def is_made(engine: RedisEngine, name: bytes) -> bool:
    """Whether a file can be made; a server that did not answer is left alone for a moment."""
    try:
        engine.make(ROOT_INO, name, FILE, 0, 0, T0)
    except Unavailable:
        return False
    return True


def tree_of(engine: RedisEngine, directory: int = ROOT_INO, above: bytes = b"") -> list[bytes]:
    found = []
    for entry in engine.entries(directory, b"", 100):
        found.append(above + entry.name)
        if entry.inode.is_directory:
            found += tree_of(engine, entry.inode.ino, above + entry.name + b"/")
    return found


def test_what_others_do_costs_who_has_nothing_of_it_no_question(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = cluster.join(), cluster.join()
    assert b.sizes([b"d/f"]) == [None]
    [published] = a.publish([publication(1, b"d/f")], T0)
    a.forget([a.unlink(published.parent, b"f", T0).ino])
    a.publish([publication(2, b"d/f")], T0)
    asked: list[str] = []
    for name in ("values", "members", "dirents", "commit"):
        monkeypatch.setattr(b._server, name, lambda *_, name=name: asked.append(name))
    b.catch_up()
    monkeypatch.undo()
    assert asked == []
    assert b.sizes([b"d/f"]) == [102]


def test_a_new_file_costs_few_questions(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a = cluster.join()
    a.publish([publication(1, b"d/f")], T0)
    asked: list[str] = []
    for name in ("values", "members", "dirents", "commit", "news"):
        method = getattr(a._server, name)
        monkeypatch.setattr(
            a._server,
            name,
            lambda *words, name=name, method=method: asked.append(name) or method(*words),
        )
    a.publish([publication(n, b"d/%d" % n, chunk=chunk(b"%d" % n)) for n in (2, 3)], T0)
    # Who holds the bytes already, and whether the name is free, of each; where the directory lies;
    # nothing under the numbers that the files were given just now.
    assert sorted(asked) == ["commit", "members", "members", "members", "values", "values"]


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


def test_who_compares_what_it_has_tells_nobody_what_is_so(
    cluster: Cluster, server: RedisServer
) -> None:
    a, b = cluster.join(), cluster.join()
    a.publish([publication(n, b"%d" % n) for n in range(20)], T0)
    b.catch_up()
    b.add_copy(publication(1))
    a.catch_up()
    with redis.Redis(port=server.port) as client:
        client.zrem(a._server.prefix + b"o" + digest(2), a.node_id)  # as one that is wrong
        for engine in (a, b):
            engine._known.clear()
            engine.recheck()
            before = client.get(a._server.prefix + b"seq")
            while engine.recheck_more():
                pass
            told = int(client.get(a._server.prefix + b"seq") or 0) - int(before or 0)
            assert told == (1 if engine is a else 0)
    assert a.ask_copies([digest(1), digest(2)]) == [{a.node_id, b.node_id}, {a.node_id}]
