"""Nodes whose tier hangs: the node answers all the while, loses nothing, and goes on afterwards."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from tests.conftest import StartNode
from tests.files import load_bytes
from tests.hanging_files import HangingFiles
from tests.mounts import is_mounted
from tests.processes import wait_until
from tests.tier_nodes import (
    data_of,
    files_in,
    names_of,
    store_files,
    tiering_of,
    wait_copied,
)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingFiles]:
    files = HangingFiles(tmp_path / "root", tmp_path / "mounted")
    try:
        wait_until(lambda: is_mounted(files.mountpoint))
        yield files
    finally:
        files.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_who_wants_what_another_tier_has_too_does_not_wait_for_one_that_hangs(
    hanging: HangingFiles, start_node: StartNode, tmp_path: Path
) -> None:
    # With a deadline of its own that is longer than any reader waits.
    more = "read_deadline_s = 120\n"
    slow = f'[[tiers]]\nname = "slow"\nkind = "shared"\npath = "{hanging.mountpoint}/t"\n{more}'
    good = f'[[tiers]]\nname = "good"\nkind = "nvme"\npath = "{tmp_path}/good"\n'
    node = start_node(config=slow + good, allow="tier slow")
    with Client(node.store, deadline_s=60) as client:
        store_files(client, {b"f%d" % n: data_of(n) for n in range(4)})
        wait_copied(client)
        client.evict_copies([b"f%d" % n for n in range(4)])
        hanging.stop()
        found = [load_bytes(client, b"f%d" % n) for n in range(4)]
        reads = {one["name"]: one for one in tiering_of(client)["tiers"]}
        hanging.go_on()
        assert found == [data_of(n) for n in range(4)]
        assert reads["slow"]["in_flight"] > 0  # or it was never asked


def is_hanging(client: Client) -> bool:
    """Whether the node answers while a read of its first tier is under way."""
    return bool(tiering_of(client)["tiers"][0]["in_flight"])  # type: ignore[index]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_tier_that_hangs_keeps_nobody_but_who_wants_what_only_it_has(
    hanging: HangingFiles, start_node: StartNode, tmp_path: Path
) -> None:
    more = "read_deadline_s = 4\nwrite_deadline_s = 2\n"
    slow = f'[[tiers]]\nname = "slow"\nkind = "shared"\npath = "{hanging.mountpoint}/t"\n{more}'
    good = f'[[tiers]]\nname = "good"\nkind = "shared"\npath = "{tmp_path}/good"\n'
    rules = '[[tier_copies]]\nprefix = "slow/"\ncopies = 1\n'
    node = start_node(config=rules + slow + good, allow="slow")
    with Client(node.store) as client, Client(node.store, deadline_s=60) as reader:
        store_files(client, {b"slow/1": data_of(1), b"both/2": data_of(2)})
        wait_copied(client)
        assert client.evict_copies([b"slow/1", b"both/2"]) == (2, 2)
        hanging.stop()
        found: list[bytes | None] = []
        waiting = threading.Thread(target=lambda: found.append(load_bytes(reader, b"slow/1")))
        waiting.start()
        wait_until(lambda: is_hanging(client))
        store_files(client, {b"both/%d" % n: data_of(n) for n in range(3, 6)})
        assert load_bytes(client, b"both/2") == data_of(2)  # from the tier that answers
        assert is_hanging(client), "the node answered only after the tier's deadline"
        wait_until(lambda: names_of(range(2, 6)) <= files_in(tmp_path / "good"))
        waiting.join(60)
        assert found == [None]  # a miss: no other tier has it
        assert client.lookup([b"slow/1"]) == [MIB]  # and no loss
        hanging.go_on()
        wait_until(lambda: load_bytes(client, b"slow/1") == data_of(1), 40)
        wait_until(lambda: names_of(range(1, 6)) <= files_in(hanging.root / "t"), 60)
        wait_copied(client)
        assert tiering_of(client)["behind"]["dropped_files"] == 0
