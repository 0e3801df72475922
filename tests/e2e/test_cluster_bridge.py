"""The bridge where bytes are not: straight from a peer, or another way, or not at all."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.errors import Unavailable
from scripts.bridge_rig import Engine, Reader, digest_of, engine_of
from scripts.cluster_rig import Node, Rig, cluster, command_in
from tests.processes import wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]
CHUNKS = 3
CHUNK_BYTES = 2 * MIB


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def stored(rig: Rig) -> Iterator[Engine]:
    """An engine on the first node that has stored chunks of random content."""
    with engine_of(rig.nodes[0].store, CHUNKS, CHUNK_BYTES, 1) as engine:
        engine.change()
        engine.store()
        yield engine


def reader_of(node: Node, *, is_inside: bool = True) -> Reader:
    """An engine beside a node: in its network, or where no other node can be reached."""
    prefix = command_in(node.host) if is_inside else ("unshare", "--net")
    return Reader(node.store, CHUNKS, CHUNK_BYTES, prefix)


def count_here(node: Node, engine: Engine) -> int:
    """How many chunks of an engine a node has the bytes of."""
    with Client(node.store) as client:
        inodes = [client.stat(path) for path in engine.paths()]
        digests = [inode.digest for inode in inodes if inode is not None]
        return sum(blob is not None for blob in client.blobs(digests))


def test_chunks_come_straight_from_the_node_that_has_them(rig: Rig, stored: Engine) -> None:
    node = rig.nodes[1]
    with closing(reader_of(node)) as reader:
        load = reader.load(stored.hashes)
        assert load.is_whole and load.digest == digest_of(stored, 1)
        assert load.remote_bytes > CHUNKS * CHUNK_BYTES
        assert count_here(node, stored) == 0
        assert reader.load(stored.hashes).is_whole
        wait_until(lambda: count_here(node, stored) == CHUNKS)  # as often as copy_after says
        load = reader.load(stored.hashes)
        assert load.is_whole and load.remote_bytes == 0


def test_a_part_of_a_chunk_comes_by_a_ticket_that_a_node_gets(rig: Rig, stored: Engine) -> None:
    path = stored.paths()[0]
    with Client(rig.nodes[0].store) as holder, Client(rig.nodes[1].store) as client:
        (opened,) = holder.open([path])
        assert opened is not None
        with opened:
            content = os.pread(opened.fd, opened.size_bytes, 0)
        (file,) = client.locate([path]).files
        assert file is not None and file.fd is None and file.peers
        assert file.ticket and file.digest == opened.digest
        assert client.peer_sizes(file.peers[0], [file.digest, bytes(16)]) == [len(content), None]
        wanted = [(file.digest, MIB, 4096), (bytes(16), 0, 1), (file.digest, len(content), 1)]
        address, tickets = client.peer_tickets(file.peers[0], wanted)
        assert [ticket is not None for ticket in tickets] == [True, False, False]
        assert address == file.address
        with pytest.raises(Unavailable, match="is not there"):
            client.peer_tickets(bytes(16), wanted)


def test_an_engine_that_reaches_no_peer_gets_them_by_its_node(rig: Rig, stored: Engine) -> None:
    node = rig.nodes[1]
    with closing(reader_of(node, is_inside=False)) as reader:
        load = reader.load(stored.hashes)
    assert load.is_whole and load.digest == digest_of(stored, 1)
    assert load.remote_bytes == 0
    assert count_here(node, stored) == CHUNKS


def test_a_rotten_blob_of_a_peer_is_never_loaded(rig: Rig, stored: Engine) -> None:
    node = rig.nodes[2]
    with Client(node.store) as client:
        inode = client.stat(stored.paths()[1])
    assert inode is not None
    name = inode.digest.hex()
    blob = rig.nodes[0].store / "blobs" / name[:2] / name[2:4] / name
    os.chmod(blob, 0o600)
    with open(blob, "r+b") as file:
        file.seek(CHUNK_BYTES // 2)
        file.write(b"rotten")
    with closing(reader_of(node)) as reader:
        load = reader.load(stored.hashes)
    assert not load.is_whole
    assert load.digest != digest_of(stored, 1)


def test_another_holder_is_found_when_one_has_died(rig: Rig, stored: Engine) -> None:
    first, second, third = rig.nodes
    with closing(reader_of(second, is_inside=False)) as reader:
        assert reader.load(stored.hashes).is_whole  # has a copy of each by now
    first.kill()
    try:
        with closing(reader_of(third)) as reader:
            load = reader.load(stored.hashes)
        assert load.is_whole and load.digest == digest_of(stored, 1)
    finally:
        first.clear()
        first.start()


def test_chunks_whose_only_node_has_died_are_recomputed(rig: Rig, stored: Engine) -> None:
    first, _, third = rig.nodes
    first.kill()
    try:
        with closing(reader_of(third)) as reader:
            load = reader.load(stored.hashes)
        assert not load.is_whole and load.remote_bytes == 0
    finally:
        first.clear()
        first.start()


def test_encrypted_bytes_come_by_the_node(tmp_path: Path) -> None:
    stores = [tmp_path / f"node{number}" / "store" for number in range(2)]
    for store in stores:
        store.mkdir(parents=True)
        text = '[cluster]\nmetadata = "redis://0.0.0.0:1"\nencrypt_bulk = true\n'
        (store / "kvfs.toml").write_text(text)  # the rig says by --join where the names are
    with (
        cluster(2, tmp_path) as encrypted,
        engine_of(stores[0], CHUNKS, CHUNK_BYTES, 1) as engine,
        closing(reader_of(encrypted.nodes[1])) as reader,
    ):
        engine.change()
        engine.store()
        load = reader.load(engine.hashes)
        assert load.is_whole and load.digest == digest_of(engine, 1)
        assert load.remote_bytes == 0
        assert count_here(encrypted.nodes[1], engine) == CHUNKS
