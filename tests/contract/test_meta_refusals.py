"""A metadata server that answers and will not: what it says, and what to do, a node says."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvfs.errors import Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.primary import Unwilling
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer, free_port, redis_server
from tests.contract.meta_words import FILE, T0, publication


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "server") as started:
        yield started


@pytest.fixture
def engine(tmp_path: Path, server: RedisServer) -> Iterator[RedisEngine]:
    with_names = RedisEngine.join(tmp_path / "meta", server.url, "c", bytes(16), now_ns=T0)
    with_names.publish([publication(1, b"f")], T0)
    yield with_names
    with_names.close()


def full(server: RedisServer) -> None:
    server.say("config", "set", "maxmemory", "1")


def replica(server: RedisServer) -> None:
    server.say("replicaof", "127.0.0.1", str(free_port()))


def without_replicas(server: RedisServer) -> None:
    server.say("config", "set", "min-replicas-to-write", "1")


@pytest.mark.parametrize(
    "spoil, words, advice",
    [
        (full, "command not allowed when used memory", "raise its maxmemory"),
        (replica, "You can't write against a read only replica", "name its primary"),
        (without_replicas, "Not enough good replicas", "min-replicas-to-write"),
    ],
)
def test_a_change_that_is_refused_says_why(
    engine: RedisEngine,
    server: RedisServer,
    spoil: Callable[[RedisServer], None],
    words: str,
    advice: str,
) -> None:
    spoil(server)
    for _ in range(3):  # also not "does not answer" for the next ones
        with pytest.raises(
            Unwilling, match=f"the metadata server refuses: .*{words}.*; .*{advice}"
        ):
            engine.make(ROOT_INO, b"g", FILE, 0, 0, T0)
        engine.catch_up()  # is answered, whatever is refused
        assert engine.sizes([b"f", b"g"]) == [101, None]


def test_a_server_that_is_busy_says_so(engine: RedisEngine, server: RedisServer) -> None:
    server.say("config", "set", "busy-reply-threshold", "1")

    def keep_busy() -> None:
        with redis.Redis(port=server.port) as client, pytest.raises(redis.ResponseError):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        said = ""
        end_s = time.monotonic() + 20
        while "BUSY" not in said and time.monotonic() < end_s:
            try:
                engine.catch_up()
            except Unavailable as error:
                said = str(error)
        assert "SCRIPT KILL" in said
    finally:
        server.say("script", "kill")
        thread.join(20)


def test_what_it_does_when_it_is_full_is_known(engine: RedisEngine, server: RedisServer) -> None:
    memory = engine.memory()
    assert memory is not None and not memory.evicts
    server.say("config", "set", "maxmemory-policy", "allkeys-random")
    memory = engine.memory()
    assert memory is not None and memory.evicts and memory.takes_names
