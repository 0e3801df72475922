"""An engine beside a real node whose tier is a file system that stops."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from scripts.bridge_rig import Engine, engine_of
from tests.conftest import StartNode
from tests.e2e.test_tiering import tier, wait_copied
from tests.fault.test_tiering import HangingFiles
from tests.mounts import is_mounted
from tests.processes import NodeProcess, wait_until

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")
CHUNKS = 12


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HangingFiles]:
    with closing(HangingFiles(tmp_path / "root", tmp_path / "mounted")) as files:
        wait_until(lambda: is_mounted(files.mountpoint))
        yield files


@pytest.fixture
def node(start_node: StartNode, files: HangingFiles) -> NodeProcess:
    config = tier("slow", files.mountpoint / "t", more="read_deadline_s = 2.0\n")
    return start_node(config=config, allow="slow|did not end in time")


@pytest.fixture
def engine(node: NodeProcess) -> Iterator[Engine]:
    """It has stored chunks, of which the tier has copies."""
    with engine_of(node.store, CHUNKS, 2 * MIB, 2) as engine:
        engine.change()
        engine.store()
        with Client(node.store) as client:
            wait_copied(client)
            yield engine


def test_an_engine_loads_all_that_it_has_elsewhere_while_a_tier_hangs(
    node: NodeProcess, engine: Engine, files: HangingFiles
) -> None:
    with Client(node.store) as client:
        client.evict_copies(engine.paths()[::2])
    engine.load()  # half of it only the tier has
    engine.check()
    assert engine.counters.take().sums["read_bytes.slow"] >= CHUNKS // 2 * 2 * MIB
    with Client(node.store) as client:
        for file in client.open(engine.paths()):  # brings what only the tier has
            assert file is not None
            file.close()
    for _ in range(2):
        engine.clear()
        files.stop()
        engine.load()
        files.go_on()
        engine.check()
