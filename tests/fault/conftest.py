"""A node in the test's own process, whose disk can fail at a chosen moment; an honest client."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.meta.lmdb import LmdbEngine
from kvfs.node import Node
from kvfs.settings.words import Config, DirectoryConfig
from scripts.redis_rig import RedisServer, redis_server
from tests.peers import Ground


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with two directories, without its socket and its background tasks."""
    configs = (DirectoryConfig(tmp_path / "one"), DirectoryConfig(tmp_path / "two"))
    directories = [BlobDirectory.open(config) for config in configs]
    engine = LmdbEngine.open(tmp_path / "one" / "meta")
    yield Node(Config(configs), list(directories), engine)
    engine.close()
    for directory in directories:
        directory.close()


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """A peer that serves an honest client before a test and after it."""
    with ExitStack() as stack:
        made = Ground(tmp_path, stack)
        assert made.is_well()
        yield made
        assert made.is_well()


@pytest.fixture
def meta_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A metadata server."""
    with redis_server(tmp_path / "redis") as started:
        yield started
