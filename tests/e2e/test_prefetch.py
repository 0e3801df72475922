"""What comes here before it is asked for, on real nodes: from tiers, one of them slow."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvfs.chunk import ChunkHeader, TensorSpec, chunk_info, encode_header
from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.names import chunk_key, chunk_path, namespace_path
from scripts.redis_rig import redis_server
from tests.commands import kvfs
from tests.conftest import StartMount, StartNode
from tests.files import load_bytes, store_bytes
from tests.hanging_files import HangingFiles
from tests.mounts import is_mounted
from tests.processes import wait_until

FINGERPRINT = "3fa9" * 8
SPACE = namespace_path("a/model", FINGERPRINT)
CHUNK_BYTES = MIB


def tier(path: Path) -> str:
    return f'[[tiers]]\nname = "scratch"\nkind = "shared"\npath = "{path}"\n'


def store_chain(client: Client, names: str, *, is_left: bool = True) -> dict[str, bytes]:
    """Chunks that continue each other, in tiers and not here; their paths by their names."""
    paths = {}
    parent = ""
    for number, name in enumerate(names):
        header = ChunkHeader(
            model="a/model",
            fingerprint=FINGERPRINT,
            key=chunk_key(digest_of(name.encode()), 0, 0),
            parent=parent,
            token_start=256 * number,
            token_end=256 * number + 256,
            group=0,
            shard=0,
            engine="test",
            digest=digest_of(name.encode() * CHUNK_BYTES),
            token_ids=None,
            tensors=(TensorSpec("layer.0", "U8", (CHUNK_BYTES,)),),
        )
        paths[name] = chunk_path(SPACE, header.key)
        data = encode_header(header) + name.encode() * CHUNK_BYTES
        store_bytes(client, paths[name], data, chunk_info(header))
        parent = header.key
    if is_left:
        leave(client, *paths.values())
    return paths


def leave(client: Client, *paths: bytes) -> None:
    """Have only tiers keep the bytes of files."""
    wait_until(lambda: client.status()["tiering"]["behind"]["waiting"] == 0)
    assert client.evict_copies(paths) == (len(paths), len(paths))


def is_here(client: Client, path: bytes) -> bool:
    inode = client.stat(path)
    assert inode is not None
    return client.blobs([inode.digest])[0] is not None


def tally(client: Client, cause: str) -> dict[str, int]:
    found: dict[str, int] = client.status()["prefetch"]["causes"][cause]
    return found


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[HangingFiles]:
    """A file system from which each read takes a while."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    with closing(HangingFiles(tmp_path / "root", tmp_path / "slow", read_s=0.15)) as files:
        wait_until(lambda: is_mounted(files.mountpoint))
        yield files


def test_chunks_behind_one_that_was_read_come_and_are_used_or_wasted(
    slow: HangingFiles, start_node: StartNode
) -> None:
    node = start_node(config=tier(slow.mountpoint / "tier"))
    with Client(node.store) as client:
        paths = store_chain(client, "abc")
        load_bytes(client, paths["a"])
        wait_until(lambda: is_here(client, paths["b"]) and is_here(client, paths["c"]))
        wait_until(lambda: tally(client, "child")["arrived"] == 2)
        assert load_bytes(client, paths["b"]).endswith(b"b")
        wait_until(lambda: tally(client, "child")["used"] == 1)
        assert client.evict_copies([paths["c"]]) == (1, 1)
        load_bytes(client, paths["a"])  # which would have c come again
        wait_until(lambda: tally(client, "child")["wasted"] == 1)
        found = tally(client, "child")
        assert found["wasted_bytes"] == found["started_bytes"] // 2 > CHUNK_BYTES
        assert found["started"] == 2


def test_what_an_engine_expects_comes_and_counts_as_used(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node(config=tier(tmp_path / "tier") + "[prefetch]\nchildren = false\n")
    with Client(node.store) as client:
        paths = store_chain(client, "abc")
        assert client.expect([paths["a"], paths["b"], b"absent"])
        wait_until(lambda: tally(client, "expected")["arrived"] == 2)
        assert not is_here(client, paths["c"])
        for name in "ab":
            load_bytes(client, paths[name])
        assert tally(client, "expected")["used"] == 2


def test_a_reader_in_order_finds_the_next_files_here_the_third_time(
    start_mount: StartMount, tmp_path: Path
) -> None:
    # With passthrough a file's second open within 2 s may be answered without the node.
    seen = "[mount]\npassthrough = false\n"
    mount = start_mount(config=seen + tier(tmp_path / "tier"))
    names = ["lmcache-1", "lmcache-2", "lmcache-3"]
    with Client(mount.store) as client:
        for name in names:
            (mount.mountpoint / name).write_bytes(name.encode() * 1000)
        for _ in range(2):
            for name in names:
                assert (mount.mountpoint / name).read_bytes() == name.encode() * 1000
        paths = [name.encode() for name in names]
        leave(client, *paths)
        assert (mount.mountpoint / names[0]).read_bytes() == names[0].encode() * 1000
        wait_until(lambda: all(is_here(client, path) for path in paths))
        wait_until(lambda: tally(client, "successor")["arrived"] == 2)
        assert (mount.mountpoint / names[2]).read_bytes() == names[2].encode() * 1000
        wait_until(lambda: tally(client, "successor")["used"] == 1)
        view = json.loads((mount.mountpoint / ".kvfs" / "tiers").read_text())
        assert view["prefetch"]["causes"]["successor"]["used"] == 1


def chain_before_a_hang(client: Client, slow: HangingFiles) -> dict[str, bytes]:
    """Two chunks, of which only the first is here; only a tier that hangs from now on has the
    second, and `other`. Its reads were slow before, so a hang is taken for one the later."""
    for path in (b"first", b"other"):
        store_bytes(client, path, path * CHUNK_BYTES)
    paths = store_chain(client, "ab", is_left=False)
    leave(client, b"first", b"other", paths["b"])
    load_bytes(client, b"first")
    slow.stop()
    return paths


def test_who_reads_from_the_tier_ends_what_comes_on_a_guess(
    slow: HangingFiles, start_node: StartNode
) -> None:
    node = start_node(config=tier(slow.mountpoint / "tier"))
    with Client(node.store) as client, Client(node.store) as reader:
        paths = chain_before_a_hang(client, slow)
        load_bytes(client, paths["a"])
        wait_until(lambda: tally(client, "child")["started"] == 1)
        with ThreadPoolExecutor(1) as executor:
            try:
                reading = executor.submit(load_bytes, reader, b"other")
                wait_until(lambda: tally(client, "child")["cancelled"] == 1)
            finally:
                slow.go_on()
            assert reading.result(30) == b"other" * CHUNK_BYTES
        assert not is_here(client, paths["b"])
        assert client.status()["prefetch"]["under_way"] == 0


def test_who_reads_what_comes_on_a_guess_reads_it_beside_that(
    slow: HangingFiles, start_node: StartNode
) -> None:
    node = start_node(config=tier(slow.mountpoint / "tier"))
    with Client(node.store) as client, Client(node.store) as reader:
        paths = chain_before_a_hang(client, slow)
        load_bytes(client, paths["a"])
        wait_until(lambda: tally(client, "child")["started"] == 1)
        with ThreadPoolExecutor(1) as executor:
            try:
                reading = executor.submit(load_bytes, reader, paths["b"])
                wait_until(lambda: client.status()["tiering"]["reading"]["under_way"] == 1)
            finally:
                slow.go_on()
            assert reading.result(30).endswith(b"b")
        wait_until(lambda: client.status()["prefetch"]["under_way"] == 0)
        assert is_here(client, paths["b"])
        wait_until(lambda: tally(client, "child")["used"] == 1)
        assert tally(client, "child")["cancelled"] == 0


def test_warm_brings_what_only_tiers_have_and_names_what_nobody_has(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node(config=tier(tmp_path / "tier"))
    with Client(node.store) as client:
        data = {b"kv/%02d" % n: b"%02d" % n * 1000 for n in range(40)}
        for path, content in data.items():
            store_bytes(client, path, content)
        store_bytes(client, b"here", b"here")
        leave(client, *data)
        ran = kvfs("warm", "kv", "/here", store=node.store)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == "40 files brought, 78.1 KiB; 1 here already\n"
        assert all(is_here(client, path) for path in data)
        shown = kvfs("status", store=node.store).stdout
        assert "brought ahead  40 files, 78.1 KiB; 0 used, 0 evicted unread, 0 cancelled" in shown
        leave(client, *data)
        name = digest_of(data[b"kv/07"]).hex()
        (tmp_path / "tier" / "blobs" / name[:2] / name[2:4] / name).unlink()
        ran = kvfs("warm", "/", "--json", store=node.store)
        assert ran.returncode == 1 and "no tier and no other node gives 1 file" in ran.stderr
        said: dict[str, Any] = json.loads(ran.stdout)
        assert (said["brought_files"], said["here_files"]) == (39, 1)
        assert said["missing"] == [{"path": "/kv/07", "size_bytes": 2000}]
    ran = kvfs("warm", "absent", store=node.store)
    assert (ran.returncode, ran.stdout) == (1, "")


def test_what_other_nodes_have_comes_ahead_and_by_warm(
    start_node: StartNode, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        config = f'[cluster]\nmetadata = "{server.url}"\n'
        a, b = (start_node(tmp_path / name, config=config) for name in "ab")
        with Client(a.store) as one, Client(b.store) as two:
            paths = store_chain(one, "abc", is_left=False)
            for n in range(5):
                store_bytes(one, b"other/%d" % n, b"%d" % n * MIB)
            assert (load_bytes(two, paths["a"]) or b"").endswith(b"a")
            wait_until(lambda: is_here(two, paths["c"]) and is_here(two, paths["b"]))
            ran = kvfs("warm", "other", store=b.store)
            assert (ran.returncode, ran.stdout) == (0, "5 files brought, 5 MiB; 0 here already\n")
            assert is_here(two, b"other/4") and is_here(one, b"other/4")
        for node in (a, b):  # while there is a server
            assert node.stop() == 0


def test_warm_brings_what_lies_on_a_disk_that_is_missing(
    start_node: StartNode, tmp_path: Path
) -> None:
    config, disk = tier(tmp_path / "tier"), tmp_path / "disk"
    node = start_node(config=config, extra_stores=[disk])
    data = [b"%d" % n * 1000 for n in range(8)]
    with Client(node.store) as client:
        for number, content in enumerate(data):
            store_bytes(client, b"f%d" % number, content)
        wait_until(lambda: client.status()["tiering"]["behind"]["waiting"] == 0)
    lost = sum(1 for file in disk.glob("blobs/*/*/*") if file.is_file())
    assert lost > 0
    assert node.stop() == 0
    os.rename(disk, tmp_path / "elsewhere")
    node = start_node(config=config, allow="missing until it is back")
    with Client(node.store) as client:
        digests = [digest_of(content) for content in data]
        assert client.is_here(digests).count(False) == lost
        ran = kvfs("warm", "/", store=node.store)
        assert f"{lost} files brought" in ran.stdout and ran.returncode == 0, ran.stderr
        assert client.is_here(digests) == [True] * 8
