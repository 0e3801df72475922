"""Stores that come back to a cluster without what they knew of their files, or not at all."""

import os
import stat
from pathlib import Path

import pytest
import trio

from kvfs.belonging import read_belonging
from kvfs.cluster.joined import Cluster
from kvfs.digest import digest_of
from kvfs.errors import NamespaceError
from kvfs.meta.contract import ROOT_INO
from kvfs.node import Change
from scripts.redis_rig import RedisServer
from tests.joining import alone, find, forget_database, joined, load, searched
from tests.own_node import blob_path, chunk_file, put_orphan, store


async def test_after_a_crash_of_the_machine_files_of_the_cluster_are_found(
    tmp_path: Path, meta_server: RedisServer, allow_warnings: list[str]
) -> None:
    """Whatever they hold: their names are on the server."""
    allow_warnings.append("finding out what lies here")
    own = joined(alone(tmp_path / "a", tmp_path / "a2"), meta_server)
    path, data = chunk_file(1)
    async with searched(joined(alone(tmp_path / "b"), meta_server)) as other:
        async with searched(own) as node:
            store(node, b"f", b"without a header")
            store(node, b"second", b"elsewhere", index=1)
            store(node, b"shared", b"lost here only")
            store(node, b"lost", b"lost for good")
            assert await load(other, b"shared") == b"lost here only"
            put_orphan(node, digest_of(data), data)
            put_orphan(node, bytes(16))
            [old_id] = other.meta.copies(digest_of(b"lost for good"))  # type: ignore[attr-defined]
            for lost in (b"lost here only", b"lost for good"):
                blob_path(node, digest_of(lost)).unlink()
        forget_database(own)
        async with searched(own) as node:
            assert await load(other, b"f") == b"without a header"
            assert await load(node, b"second") == b"elsewhere"
            assert await load(other, path) == data
            assert find(other, b"lost") is None
            assert not blob_path(node, bytes(16)).exists()
            copies = other.meta.copies  # type: ignore[attr-defined]  # of a cluster's engine
            assert len(copies(digest_of(b"lost here only"))) == 1
            assert len(copies(digest_of(b"elsewhere"))) == 1
            for content in (b"lost here only", b"elsewhere", b"without a header"):
                assert old_id not in copies(digest_of(content))
            assert await load(node, b"shared") == b"lost here only"
    belonging = read_belonging(own.home)
    assert belonging is not None and belonging.former_ids == () and belonging.is_searched


async def test_what_lies_on_a_missing_disk_is_no_copy_until_it_is_back(
    tmp_path: Path, meta_server: RedisServer, allow_warnings: list[str]
) -> None:
    allow_warnings.append("is not there; what lies in it is missing")
    own = joined(alone(tmp_path / "a", tmp_path / "a2"), meta_server)
    async with searched(joined(alone(tmp_path / "b"), meta_server)) as other:
        copies = other.meta.copies  # type: ignore[attr-defined]  # of a cluster's engine

        async def wait_copies(count: int) -> None:
            while len(copies(digest_of(b"there"))) != count:
                await trio.sleep(0.05)
                other.refresh()

        async with searched(own) as node:
            store(node, b"f", b"there", index=1)
            store(node, b"two", b"also elsewhere", index=1)
            assert await load(other, b"two") == b"also elsewhere"
            await wait_copies(1)
        (tmp_path / "a2").rename(tmp_path / "away")
        async with searched(own) as node:
            await wait_copies(0)
            assert find(other, b"f") is not None
            assert await load(node, b"two") == b"also elsewhere"  # from there
            store(node, b"f2", b"there", index=0)
            await wait_copies(1)
            assert await load(other, b"f") == b"there"
        (tmp_path / "away").rename(tmp_path / "a2")
        async with searched(own) as node:
            for each in (b"f", b"f2"):
                assert await load(node, each) == b"there"
            assert await load(node, b"two") == b"also elsewhere"


async def test_what_a_node_never_closed_goes_when_it_stays_away(
    tmp_path: Path, meta_server: RedisServer
) -> None:
    async with searched(joined(alone(tmp_path / "b"), meta_server)) as other:
        assert isinstance(other.neighbours, Cluster)
        abandoned = other.neighbours._abandoned
        async with searched(joined(alone(tmp_path / "a"), meta_server)) as node:
            assert isinstance(node.neighbours, Cluster)
            node.meta.make(ROOT_INO, b"never closed", stat.S_IFREG | 0o600, 0, 0, 5)
            store(node, b"closed", b"closed")
            await other.neighbours._renew()
            charged = [abandoned.is_in_charge(), node.neighbours._abandoned.is_in_charge()]
            assert sorted(charged) == [False, True]
            assert find(other, b"never closed") is not None
        await other.neighbours._renew()
        assert abandoned.is_in_charge()
        await abandoned.see_to()  # it has gone just now
        assert find(other, b"never closed") is not None
        abandoned._after_s = 0.0
        changes: list[Change] = []
        other.watch(changes.append)
        await abandoned.see_to()
        assert find(other, b"never closed") is None
        assert find(other, b"closed") is not None
        assert b"never closed" in [change.name for change in changes]


async def test_who_was_wiped_is_asked_once(
    tmp_path: Path, meta_server: RedisServer, allow_warnings: list[str]
) -> None:
    allow_warnings.append("has lost its file")
    async with (
        searched(joined(alone(tmp_path / "a"), meta_server)) as node,
        searched(joined(alone(tmp_path / "b"), meta_server)) as other,
    ):
        assert isinstance(node.neighbours, Cluster)
        source = node.neighbours._source
        digest = digest_of(b"data")
        store(node, b"f", b"data")
        store(node, b"only here", b"only here")
        assert await load(other, b"f") == b"data"
        for lost in (digest, digest_of(b"only here")):
            blob_path(node, lost).unlink()
        served = await trio.to_thread.run_sync(source.open, digest)
        if served is not None:  # it was open still, since the other one has just read it
            os.close(served)
        other.refresh()
        assert len(other.meta.copies(digest)) == 1  # type: ignore[attr-defined]
        with pytest.raises(NamespaceError):
            await load(other, b"only here")
        assert find(other, b"only here") is None
