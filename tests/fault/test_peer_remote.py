"""A client that reads from another node by tickets: right bytes, or one error in time."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.client_files import RemoteFile
from kvfs.config import MIB, REMOTE_PROGRESS_S
from kvfs.errors import Corrupt, Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Range
from kvfs.remote import RemoteReader
from scripts.peer_rig import CLIENT_ID, CLUSTER, DirectorySource, PeerProcess
from tests.peers import DEADLINE_S, open_descriptors

SIZE = 5 * MIB + 3


class Peer:
    """A node in a process of its own, with one blob."""

    def __init__(self, directory: Path) -> None:
        self.data = os.urandom(SIZE)
        self.source = DirectorySource(directory)
        self.digest = self.source.add(self.data)
        self.process = PeerProcess(directory, ("--insecure",))
        self.client = PeerClient(f"127.0.0.1:{self.process.port}", None, None, CLIENT_ID, CLUSTER)

    def refer(self, size_bytes: int = SIZE) -> RemoteFile:
        """What the node of a client would tell it."""
        wanted = [Range(self.digest, 0, size_bytes)]
        address, tickets = self.client.tickets(wanted, DEADLINE_S)
        assert tickets[0] is not None
        return RemoteFile(size_bytes, self.digest, str(address), tickets[0])


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    try:
        yield peer
    finally:
        peer.client.close()
        peer.process.kill()


@pytest.fixture
def reader() -> Iterator[RemoteReader]:
    with closing(RemoteReader()) as reader:
        yield reader


def read(reader: RemoteReader, file: RemoteFile, deadline_s: float = DEADLINE_S) -> bytes:
    memory = memoryview(bytearray(SIZE + 100))
    return bytes(reader.read_verified(file, memory, time.monotonic() + deadline_s))


def test_all_bytes_arrive_and_streams_are_kept(peer: Peer, reader: RemoteReader) -> None:
    assert read(reader, peer.refer()) == peer.data
    before = open_descriptors()
    for _ in range(5):
        assert read(reader, peer.refer()) == peer.data
    assert open_descriptors() == before


def test_other_bytes_are_corrupt(peer: Peer, reader: RemoteReader) -> None:
    path = peer.source.directory / peer.digest.hex()
    path.write_bytes(peer.data[:-1] + bytes([peer.data[-1] ^ 1]))
    with pytest.raises(Corrupt, match="other bytes"):
        read(reader, peer.refer())
    path.write_bytes(peer.data)
    assert read(reader, peer.refer()) == peer.data


def test_a_ticket_is_good_once(peer: Peer, reader: RemoteReader) -> None:
    file = peer.refer()
    assert read(reader, file) == peer.data
    with pytest.raises(Unavailable, match="take the ticket"):
        read(reader, file)


def test_a_blob_that_went_meanwhile_is_unavailable(peer: Peer, reader: RemoteReader) -> None:
    file = peer.refer()
    (peer.source.directory / peer.digest.hex()).unlink()
    with pytest.raises(Unavailable, match=r"not .* any more"):
        read(reader, file)


def test_a_frozen_peer_costs_little_time_and_then_none(peer: Peer, reader: RemoteReader) -> None:
    files = [peer.refer() for _ in range(3)]
    assert read(reader, files[0]) == peer.data
    peer.process.freeze()
    try:
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            read(reader, files[1])
        assert time.monotonic() - began_s < REMOTE_PROGRESS_S + DEADLINE_S / 2
        with pytest.raises(Unavailable, match="asked again in"):
            read(reader, files[2])
    finally:
        peer.process.thaw()


def test_a_peer_that_dies_is_unavailable(peer: Peer, reader: RemoteReader) -> None:
    files = [peer.refer() for _ in range(2)]
    assert read(reader, files[0]) == peer.data
    peer.process.kill()
    with pytest.raises(Unavailable):
        read(reader, files[1])


def test_nobody_at_the_address(peer: Peer, reader: RemoteReader) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        read(reader, replace(peer.refer(), address="127.0.0.1:1"))


def test_a_deadline_that_has_passed(peer: Peer, reader: RemoteReader) -> None:
    with pytest.raises(Unavailable):
        read(reader, peer.refer(), deadline_s=0.0)


def test_closed_readers_read_nothing(peer: Peer, reader: RemoteReader) -> None:
    files = [peer.refer() for _ in range(2)]
    assert read(reader, files[0]) == peer.data
    reader.close()
    with pytest.raises(Unavailable, match="closed"):
        read(reader, files[1])
