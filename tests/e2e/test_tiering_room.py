"""Nodes whose tiers are full: what leaves them, where last copies go, and what is lost."""

import tempfile
from pathlib import Path

from kvfs.client import Client
from kvfs.config import MIB
from tests.conftest import StartNode
from tests.disks import small_disk
from tests.files import load_bytes
from tests.tier_nodes import STORE, data_of, files_in, store_files, tier, tiering_of, wait_copied


def test_a_last_copy_leaves_a_small_tier_for_one_that_has_room(
    start_node: StartNode, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvfs-test-") as memory:
        small = tier("small", Path(memory) / "t", "memory", 'max_bytes = "6MiB"\n')
        config = STORE + small + tier("disk", tmp_path / "tier", "nvme")
        once = '[[tier_copies]]\nprefix = "one/"\ncopies = 1\n'
        node = start_node(config=config + once)
        paths = [b"%s/%d" % (place, n) for n in range(30) for place in (b"one", b"all")]
        with Client(node.store) as client:
            store_files(client, {path: data_of(n) for n, path in enumerate(paths)})
            wait_copied(client)
            assert client.lookup(paths) == [MIB] * 60
            assert len(files_in(Path(memory) / "t")) <= 6
            for n, path in enumerate(paths):
                assert load_bytes(client, path) == data_of(n)
        assert node.stop() == 0


def test_a_full_tier_gives_its_coldest_files_up_and_their_names_go(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = STORE + tier("disk", tmp_path / "tier", "nvme", 'max_bytes = "16MiB"\n')
    node = start_node(config=config, allow="its last copy: the names of such go")
    with Client(node.store) as client:
        for n in range(80):
            store_files(client, {b"f%d" % n: data_of(n)})
        wait_copied(client)
        assert len(files_in(tmp_path / "tier")) <= 16
        assert tiering_of(client)["tiers"][0]["size_bytes"] <= 16 * MIB  # type: ignore[index]
        there = [n for n in range(80) if client.stat(b"f%d" % n) is not None]
        assert 24 < len(there) <= 40  # what store and tier have room for
        few = 4  # copied at a time, in any order
        assert there[few:] == list(range(there[few], 80)), "the newest stay"
        found = {n: load_bytes(client, b"f%d" % n) for n in there}
        gone = [n for n in there if found[n] is None]  # meanwhile: what is read takes room
        assert len(gone) <= few and set(gone) <= set(there[: 2 * few])
        assert all(found[n] == data_of(n) for n in there if n not in gone)


def test_what_leaves_a_small_tier_last_goes_to_one_with_room(
    start_node: StartNode, tmp_path: Path
) -> None:
    small = tier("small", tmp_path / "small", "nvme", 'max_bytes = "2MiB"\n')
    node = start_node(config=STORE + small + tier("large", tmp_path / "large", "nvme"))
    with Client(node.store) as client:
        for n in range(80):  # faster than they are copied
            store_files(client, {b"f%d" % n: data_of(n)})
        assert all(client.stat(b"f%d" % n) is not None for n in range(80))
        assert len(files_in(tmp_path / "small")) <= 2
        for n in range(80):
            assert load_bytes(client, b"f%d" % n) == data_of(n)
        assert all(client.stat(b"f%d" % n) is not None for n in range(80))


def test_a_local_tier_whose_disk_is_full_makes_room(start_node: StartNode, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16M") as disk:
        node = start_node(config=tier("disk", disk / "tier", "nvme"))
        with Client(node.store) as client:
            for n in range(40):
                store_files(client, {b"f%d" % n: data_of(n)})
            wait_copied(client)
            tiering = tiering_of(client)
            assert tiering["behind"]["copied_files"] == 40
            assert tiering["evicted"]["blobs"] == 40 - len(files_in(disk / "tier"))
            # At a time four copies find the disk full, and each makes room for itself.
            assert 15 - 2 * 4 <= len(files_in(disk / "tier")) <= 15
        assert node.stop() == 0
