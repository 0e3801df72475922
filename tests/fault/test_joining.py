"""Stores that come to a cluster with files, or come back to it without what they knew of them."""

import contextlib
import errno
import json
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from pytest import RaisesGroup

import kvfs.belonging as belonging_module
from kvfs.belonging import Belonging, aside_of, read_belonging, write_belonging
from kvfs.client import Client
from kvfs.cluster.joined import Cluster
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, NamespaceError, OutOfSpace, Unavailable
from kvfs.life import running
from kvfs.meta.contract import ROOT_INO, Changes, Inode
from kvfs.meta.lmdb import find_damage
from kvfs.node import Change, Node
from kvfs.publish import Publisher
from kvfs.settings.words import ClusterConfig, Config, DirectoryConfig
from kvfs.upkeep import collect_garbage, rebuild
from scripts.redis_rig import RedisServer, free_port, redis_server
from tests.own_node import blob_path, chunk_file, put_orphan, store

SOON_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as started:
        yield started


def alone(path: Path, *more: Path) -> Config:
    return Config(tuple(map(DirectoryConfig, (path, *more))))


def joined(config: Config, server: RedisServer, name: str = "kvfs") -> Config:
    return replace(config, cluster=ClusterConfig(server.url, name))


@asynccontextmanager
async def searched(config: Config) -> AsyncIterator[Node]:
    """A node that has found all that lies in its store."""
    with trio.fail_after(SOON_S):
        async with running(config) as node:
            async with node.upkeep_lock:
                pass
            yield node


def find(node: Node, path: bytes) -> Inode | None:
    node.refresh()
    return node.meta.resolve([path])[0]


async def load(node: Node, path: bytes) -> bytes | None:
    """Bytes as an open gives them, from wherever they are."""
    inode = find(node, path)
    if inode is None:
        return None
    fd = await node.open_content(inode.ino)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def forget_database(config: Config) -> None:
    """As a start sees it after the machine has crashed."""
    (config.home / "meta" / "running").write_text("another boot")


def fill(node: Node) -> None:
    """Some of everything that can have a name."""
    meta = node.meta
    directory = meta.make(ROOT_INO, b"d", stat.S_IFDIR | 0o2750, 7, 8, 5)
    meta.make(directory.ino, b"empty", stat.S_IFDIR | 0o700, 7, 8, 5)
    meta.make(directory.ino, b"link", stat.S_IFLNK | 0o777, 7, 8, 5, target=b"../f")
    meta.make(directory.ino, b"fifo", stat.S_IFIFO | 0o600, 7, 8, 5)
    meta.make(directory.ino, b"unwritten", stat.S_IFREG | 0o600, 7, 8, 5)
    file = store(node, b"d/f", b"plain")
    meta.set_attributes(file.ino, Changes(mode=0o640, uid=7, gid=8, mtime_ns=1234), 5)
    meta.set_pinned(file.ino, True)
    meta.link(file.ino, ROOT_INO, b"again", 5)
    store(node, b"twin", b"plain")
    store(node, b"taken", b"of before")


async def test_a_store_that_was_alone_brings_its_names(tmp_path: Path, server: RedisServer) -> None:
    path, data = chunk_file(1)
    own = alone(tmp_path / "a")
    async with running(own) as node:
        fill(node)
        chunk = store(node, path, data)
        await node.chunk_files.index(chunk)
        info = node.meta.chunk(chunk.ino)
        assert info is not None
        put_orphan(node, bytes(16))
    async with searched(joined(alone(tmp_path / "b"), server)) as other:
        store(other, b"taken", b"of the cluster")
        async with searched(joined(own, server)) as node:
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
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
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
        async with searched(joined(own, server)):
            pass
    assert caught.group_contains(Killed)
    monkeypatch.undo()
    assert len(aside_of(own.home)) == 1
    async with searched(joined(own, server)) as node:
        for number in range(5):
            assert await load(node, b"d/%d" % number) == b"%d" % number
    assert aside_of(own.home) == []


async def test_names_behind_a_damaged_page_are_lost_and_the_node_serves(
    tmp_path: Path, server: RedisServer, allow_warnings: list[str]
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
    async with searched(joined(own, server)) as node:
        assert await load(node, path) == data
        assert find(node, b"f1") is not None and find(node, b"f1999") is None
    assert aside_of(own.home) == [] and not (own.home / "meta" / "alone").exists()
    assert (own.home / "meta" / "data.mdb.distrusted").exists()
    async with searched(joined(own, server)) as node:
        assert await load(node, path) == data


@pytest.mark.parametrize("place", ["disk", "mark", "names aside"])
async def test_a_disk_that_fails_delays_the_search_and_ends_no_node(
    tmp_path: Path,
    server: RedisServer,
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
        async with running(joined(own, server)) as node:
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
    tmp_path: Path, server: RedisServer
) -> None:
    own = alone(tmp_path / "a")
    async with searched(joined(own, server, "one")) as node:
        store(node, b"d/f", b"in one")
    async with searched(joined(own, server, "two")) as node:
        assert await load(node, b"d/f") == b"in one"
        store(node, b"g", b"in two")
    async with searched(joined(own, server, "one")) as node:
        assert await load(node, b"d/f") == b"in one"
        assert await load(node, b"g") == b"in two"


async def test_a_store_of_a_cluster_is_not_started_alone(
    tmp_path: Path, server: RedisServer
) -> None:
    own = alone(tmp_path / "a")
    async with searched(joined(own, server)) as node:
        store(node, b"f", b"data")
    with pytest.raises(InvalidInput, match=f"--join {server.url} "):
        async with running(own):
            pass
    says = "belongs to the cluster kvfs, and its node is not running: start it with kvfs mount"
    with (
        Client(own.home, start=True) as client,  # as `kvfs ls` does
        pytest.raises(Unavailable, match=says),
    ):
        client.lookup([b"f"])
    async with searched(joined(own, server)) as node:
        assert await load(node, b"f") == b"data"


def state_of(meta: Path) -> dict[str, bytes]:
    """All that a start may change in a store's metadata, but for LMDB's lock."""
    files = {str(path.relative_to(meta)): path.read_bytes() for path in meta.rglob("*.*")}
    files |= {name: (meta / name).read_bytes() for name in os.listdir(meta) if "." not in name}
    return {name: data for name, data in files.items() if name != "lock.mdb"}


@pytest.mark.parametrize(
    "fault",
    ["no server", "wrong password", "no authority", "bad address", "busy address", "busy bulk port",
     "no member", "no mark"],
)  # fmt: skip
async def test_a_join_that_fails_changes_nothing(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    own = alone(tmp_path / "a")
    async with running(own) as node:
        store(node, b"precious", b"data")
    before = state_of(own.home / "meta")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        url, listen, error = server.url, "", InvalidInput
        match fault:
            case "no server":
                url, error = f"redis://127.0.0.1:{free_port()}", Unavailable
            case "wrong password":
                url = server.url.replace("redis://", "redis://nobody:wrong@")
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
    async with searched(joined(own, server)) as node:
        assert await load(node, b"precious") == b"data"
    belonging = read_belonging(own.home)
    assert belonging is not None and belonging.is_searched


@pytest.mark.parametrize("step", range(6))
async def test_a_join_that_is_killed_anywhere_costs_no_name(
    tmp_path: Path,
    server: RedisServer,
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
        async with searched(joined(own, server)):
            pass
    monkeypatch.undo()
    if (own.home / "meta" / "running").exists():
        forget_database(own)
    if read_belonging(own.home) is None:
        async with running(own) as node:
            assert await load(node, b"f") == b"data"
    async with searched(joined(own, server)) as node:
        assert await load(node, b"f") == b"data"
    assert not (own.home / "meta" / "joining").exists()


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


async def test_a_clusters_node_that_cannot_start_forgets_none_of_its_ids(
    tmp_path: Path, server: RedisServer
) -> None:
    own = joined(alone(tmp_path / "a"), server)
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


async def test_after_a_crash_of_the_machine_files_of_the_cluster_are_found(
    tmp_path: Path, server: RedisServer, allow_warnings: list[str]
) -> None:
    """Whatever they hold: their names are on the server."""
    allow_warnings.append("finding out what lies here")
    own = joined(alone(tmp_path / "a", tmp_path / "a2"), server)
    path, data = chunk_file(1)
    async with searched(joined(alone(tmp_path / "b"), server)) as other:
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
    tmp_path: Path, server: RedisServer, allow_warnings: list[str]
) -> None:
    allow_warnings.append("is not there; what lies in it is missing")
    own = joined(alone(tmp_path / "a", tmp_path / "a2"), server)
    async with searched(joined(alone(tmp_path / "b"), server)) as other:
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
    tmp_path: Path, server: RedisServer
) -> None:
    async with searched(joined(alone(tmp_path / "b"), server)) as other:
        assert isinstance(other.neighbours, Cluster)
        abandoned = other.neighbours._abandoned
        async with searched(joined(alone(tmp_path / "a"), server)) as node:
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
    tmp_path: Path, server: RedisServer, allow_warnings: list[str]
) -> None:
    allow_warnings.append("has lost its file")
    async with (
        searched(joined(alone(tmp_path / "a"), server)) as node,
        searched(joined(alone(tmp_path / "b"), server)) as other,
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


def test_a_damaged_mark_is_told(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    mark = tmp_path / "meta" / "cluster"
    mark.write_text(json.dumps({"cluster": "kvfs"}))
    with pytest.raises(InvalidInput, match="damaged"):
        read_belonging(tmp_path)
