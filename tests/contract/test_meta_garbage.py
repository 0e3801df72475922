"""A metadata server whose keys are lost, or hold what no node wrote: misses, never the end of a
node, never another file's bytes, and nothing that an emptied server does not heal."""

import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvfs.errors import KvfsError, NamespaceError
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import FILE, T0, chunk, digest, publication
from tests.processes import wait_until

STEPS = 120
PATHS = [b"%b/%d" % (above, n) for above in (b"a", b"b", b"a/c", b"kv/m/00") for n in range(4)]


@pytest.fixture
def allow_warnings() -> list[str]:
    return ["metadata server", "another version of kvfs wrote"]


class Rig:
    """Engines of one cluster, and the hand of somebody who spoils what they keep on the server."""

    def __init__(self, directory: Path, server: RedisServer) -> None:
        self._directory = directory
        self._server = server
        self.client = redis.Redis(port=server.port)
        self.name = secrets.token_hex(8)
        self.ids = [secrets.token_bytes(16) for _ in range(2)]
        self.engines = [self._join(node_id) for node_id in self.ids]

    def _join(self, node_id: bytes) -> RedisEngine:
        directory = self._directory / node_id.hex()
        engine = RedisEngine.join(directory, self._server.url, self.name, node_id, now_ns=T0)
        engine.recover()
        return engine

    def restart(self, index: int) -> None:
        self.engines[index].close()
        self.engines[index] = self._join(self.ids[index])

    def key(self, name: bytes) -> bytes:
        return b"{kvfs:%b}:%b" % (self.name.encode(), name)

    def all_keys(self) -> list[bytes]:
        return sorted(self.client.scan_iter(b"{kvfs:%b}:*" % self.name.encode()))

    def settle(self) -> None:
        """What nodes do in the background."""
        for engine in self.engines:
            work(engine)
        for engine in self.engines:
            work(engine)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.client.close()


@pytest.fixture
def rig(tmp_path: Path, server: RedisServer) -> Iterator[Rig]:
    made = Rig(tmp_path, server)
    yield made
    made.close()


def work(engine: RedisEngine) -> None:
    """As `Cluster._refill_always` does; what fails is tried again the next time."""
    try:
        engine.look_after()
        engine.catch_up()
        while engine.refill_more(T0) or engine.recheck_more() or engine.remember_more():
            pass
        reap(engine)
    except KvfsError:
        return


def reap(engine: RedisEngine) -> None:
    engine.bury([blob.digest for blob in engine.doomed(99)])


def names_in(engine: RedisEngine, directory: int = ROOT_INO) -> list[bytes]:
    return [entry.name for entry in engine.entries(directory, b"", 1000)]


def is_done(act: Callable[[], object]) -> bool:
    try:
        act()
    except KvfsError as error:
        print(f"not yet: {error!r}")  # which pytest shows where it stays so
        return False
    return True


# By the case --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"inodes", b"seq", b"mark", b"last", b"feed", b"epoch", b"i\1"])
@pytest.mark.parametrize("spoil", ["lost", "garbage", "negative", "list"])
def test_what_all_nodes_count_on_is_made_anew(rig: Rig, name: bytes, spoil: str) -> None:
    a, b = rig.engines
    a.publish([publication(1, b"f"), publication(2, b"d/g")], T0)
    b.catch_up()
    key = rig.key(name + bytes(7) if name == b"i\1" else name)
    assert rig.client.exists(key)
    rig.client.delete(key)
    if spoil in ("garbage", "negative"):
        rig.client.set(key, b"-1" if spoil == "negative" else secrets.token_bytes(20))
    elif spoil == "list":
        rig.client.rpush(key, b"x")
    rig.settle()
    removed = []
    wait_until(lambda: is_done(lambda: removed.append(a.unlink(ROOT_INO, b"f", T0))))
    a.forget([removed[0].ino])
    reap(a)
    rig.settle()
    wait_until(lambda: is_done(lambda: b.publish([publication(3, b"d/h")], T0)))
    rig.restart(0)
    rig.settle()
    for engine in rig.engines:
        assert engine.sizes([b"f", b"d/g", b"d/h"]) == [None, 102, 103]
        assert engine.usage().inodes in range(7)


def test_a_lost_count_and_a_removed_file_end_no_node(rig: Rig) -> None:
    a, _ = rig.engines
    a.publish([publication(1, b"f")], T0)
    before = a.usage().inodes
    rig.client.delete(rig.key(b"inodes"))
    gone = a.unlink(ROOT_INO, b"f", T0)
    a.forget([gone.ino])
    rig.restart(0)
    assert rig.engines[0].usage().inodes == before - 1


def test_others_entries_in_the_feed_stop_nobody(rig: Rig) -> None:
    a, b = rig.engines
    a.publish([publication(1, b"f")], T0)
    for _ in range(5):
        rig.client.xadd(rig.key(b"feed"), {"a": "b"})
    a.rename(ROOT_INO, b"f", ROOT_INO, b"g", T0)
    a.publish([publication(2, b"h")], T0)
    b.catch_up()
    for engine in (a, b):
        assert engine.sizes([b"f", b"g", b"h"]) == [None, 101, 102]
    rig.client.xadd(rig.key(b"feed"), {"a": "b"})
    begun_s = time.monotonic()
    assert not any(b.wait_news() for _ in range(3))
    assert time.monotonic() - begun_s >= 0.3  # not as fast as it can
    b.look_after()
    b.publish([publication(3, b"i")], T0)
    assert a.wait_news()
    a.catch_up()
    assert a.sizes([b"i"]) == [103]


def test_a_counter_that_went_back_loses_nothing(rig: Rig) -> None:
    a, b = rig.engines
    for n in range(5):
        a.publish([publication(n, b"%d" % n)], T0)
    b.catch_up()
    for name in (b"seq", b"inodes"):
        rig.client.set(rig.key(name), 0)
    for n in range(5):
        b.unlink(ROOT_INO, b"%d" % n, T0)
        b.publish([publication(n + 5, b"%d" % n)], T0)
    rig.settle()
    for engine in (a, b):
        assert engine.sizes([b"%d" % n for n in range(5)]) == [105 + n for n in range(5)]


def test_a_key_of_another_kind_leaves_no_change_done_by_half(rig: Rig) -> None:
    a, b = rig.engines
    [published] = a.publish([publication(1, b"d/f")], T0)
    place = published.parent.to_bytes(8, "big")
    for letter in (b"d", b"e"):
        rig.client.delete(rig.key(letter + place))
        rig.client.set(rig.key(letter + place), b"x")
    a.catch_up()
    a._forget_all()
    a.publish([publication(2, b"d/g")], T0)
    b.catch_up()
    b._forget_all()  # the feed told it of the first file
    for engine in (a, b):
        assert engine.sizes([b"d/f", b"d/g"]) == [None, 102]
        assert names_in(engine, published.parent) == [b"g"]


def test_a_name_whose_file_the_server_lost_is_free(rig: Rig) -> None:
    a, b = rig.engines
    published = a.publish([publication(1, b"d/f"), publication(2, b"d/g")], T0)
    for one, raw in zip(published, (None, secrets.token_bytes(90)), strict=True):
        key = rig.key(b"i" + one.inode.ino.to_bytes(8, "little"))
        rig.client.delete(key)
        if raw is not None:
            rig.client.set(key, raw)
    for engine in (a, b):
        engine._forget_all()
        assert names_in(engine, published[0].parent) == []
        assert engine.resolve([b"d/f", b"d/g"]) == [None, None]
    b.publish([publication(3, b"d/f")], T0)
    assert b.sizes([b"d/f"]) == [103]
    b.unlink(published[0].parent, b"f", T0)
    b.rmdir(ROOT_INO, b"d", T0)
    assert names_in(b) == []


def test_a_batch_with_a_strange_entry_is_answered_at_once(rig: Rig) -> None:
    a, b = rig.engines
    [published] = a.publish([publication(1, b"f")], T0)
    for raw in (secrets.token_bytes(20), b"", b"x" * 160):
        rig.client.hset(rig.key(b"d" + ROOT_INO.to_bytes(8, "big")), b"g", raw)
        b._forget_all()
        begun_s = time.monotonic()
        assert b.sizes([b"f", b"g", b"h"]) == [101, None, None]
        assert time.monotonic() - begun_s < 0.4
        assert b.resolve([b"f", b"g"]) == [published.inode, None]


# Whatever it is --------------------------------------------------------------------------------


class Hand:
    """Somebody who writes to any key of a cluster."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self._rig = rig
        self._rng = rng

    def spoil(self) -> None:
        client, rng = self._rig.client, self._rng
        keys = self._rig.all_keys()
        if not keys:
            return
        key = rng.choice(keys)
        kind = client.type(key)
        noise = rng.randbytes(rng.choice((0, 1, 8, 16, 20, 24, 65, 81, 300)))
        if rng.random() < 0.3:
            client.delete(key)
            if rng.random() < 0.7:
                rng.choice((self._string, self._hash, self._zset, self._stream, self._list))(
                    key, noise
                )
        elif kind == b"string":
            client.set(key, rng.choice((noise, b"0", b"-1", b"%d" % rng.randrange(2**70))))
        elif kind == b"hash":
            client.hset(key, rng.choice([*client.hkeys(key), noise]), rng.randbytes(20))
        elif kind == b"zset":
            rng.choice((self._zset, lambda key, _: client.zremrangebyrank(key, 0, 0)))(key, noise)
        elif kind == b"stream":
            rng.choice((self._stream, self._say))(key, noise)

    def _string(self, key: bytes, noise: bytes) -> None:
        self._rig.client.set(key, noise)

    def _hash(self, key: bytes, noise: bytes) -> None:
        self._rig.client.hset(key, noise, noise)

    def _zset(self, key: bytes, noise: bytes) -> None:
        self._rig.client.zadd(key, {noise: 0})

    def _list(self, key: bytes, noise: bytes) -> None:
        self._rig.client.rpush(key, noise)

    def _stream(self, key: bytes, noise: bytes) -> None:
        self._rig.client.xadd(key, {noise: noise})

    def _say(self, key: bytes, noise: bytes) -> None:
        last = self._rig.client.xinfo_stream(key)["last-generated-id"].partition(b"-")[0]
        words = bytes(32) + self._rng.choice((noise, b"\x93\x91\x92\xa1i\xc4\x01x\x90\xc2"))
        if int(last) < 2**60:
            self._rig.client.xadd(key, {b"": words}, id=b"%d-0" % (int(last) + 1))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_server_holds_nodes_live_and_show_no_wrong_bytes(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    hand = Hand(rig, rng)
    meant: dict[bytes, set[bytes]] = {path: set() for path in PATHS}
    for step in range(STEPS):
        hand.spoil()
        index = rng.randrange(2)
        engine, path, number = rig.engines[index], rng.choice(PATHS), rng.randrange(20)
        try:
            engine.catch_up()
            act = rng.random()
            if act < 0.4:
                meant[path].add(digest(number))
                key = chunk(b"k%d" % number) if path.startswith(b"kv") else None
                engine.publish([publication(number, path, chunk=key)], T0 + step)
            elif act < 0.6:
                for inode in engine.resolve([path]):
                    if inode is not None:
                        [(parent, name), *_] = engine.names_of(inode.ino) or [(0, b"")]
                        engine.forget([engine.unlink(parent, name, T0 + step).ino])
            elif act < 0.7:
                for number in range(20):
                    if engine.copies(digest(number)) and engine.blobs([digest(number)]) == [None]:
                        engine.add_copy(publication(number))
            elif act < 0.8:
                engine.lose(digest(number), T0 + step)
            elif act < 0.9:
                engine.recover()
            else:
                for candidate in engine.coldest(2):
                    engine.unlink_all([candidate.ino], T0 + step)
                    engine.continuations(candidate.ino, 0, 9)
        except KvfsError:
            continue
        finally:
            work(engine)
        if rng.random() < 0.05:
            wait_until(lambda index=index: is_done(lambda: rig.restart(index)))  # type: ignore[misc]
        begun_s = time.monotonic()
        check(rig.engines[index], meant)
        assert time.monotonic() - begun_s < 2
    wait_until(lambda: is_whole_again(rig))


def check(engine: RedisEngine, meant: dict[bytes, set[bytes]]) -> None:
    """A path shows what somebody stored there once, or nothing."""
    try:
        found = engine.resolve(PATHS)
        engine.sizes(PATHS)
        names_in(engine)
        engine.usage()
    except KvfsError:
        return
    for path, inode in zip(PATHS, found, strict=True):
        if inode is not None and inode.digest:
            assert inode.digest in meant[path]
            assert inode.size_bytes == 100 + inode.digest[-1]


def is_whole_again(rig: Rig) -> bool:
    """Whether an emptied server gets every name that is made from then on."""
    for key in rig.all_keys():
        rig.client.delete(key)
    rig.settle()
    rig.settle()
    for index, engine in enumerate(rig.engines):
        name = b"after-%d" % index
        if not is_done(lambda e=engine, n=name, i=index: e.publish([publication(i, n)], T0)):  # type: ignore[misc]
            return False
    rig.settle()
    for engine in rig.engines:
        assert engine.sizes([b"after-0", b"after-1"]) == [100, 101]
        assert {b"after-0", b"after-1"} <= set(names_in(engine))
        try:
            engine.make(ROOT_INO, b"after-0", FILE, 0, 0, T0)
        except NamespaceError:
            continue
        raise AssertionError("a name was made twice")
    return True


def test_what_a_server_evicted_it_gets_back(rig: Rig) -> None:
    a, b = rig.engines
    for n, path in enumerate(PATHS):
        a.publish([publication(n, path)], T0)
    b.catch_up()
    rig.settle()
    rng = random.Random(1)
    for letter in b"idenho":
        keys = [key for key in rig.all_keys() if key[len(rig.key(b""))] == letter]
        rig.client.delete(*rng.sample(keys, len(keys) // 2))
    a.give_back_lost()
    rig.settle()
    b.give_back_lost()
    rig.settle()
    for engine in rig.engines:
        assert engine.sizes(PATHS) == [100 + n for n in range(len(PATHS))]
        assert names_in(engine) == [b"a", b"b", b"kv"]
        for path in (b"a", b"b", b"a/c", b"kv/m/00"):
            [directory] = engine.resolve([path])
            assert directory is not None
            assert set(names_in(engine, directory.ino)) - {b"c"} == {b"0", b"1", b"2", b"3"}
    assert [blob and blob.references for blob in a.blobs(list(map(digest, range(16))))] == [1] * 16


def test_an_empty_record_is_no_conflict_for_ever(rig: Rig) -> None:
    a, _ = rig.engines
    loose = a.make(ROOT_INO, b"unfinished", FILE, 0, 0, T0)
    rig.client.set(rig.key(b"i" + loose.ino.to_bytes(8, "little")), b"")
    rig.restart(0)  # which drops what it did not finish
    made = rig.engines[0].make(ROOT_INO, b"unfinished", FILE, 0, 0, T0)
    assert rig.engines[0].lookup(ROOT_INO, b"unfinished") == made
