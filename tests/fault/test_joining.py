"""Stores that come to a cluster with files: all their names are there, whatever fails meanwhile."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import trio

from kvfs.belonging import Belonging, aside_of, read_belonging, write_belonging
from kvfs.client import Client
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, Unavailable
from kvfs.life import running
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.lmdb import find_damage
from kvfs.publish import Publisher
from kvfs.upkeep import collect_garbage, rebuild
from scripts.redis_rig import RedisServer
from tests.joining import SOON_S, alone, fill, find, forget_database, joined, load, searched
from tests.own_node import blob_path, chunk_file, put_orphan, store


async def test_a_store_that_was_alone_brings_its_names(
    tmp_path: Path, meta_server: RedisServer
) -> None:
    path, data = chunk_file(1)
    own = alone(tmp_path / "a")
    async with running(own) as node:
        fill(node)
        chunk = store(node, path, data)
        await node.chunk_files.index(chunk)
        info = node.meta.chunk(chunk.ino)
        assert info is not None
        put_orphan(node, bytes(16))
    async with searched(joined(alone(tmp_path / "b"), meta_server)) as other:
        store(other, b"taken", b"of the cluster")
        async with searched(joined(own, meta_server)) as node:
            for each in (node, other):
                assert await load(each, b"d/f") == b"plain"
                assert await load(each, b"twin") == b"plain"
                assert await load(each, b"taken") == b"of the cluster"
                assert await load(each, path) == data
                found = find(each, path)
                assert found is not None and each.meta.chunk(found.ino) == info
            file, again = find(other, b"d/f"), find(other, b"again")
            assert file is not None and file == again
            assert (file.mode, file.uid, file.gid) == (stat.S_IFREG | 0o640, 7, 8)
            assert (file.mtime_ns, file.pinned, file.nlink) == (1234, True, 2)
            link, fifo, empty, folder = (
                find(other, name) for name in (b"d/link", b"d/fifo", b"d/empty", b"d")
            )
            assert link is not None and (link.target, link.uid) == (b"../f", 7)
            assert fifo is not None and stat.S_ISFIFO(fifo.mode)
            assert empty is not None and (empty.mode & 0o777, empty.uid) == (0o700, 7)
            assert folder is not None and folder.mode == stat.S_IFDIR | 0o2750
            assert find(other, b"d/unwritten") is None
            assert not blob_path(node, bytes(16)).exists()
            assert not blob_path(node, digest_of(b"of before")).exists()
            assert aside_of(own.home) == []
            assert not (own.home / "meta" / "alone").exists()


async def test_names_that_were_brought_in_half_are_all_there_after_the_next_start(
    tmp_path: Path, meta_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = alone(tmp_path / "a")
    async with running(own) as node:
        for number in range(5):
            store(node, b"d/%d" % number, b"%d" % number)
    publish_found, count = Publisher.publish_found, 0

    class Killed(Exception):
        pass

    def publish_some(self: Publisher, publication: object) -> bool:
        nonlocal count
        count += 1
        if count == 3:
            raise Killed
        return publish_found(self, publication)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(Publisher, "publish_found", publish_some)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with searched(joined(own, meta_server)):
            pass
    assert caught.group_contains(Killed)
    monkeypatch.undo()
    assert len(aside_of(own.home)) == 1
    async with searched(joined(own, meta_server)) as node:
        for number in range(5):
            assert await load(node, b"d/%d" % number) == b"%d" % number
    assert aside_of(own.home) == []


async def test_names_behind_a_damaged_page_are_lost_and_the_node_serves(
    tmp_path: Path, meta_server: RedisServer, allow_warnings: list[str]
) -> None:
    """Found by no look at the file as a whole, but in the walk."""
    allow_warnings += ["names of before are lost", "the metadata is damaged"]
    own = alone(tmp_path / "a")
    path, data = chunk_file(1)
    async with running(own) as node:
        store(node, path, data)
        for number in range(2000):
            node.meta.make(ROOT_INO, b"f%d" % number, stat.S_IFIFO | 0o600, 7, 8, 5)
    database = own.home / "meta" / "data.mdb"
    with database.open("r+b") as file:
        for page in range(20, database.stat().st_size // 4096):
            file.seek(page * 4096)
            if b"f1999" in file.read(4096):
                file.seek(page * 4096)
                file.write(b"\x55" * 4096)
    assert find_damage(own.home / "meta") is None
    async with searched(joined(own, meta_server)) as node:
        assert await load(node, path) == data
        assert find(node, b"f1") is not None and find(node, b"f1999") is None
    assert aside_of(own.home) == [] and not (own.home / "meta" / "alone").exists()
    assert (own.home / "meta" / "data.mdb.distrusted").exists()
    async with searched(joined(own, meta_server)) as node:
        assert await load(node, path) == data


@pytest.mark.parametrize("place", ["disk", "mark", "names aside"])
async def test_a_disk_that_fails_delays_the_search_and_ends_no_node(
    tmp_path: Path,
    meta_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    allow_warnings: list[str],
    place: str,
) -> None:
    """gc and rebuild do not wait for it."""
    allow_warnings.append("own files are not all found yet, trying again: .*Input/output error")
    own = alone(tmp_path / "a")
    async with running(own) as node:
        store(node, b"f", b"plain")
        put_orphan(node, bytes(16))
    name = {
        "disk": "kvfs.blobs.BlobDirectory.scan",
        "mark": "kvfs.cluster.search.write_belonging",
        "names aside": "kvfs.cluster.adoption.shutil.rmtree",
    }[place]
    failed = threading.Event()

    def fail(*arguments: object) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvfs.cluster.search.CLUSTER_SEARCH_RETRY_S", 0.05)
    with monkeypatch.context() as patched, trio.fail_after(SOON_S):
        patched.setattr(name, fail)
        async with running(joined(own, meta_server)) as node:
            while not failed.is_set():
                await trio.sleep(0.01)
            for work in (collect_garbage, rebuild):
                with pytest.raises(Unavailable, match="still looks for its own files; try again"):
                    await work(node)
            assert await load(node, b"f") == b"plain"
            patched.undo()
            async with node.upkeep_lock:
                pass
            assert await rebuild(node) == 0
            assert (await collect_garbage(node)).orphan_blobs == 0
            assert not blob_path(node, bytes(16)).exists()
    belonging = read_belonging(own.home)
    assert belonging is not None and belonging.is_searched and aside_of(own.home) == []


async def test_a_store_comes_to_another_cluster_and_back(
    tmp_path: Path, meta_server: RedisServer
) -> None:
    own = alone(tmp_path / "a")
    async with searched(joined(own, meta_server, "one")) as node:
        store(node, b"d/f", b"in one")
    async with searched(joined(own, meta_server, "two")) as node:
        assert await load(node, b"d/f") == b"in one"
        store(node, b"g", b"in two")
    async with searched(joined(own, meta_server, "one")) as node:
        assert await load(node, b"d/f") == b"in one"
        assert await load(node, b"g") == b"in two"


async def test_a_store_of_a_cluster_is_not_started_alone(
    tmp_path: Path, meta_server: RedisServer
) -> None:
    own = alone(tmp_path / "a")
    async with searched(joined(own, meta_server)) as node:
        store(node, b"f", b"data")
    with pytest.raises(InvalidInput, match=f"--join {meta_server.url} "):
        async with running(own):
            pass
    says = "belongs to the cluster kvfs, and its node is not running: start it with kvfs mount"
    with (
        Client(own.home, start=True) as client,  # as `kvfs ls` does
        pytest.raises(Unavailable, match=says),
    ):
        client.lookup([b"f"])
    async with searched(joined(own, meta_server)) as node:
        assert await load(node, b"f") == b"data"


async def test_a_store_that_an_earlier_version_took_for_a_clusters_is_alone_again(
    tmp_path: Path,
) -> None:
    own = alone(tmp_path / "a")
    async with running(own) as node:
        store(node, b"precious", b"data")
    meta = own.home / "meta"
    (meta / "alone").mkdir()
    (meta / "data.mdb").rename(meta / "alone" / "data.mdb")
    write_belonging(own.home, Belonging("kvfs", "redis://127.0.0.1:6399", bytes(16)))
    forget_database(own)
    async with running(own) as node:
        assert await load(node, b"precious") == b"data"
    assert read_belonging(own.home) is None
