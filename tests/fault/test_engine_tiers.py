"""An engine beside a real node whose tier is a file system that stops."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.errors import Unavailable
from kvfs.reader import configured
from kvfs.reader.files import FileReader
from kvfs.settings.words import TierConfig
from scripts.bridge_rig import Engine, engine_of
from tests.conftest import StartNode
from tests.hanging_files import HangingFiles
from tests.mounts import is_mounted
from tests.processes import NodeProcess, wait_until
from tests.tier_nodes import (
    data_of,
    store_files,
    tier,
    wait_copied,
)

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")
CHUNKS = 12


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HangingFiles]:
    with closing(HangingFiles(tmp_path / "root", tmp_path / "mounted")) as files:
        wait_until(lambda: is_mounted(files.mountpoint))
        yield files


@pytest.fixture
def node(files: HangingFiles, start_node: StartNode) -> NodeProcess:
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


def test_a_reader_keeps_what_it_has_and_waits_for_what_its_node_brings(
    files: HangingFiles,
    start_node: StartNode,
    monkeypatch: pytest.MonkeyPatch,
    allow_warnings: list[str],
) -> None:
    allow_warnings.append("no credentials here")

    def refuse(config: TierConfig, *_: object, **__: object) -> None:
        raise Unavailable(f"tier {config.name}: no credentials here")

    monkeypatch.setattr(configured, "open_tier", refuse)
    config = tier("slow", files.mountpoint / "t", more="read_deadline_s = 60\n")
    node = start_node(config=config, allow="slow")
    words: list[list[int]] = []
    bring = Client.bring

    def note_and_bring(client: Client, *arguments: Any, **options: Any) -> Any:
        opened, coming = bring(client, *arguments, **options)
        words.append(coming)
        if words == [[0]]:
            files.go_on()
        return opened, coming

    with Client(node.store) as client, FileReader(node.store, deadline_s=1.0) as reader:
        store_files(client, {b"away": data_of(1), b"here": data_of(2)})
        wait_copied(client)
        assert client.evict_copies([b"away"]) == (1, 1)
        files.stop()
        monkeypatch.setattr(Client, "bring", note_and_bring)
        assert reader.read([b"here", b"away"]) == [data_of(2), data_of(1)]
        assert words[0] == [0] and words[-1] == []  # the same read, which went on
        assert client.evict_copies([b"away"]) == (1, 1)
        files.stop()
        assert reader.read([b"here", b"away"], deadline_s=0.5) == [data_of(2), None]
