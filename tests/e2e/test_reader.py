"""Programs that read a node's files from all places at once, and an engine that does."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, Unavailable
from kvfs.reader.files import FileReader
from kvfs.tiers.directory import DirectoryTier
from scripts.bridge_rig import engine_of
from tests.conftest import StartNode
from tests.processes import NodeProcess, wait_until
from tests.tier_nodes import (
    data_of,
    store_files,
    tier,
    wait_copied,
)

FILES = {b"d/%d" % number: data_of(number) for number in range(1, 80)}
PATHS = list(FILES)
STORE, SCRATCH = "store 0", "scratch"


@pytest.fixture
def node(start_node: StartNode, tmp_path: Path) -> NodeProcess:
    """Its tier has a copy of each of its files."""
    return start_node(config=tier(SCRATCH, tmp_path / SCRATCH), allow="quarantined|wrong bytes")


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.store) as client:
        store_files(client, FILES)
        wait_copied(client)
        yield client


@pytest.fixture
def reader(node: NodeProcess) -> Iterator[FileReader]:
    with FileReader(node.store) as reader:
        yield reader


def bytes_from(reader: FileReader) -> dict[str, int]:
    """What each place gave."""
    return {one.name: one.schedule.bytes_read for one in reader.view().tiers}


def spoil(root: Path, data: bytes) -> None:
    name = digest_of(data).hex()
    blob = root / "blobs" / name[:2] / name[2:4] / name
    os.chmod(blob, 0o600)
    blob.write_bytes(bytes(len(data)))


def test_files_are_read_from_the_store_and_from_a_tier(client: Client, reader: FileReader) -> None:
    evicted = PATHS[::2]
    assert client.evict_copies(evicted) == (len(evicted), len(evicted))  # their names stay
    assert reader.read([*PATHS, b"none"]) == [*FILES.values(), None]
    given = bytes_from(reader)
    assert given[SCRATCH] >= len(evicted) * MIB and given[STORE] > 0
    buffers = [memoryview(bytearray(MIB + 5)) for _ in PATHS]
    assert reader.read_into(PATHS, buffers) == [MIB] * len(PATHS)
    assert all(b[:MIB] == data for b, data in zip(buffers, FILES.values(), strict=True))


def test_what_could_never_be_read_is_refused_and_what_is_empty_is_not(
    client: Client, reader: FileReader
) -> None:
    store_files(client, {b"empty": b""})
    assert reader.read([b"empty", PATHS[0]]) == [b"", FILES[PATHS[0]]]
    assert reader.read_into([b"empty"], [memoryview(bytearray())]) == [0]
    small = [memoryview(bytearray(MIB)), memoryview(bytearray(MIB - 1))]
    with pytest.raises(InvalidInput, match=r"has 1048575 bytes, and d/2 1048576"):
        reader.read_into(PATHS[:2], small)
    for wrong in (memoryview(bytes(MIB)), memoryview(bytearray(2 * MIB))[::2]):
        with pytest.raises(InvalidInput, match="must be writable, and in one piece"):
            reader.read_into(PATHS[:1], [wrong])
    with pytest.raises(InvalidInput, match="are 0, for 1"):
        reader.read_into(PATHS[:1], [])


def test_a_copy_that_is_rotten_is_read_elsewhere_and_told_to_the_node(
    node: NodeProcess, client: Client, reader: FileReader, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier store 0 (had|gave) wrong bytes")
    reader.read(PATHS[:1])
    wait_until(lambda: SCRATCH in bytes_from(reader))  # it is opened beside the first read
    for path in PATHS:
        spoil(node.store, FILES[path])
    assert reader.read(PATHS) == list(FILES.values())
    wait_until(lambda: client.status()["counters"]["corrupt_blobs"] > 0)


def test_rotten_bytes_that_only_a_tier_has_are_not_given(
    client: Client, reader: FileReader, tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch (had|gave) wrong bytes")
    client.evict_copies(PATHS[:3])
    spoil(tmp_path / SCRATCH, FILES[PATHS[1]])
    buffers = [memoryview(bytearray(MIB)) for _ in range(3)]
    assert reader.read_into(PATHS[:3], buffers) == [MIB, None, MIB]
    assert buffers[0] == FILES[PATHS[0]] and buffers[2] == FILES[PATHS[2]]


def test_nothing_is_written_to_a_buffer_after_the_deadline(
    client: Client, reader: FileReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.evict_copies(PATHS[:2])
    reader.read(PATHS[2:3])
    wait_until(lambda: SCRATCH in bytes_from(reader))  # it is opened beside the first read
    thaw, read = threading.Event(), DirectoryTier._read_apart
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def freeze(*arguments: object) -> bool:
        begun.release()
        thaw.wait(30)
        try:
            return read(*arguments)  # type: ignore[arg-type]
        finally:
            ended.release()

    monkeypatch.setattr(DirectoryTier, "_read_apart", freeze)
    buffers = [memoryview(bytearray(MIB)) for _ in range(2)]
    assert reader.read_into(PATHS[:2], buffers, deadline_s=0.3) == [None, None]
    thaw.set()
    assert begun.acquire(timeout=30) and ended.acquire(timeout=30)
    while begun.acquire(blocking=False):
        assert ended.acquire(timeout=30)
    assert buffers == [bytes(MIB)] * 2


def test_a_node_that_is_away_is_said(tmp_path: Path) -> None:
    with FileReader(tmp_path) as reader, pytest.raises(Unavailable, match="no node answers"):
        reader.read([b"f"])


def test_an_engine_reads_chunks_from_the_store_and_from_a_tier(node: NodeProcess) -> None:
    with engine_of(node.store, 12, 2 * MIB, 2) as engine:
        engine.change()
        engine.store()
        with Client(node.store) as client:
            wait_copied(client)
            client.evict_copies(engine.paths()[::2])
        engine.load()
        engine.check()
        sums = engine.counters.take().sums
        assert sums["loaded_chunks"] == 12
        assert sums["read_bytes.scratch"] >= 6 * 2 * MIB and sums["read_bytes.store"] > 0
