"""Joins that fail or are killed: nothing is changed, and no name is lost."""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import RaisesGroup

import kvfs.belonging as belonging_module
from kvfs.belonging import read_belonging
from kvfs.errors import InvalidInput, OutOfSpace, Unavailable
from kvfs.life import running
from kvfs.settings.words import ClusterConfig
from scripts.redis_rig import RedisServer, free_port
from tests.joining import alone, forget_database, joined, load, searched, state_of
from tests.own_node import store


@pytest.mark.parametrize(
    "fault",
    ["no server", "wrong password", "no authority", "bad address", "busy address", "busy bulk port",
     "no member", "no mark"],
)  # fmt: skip
async def test_a_join_that_fails_changes_nothing(
    tmp_path: Path, meta_server: RedisServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    own = alone(tmp_path / "a")
    async with running(own) as node:
        store(node, b"precious", b"data")
    before = state_of(own.home / "meta")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        url, listen, error = meta_server.url, "", InvalidInput
        match fault:
            case "no server":
                url, error = f"redis://127.0.0.1:{free_port()}", Unavailable
            case "wrong password":
                url = meta_server.url.replace("redis://", "redis://nobody:wrong@")
            case "no authority":
                url = f"rediss://127.0.0.1?ssl_ca_certs={tmp_path}/none.pem"
            case "bad address":
                listen = "192.0.2.1:7400"
            case "busy address":
                listen = f"127.0.0.1:{port}"
            case "busy bulk port":
                listen = f"127.0.0.1:{port - 1}"
        if fault == "no member":
            error = Unavailable

            async def refuse(self: object) -> None:
                raise Unavailable("no")

            monkeypatch.setattr("kvfs.cluster.joined.Membership.join", refuse)
        if fault == "no mark":
            error = OutOfSpace

            def fail(*arguments: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr("kvfs.belonging.write_belonging", fail)
        with RaisesGroup(error, flatten_subgroups=True, allow_unwrapped=True):
            async with running(replace(own, cluster=ClusterConfig(url, listen=listen))):
                pass
    monkeypatch.undo()
    after = state_of(own.home / "meta")
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= {"data.mdb"}
    (own.home / "meta" / "running").unlink(missing_ok=True)
    async with running(own) as node:
        assert await load(node, b"precious") == b"data"
    async with searched(joined(own, meta_server)) as node:
        assert await load(node, b"precious") == b"data"
    belonging = read_belonging(own.home)
    assert belonging is not None and belonging.is_searched


@pytest.mark.parametrize("step", range(6))
async def test_a_join_that_is_killed_anywhere_costs_no_name(
    tmp_path: Path,
    meta_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    allow_warnings: list[str],
    step: int,
) -> None:
    """At each sync of `kvfs.belonging`, with a crash of the machine after it."""
    allow_warnings.append("finding out what lies here")  # of a store that is a member already
    own = alone(tmp_path / "a")
    async with running(own) as node:
        store(node, b"f", b"data")

    class Killed(BaseException):
        pass

    left = step

    def count(then: Callable[[Path], None]) -> Callable[[Path], None]:
        def sync(path: Path) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            then(path)

        return sync

    for name in ("_sync_file", "_sync_directory"):
        monkeypatch.setattr(f"kvfs.belonging.{name}", count(getattr(belonging_module, name)))
    monkeypatch.setattr("kvfs.life.undo_join", lambda home: None)  # as after kill -9
    monkeypatch.setattr("kvfs.trust.Trust.undo", lambda self: None)
    with contextlib.suppress(Killed, BaseExceptionGroup):
        async with searched(joined(own, meta_server)):
            pass
    monkeypatch.undo()
    if (own.home / "meta" / "running").exists():
        forget_database(own)
    if read_belonging(own.home) is None:
        async with running(own) as node:
            assert await load(node, b"f") == b"data"
    async with searched(joined(own, meta_server)) as node:
        assert await load(node, b"f") == b"data"
    assert not (own.home / "meta" / "joining").exists()


async def test_a_clusters_node_that_cannot_start_forgets_none_of_its_ids(
    tmp_path: Path, meta_server: RedisServer
) -> None:
    own = joined(alone(tmp_path / "a"), meta_server)
    async with searched(own) as node:
        store(node, b"f", b"data")
    before = read_belonging(own.home)
    (own.home / "meta" / "data.mdb").unlink()
    away = replace(own, cluster=ClusterConfig(f"redis://127.0.0.1:{free_port()}"))
    for _ in range(3):
        with pytest.raises(Unavailable):
            async with running(away):
                pass
        assert read_belonging(own.home) == before
    async with searched(own) as node:
        assert await load(node, b"f") == b"data"


def test_a_damaged_mark_is_told(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    mark = tmp_path / "meta" / "cluster"
    mark.write_text(json.dumps({"cluster": "kvfs"}))
    with pytest.raises(InvalidInput, match="damaged"):
        read_belonging(tmp_path)
