"""Several engines of one cluster, and what is in each of them."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.meta.contract import ROOT_INO, MetaEngine
from kvfs.meta.redis import RedisEngine
from tests.contract.meta_words import T0


@contextmanager
def reopening(directory: Path, url: str) -> Iterator[Callable[[], MetaEngine]]:
    """What `OfEngine` calls `reopen`: the only node of a cluster of its own."""
    opened: list[RedisEngine] = []
    cluster, node_id = secrets.token_hex(8), secrets.token_bytes(16)

    def open_again() -> MetaEngine:
        for engine in opened:
            engine.close()
        opened[:] = [RedisEngine.join(directory, url, cluster, node_id, now_ns=T0)]
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


def names_in(engine: RedisEngine, directory: int = ROOT_INO) -> list[bytes]:
    return [entry.name for entry in engine.entries(directory, b"", 1000)]


def tree_of(engine: RedisEngine, directory: int = ROOT_INO, above: bytes = b"") -> list[bytes]:
    found = []
    for entry in engine.entries(directory, b"", 100):
        found.append(above + entry.name)
        if entry.inode.is_directory:
            found += tree_of(engine, entry.inode.ino, above + entry.name + b"/")
    return found
