"""Several engines on one server, doing what they like: when all have heard all, their own tables
say what the shared ones do."""

import random
import secrets
from pathlib import Path

import pytest

from kvfs.errors import NamespaceError
from kvfs.meta.cluster import ClusterView
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import FILE, T0, digest, publication

NODES = 3
STEPS = 150
DIGESTS = range(1, 6)
DIRECTORIES = (b"a", b"b", b"a/c")


class Actors:
    """Engines, and what each may do next."""

    def __init__(self, directory: Path, url: str, seed: int) -> None:
        self._directory = directory
        self._url = url
        self._rng = random.Random(seed)
        self._cluster = secrets.token_hex(8)
        self._ids = [secrets.token_bytes(16) for _ in range(NODES)]
        self.engines = [self._join(index) for index in range(NODES)]
        self._now_ns = T0
        for path in DIRECTORIES:
            self.engines[0].make_directories(path, 0o755, 0, 0, T0)

    def _join(self, index: int) -> RedisEngine:
        node_id = self._ids[index]
        directory = self._directory / node_id.hex()
        return RedisEngine.join(directory, self._url, self._cluster, node_id, now_ns=T0)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def _path(self) -> bytes:
        return self._rng.choice(DIRECTORIES) + b"/" + self._rng.choice([b"1", b"2", b"3"])

    def _place(self, engine: RedisEngine, path: bytes) -> tuple[int, bytes]:
        above, _, name = path.rpartition(b"/")
        [directory] = engine.resolve([above])
        return (ROOT_INO if directory is None else directory.ino), name

    def step(self) -> None:
        """One engine does one thing, or is refused what POSIX refuses."""
        self._now_ns += 1000
        index = self._rng.randrange(NODES)
        engine = self.engines[index]
        act = self._rng.choice(
            (self._publish, self._publish, self._unlink, self._rename, self._link, self._fetch,
             self._evict, self._pin, self._touch, self._rewrite, RedisEngine.catch_up)
        )  # fmt: skip
        try:
            act(engine)
        except NamespaceError:
            return
        finally:
            if self._rng.random() < 0.3:
                self._reap(engine)
        if self._rng.random() < 0.03:
            engine.close()
            self.engines[index] = engine = self._join(index)
            engine.recover()

    def _publish(self, engine: RedisEngine) -> None:
        number = self._rng.choice(DIGESTS)
        [published] = engine.publish([publication(number, self._path())], self._now_ns)
        if published.replaced is not None and not published.replaced.nlink:
            engine.forget([published.replaced.ino])

    def _rewrite(self, engine: RedisEngine) -> None:
        [inode] = engine.resolve([self._path()])
        if inode is not None and inode.is_regular:
            number = self._rng.choice(DIGESTS)
            engine.publish([publication(number, ino=inode.ino)], self._now_ns)
        else:
            engine.make(*self._place(engine, self._path()), FILE, 0, 0, self._now_ns)

    def _unlink(self, engine: RedisEngine) -> None:
        gone = engine.unlink(*self._place(engine, self._path()), self._now_ns)
        engine.forget([gone.ino])

    def _rename(self, engine: RedisEngine) -> None:
        source, target = self._place(engine, self._path()), self._place(engine, self._path())
        renamed = engine.rename(*source, *target, self._now_ns)
        if renamed.replaced is not None:
            engine.forget([renamed.replaced.ino])

    def _link(self, engine: RedisEngine) -> None:
        [inode] = engine.resolve([self._path()])
        if inode is not None:
            engine.link(inode.ino, *self._place(engine, self._path()), self._now_ns)

    def _fetch(self, engine: RedisEngine) -> None:
        number = self._rng.choice(DIGESTS)
        others = [node for node in engine.copies(digest(number)) if node != engine.node_id]
        if others and engine.blobs([digest(number)]) == [None]:
            engine.add_copy(publication(number))

    def _evict(self, engine: RedisEngine) -> None:
        for candidate in engine.coldest(1):
            if not engine.end_copies([candidate.digest], set(self._ids) - {engine.node_id}):
                engine.unlink_all([candidate.ino], self._now_ns)
                engine.forget([candidate.ino])

    def _pin(self, engine: RedisEngine) -> None:
        [inode] = engine.resolve([self._path()])
        if inode is not None and inode.is_regular:
            engine.set_pinned(inode.ino, self._rng.random() < 0.5)

    def _touch(self, engine: RedisEngine) -> None:
        [inode] = engine.resolve([self._path()])
        if inode is not None:
            engine.restamp([(inode.ino, self._now_ns)])

    def _reap(self, engine: RedisEngine) -> None:
        engine.bury([blob.digest for blob in engine.doomed(9)])

    def settle(self) -> None:
        """Everybody hears everything, and removes what nobody names."""
        for _ in range(2):
            for engine in self.engines:
                engine.catch_up()
                while engine.recheck_more():
                    pass
                self._reap(engine)

    def check(self) -> None:
        shown = [self._tree(engine) for engine in self.engines]
        assert shown[0] == shown[1] == shown[2]
        for engine in self.engines:
            with engine._reading() as view:
                assert isinstance(view, ClusterView)
                ranked = set()
                for number in DIGESTS:
                    holders = [view.inode(ino) for ino in view.holders(digest(number))]
                    blob = view.blob(digest(number))
                    is_copy = engine.node_id in view.copies(digest(number))
                    assert is_copy == (blob is not None)
                    assert blob is None or blob.references == len(holders) > 0
                    if blob is not None:
                        ranked |= {i.ino for i in holders if i.nlink and not i.pinned}
            assert {candidate.ino for candidate in engine.coldest(99)} == ranked

    def _tree(self, engine: RedisEngine) -> list[tuple[bytes, int, bytes]]:
        found = []
        for path in (b"", *DIRECTORIES):
            [directory] = engine.resolve([path])
            assert directory is not None
            for entry in engine.entries(directory.ino, b"", 99):
                found.append((path + b"/" + entry.name, entry.inode.ino, entry.inode.digest))
        return found


@pytest.mark.parametrize("seed", range(24))
def test_engines_that_do_what_they_like_agree_in_the_end(
    tmp_path: Path, server: RedisServer, seed: int
) -> None:
    actors = Actors(tmp_path, server.url, seed)
    try:
        for _ in range(STEPS):
            actors.step()
        actors.settle()
        actors.check()
    finally:
        actors.close()
