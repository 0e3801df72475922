"""What the tests of metadata share."""

from collections.abc import Iterator

import pytest

from scripts.redis_rig import RedisServer, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A metadata server, for all tests of a module."""
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started
