"""Nodes of a cluster that share tiers."""

from pathlib import Path

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from scripts.redis_rig import redis_server
from tests.conftest import StartMount, StartNode
from tests.files import load_bytes
from tests.processes import wait_until
from tests.tier_nodes import STORE, data_of, store_files, tier, tiering_of, wait_copied


def test_nodes_of_a_cluster_share_what_only_a_tier_has(
    start_node: StartNode, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        cluster = f'[cluster]\nmetadata = "{server.url}"\n'
        config = STORE + tier("scratch", tmp_path / "tier") + cluster
        a, b = (start_node(tmp_path / name, config=config) for name in "ab")
        with Client(a.store) as one, Client(b.store) as two:
            store_files(one, {b"f%d" % n: data_of(n) for n in range(3)})
            wait_copied(one)
            assert one.evict_copies([b"f0", b"f1"]) == (2, 2)
            assert one.blobs([digest_of(data_of(0))]) == [None]
            assert [load_bytes(two, b"f%d" % n) for n in range(2)] == [data_of(0), data_of(1)]
            assert load_bytes(one, b"f0") == data_of(0)
            assert tiering_of(one)["reading"]["brought_files"] == 1  # tiers before peers
            assert two.evict_copies([b"f0", b"f1"]) == (2, 2)
            for n in range(3, 50):  # f2 leaves a, which has it last but for the tier
                store_files(one, {b"f%d" % n: data_of(n)})
            expected = [data_of(n) for n in range(50)]
            assert [load_bytes(two, b"f%d" % n) for n in range(50)] == expected
        for node in (a, b):  # while there is a server
            assert node.stop() == 0


def test_a_mount_in_a_cluster_reads_what_only_a_tier_has(
    start_node: StartNode, start_mount: StartMount, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis") as server:
        config = STORE + tier("scratch", tmp_path / "tier")
        config += f'[cluster]\nmetadata = "{server.url}"\n'
        other = start_mount(tmp_path / "b", config=config)  # has looked through an empty tier
        node = start_node(tmp_path / "a", config=config)
        with Client(node.store) as client:
            store_files(client, {b"f": data_of(1)})
            wait_copied(client)
            assert client.evict_copies([b"f"]) == (1, 1)
        file = other.mountpoint / "f"
        wait_until(file.exists)
        assert file.read_bytes() == data_of(1)
        assert node.stop() == 0
        assert other.stop() == 0


def test_a_store_that_joins_a_cluster_brings_in_what_only_its_tiers_have(
    start_node: StartNode, tmp_path: Path
) -> None:
    tiers = tier("scratch", tmp_path / "tier")
    node = start_node(config=STORE + tier("other", tmp_path / "other") + tiers)
    with Client(node.store) as client:
        store_files(client, {b"d/f%d" % n: data_of(n) for n in range(4)})
        wait_copied(client)
        assert client.evict_copies([b"d/f0", b"d/f1"]) == (2, 2)
    assert node.stop() == 0
    with redis_server(tmp_path / "redis") as server:
        cluster = f'[cluster]\nmetadata = "{server.url}"\n'
        node = start_node(config=STORE + tiers + cluster)  # its tier has another number now
        with Client(node.store) as client:
            paths = [b"d/f%d" % n for n in range(4)]
            wait_until(lambda: client.lookup(paths) == [MIB] * 4)
            assert [load_bytes(client, path) for path in paths] == [data_of(n) for n in range(4)]
            assert client.tiers_of([digest_of(data_of(n)) for n in (0, 3)]) == [["scratch"]] * 2
        assert node.stop() == 0
