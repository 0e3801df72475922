"""The engine of a cluster against the contract, and what several of them promise each other."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest
import redis

from kvfs.errors import InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.meta.contract import ROOT_INO, MetaEngine
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer, free_port
from tests.contract.clusters import Cluster, names_in, reopening
from tests.contract.meta_suite import MetaSuite
from tests.contract.meta_tiers import MetaTiersSuite
from tests.contract.meta_words import FILE, T0, chunk, digest, publication, refused


class TestRedis(MetaSuite, MetaTiersSuite):
    @pytest.fixture
    def reopen(self, tmp_path: Path, server: RedisServer) -> Iterator[Callable[[], MetaEngine]]:
        with reopening(tmp_path / "meta", server.url) as reopen:
            yield reopen


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
    monkeypatch.setattr("kvfs.meta.commit_words.CLUSTER_FEED_ENTRIES", 4)
    a, b = cluster.join(), cluster.join()
    assert b.sizes([b"f0", b"f199"]) == [None, None]
    for n in range(200):  # the feed is cut in steps of about a hundred
        a.publish([publication(1, b"f%d" % n)], T0)
    b.catch_up()
    assert b.sizes([b"f0", b"f199"]) == [101, 101]


def test_a_url_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"write redis://host:6379"):
        RedisEngine.join(tmp_path, "http://here", "c", bytes(16))


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        RedisEngine.join(tmp_path, f"redis://127.0.0.1:{free_port()}", "c", bytes(16))
    assert not (tmp_path / "data.mdb").exists()


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
