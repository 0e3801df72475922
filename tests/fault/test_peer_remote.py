"""A client that reads from another node by tickets: the bytes that lie there, or one error in
time."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvfs.config import MIB, REMOTE_PROGRESS_S
from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Range
from kvfs.remote import RemoteReader
from scripts.peer_rig import CLIENT_ID, CLUSTER, DirectorySource, PeerProcess
from tests.peers import DEADLINE_S, open_descriptors

SIZE = 5 * MIB + 3


@dataclass(frozen=True, slots=True)
class Referred:
    """A range of the blob, at the node that has it."""

    address: str
    ticket: bytes
    size_bytes: int


class Peer:
    """A node in a process of its own, with one blob."""

    def __init__(self, directory: Path) -> None:
        self.data = os.urandom(SIZE)
        self.source = DirectorySource(directory)
        self.digest = self.source.add(self.data)
        self.process = PeerProcess(directory, ("--insecure",))
        self.client = PeerClient(f"127.0.0.1:{self.process.port}", None, None, CLIENT_ID, CLUSTER)

    def refer(self, begin: int = 0, size_bytes: int = SIZE) -> Referred:
        """What the node of a client would tell it."""
        wanted = [Range(self.digest, begin, size_bytes)]
        address, tickets = self.client.tickets(wanted, DEADLINE_S)
        assert tickets[0] is not None
        return Referred(str(address), tickets[0], size_bytes)


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


def read(reader: RemoteReader, file: Referred, deadline_s: float = DEADLINE_S) -> bytes | None:
    memory = memoryview(bytearray(file.size_bytes))
    end_s = time.monotonic() + deadline_s
    is_there = reader.read_range(file.address, file.ticket, memory, end_s)
    return bytes(memory) if is_there else None


def test_all_bytes_arrive_and_streams_are_kept(peer: Peer, reader: RemoteReader) -> None:
    assert read(reader, peer.refer()) == peer.data
    before = open_descriptors()
    for _ in range(5):
        assert read(reader, peer.refer()) == peer.data
    assert open_descriptors() == before


def test_a_part_arrives(peer: Peer, reader: RemoteReader) -> None:
    assert read(reader, peer.refer(MIB + 1, 2 * MIB)) == peer.data[MIB + 1 : 3 * MIB + 1]


def test_a_ticket_is_good_once(peer: Peer, reader: RemoteReader) -> None:
    file = peer.refer()
    assert read(reader, file) == peer.data
    with pytest.raises(Unavailable, match="take the ticket"):
        read(reader, file)


def test_a_blob_that_went_meanwhile_is_a_miss(peer: Peer, reader: RemoteReader) -> None:
    file = peer.refer()
    (peer.source.directory / peer.digest.hex()).unlink()
    assert read(reader, file) is None


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
