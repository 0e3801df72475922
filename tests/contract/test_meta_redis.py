"""The engine of a cluster against the contract, and what several of them promise each other."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.meta.contract import MetaEngine
from kvfs.meta.redis import RedisEngine
from tests.contract.meta_suite import T0, MetaSuite
from tests.redis_rig import RedisServer, redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


class TestRedis(MetaSuite):
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
