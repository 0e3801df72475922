"""What the tests of metadata share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.redis_rig import RedisServer, redis_server
from tests.contract.clusters import Cluster


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A metadata server, for all tests of a module."""
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def cluster(tmp_path: Path, server: RedisServer) -> Iterator[Cluster]:
    """Engines of a cluster of its own, closed at the end."""
    made = Cluster(tmp_path, server.url)
    yield made
    for engine in made.engines:
        engine.close()
