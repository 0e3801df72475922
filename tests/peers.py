"""Peers for tests: servers over a directory, clients of them, and channels that break rules."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from kvfs.config import PeerLimits
from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.keys import Keys, load_pair
from kvfs.peers.messages import (
    PEER_PROTOCOL,
    Hello,
    Range,
    Reply,
    Tickets,
    TicketsWanted,
    Welcome,
    decode_reply,
    encode,
)
from kvfs.peers.server import PeerServer
from kvfs.peers.source import Source
from scripts.peer_rig import CLIENT_ID, CLUSTER, SERVER_ID, DirectorySource

DATA = os.urandom(300_000)
DEADLINE_S = 20.0
HEADER = struct.Struct("<4sB3xQ")  # of an answer on a bulk stream

# Short enough for tests to see each limit at work, long enough for a busy machine.
QUICK = PeerLimits(
    session_idle_s=1.0, stream_idle_s=1.0, progress_s=1.0, handshake_s=1.0, heartbeat_s=0.5,
    backoff_s_min=0.05, backoff_s_max=0.2,
)  # fmt: skip


def make_keys(directory: Path) -> tuple[Keys, Keys]:
    """The keys of a server and of a client that know each other."""
    server, client = (load_pair(directory / name) for name in ("server.pair", "client.pair"))
    return Keys(server, {client.public: "client"}), Keys(client, {server.public: "server"})


@contextmanager
def serving(
    source: Source,
    keys: Keys | None = None,
    limits: PeerLimits | None = None,
    port: int = 0,
    *,
    encrypt_bulk: bool = False,
) -> Iterator[PeerServer]:
    server = PeerServer(
        source,
        f"127.0.0.1:{port}",
        SERVER_ID,
        CLUSTER,
        keys,
        limits=limits,
        encrypt_bulk=encrypt_bulk,
    )
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def asking(
    port: int,
    keys: Keys | None = None,
    server_key: str | None = None,
    *,
    encrypt_bulk: bool = False,
    limits: PeerLimits | None = None,
    cluster: str = CLUSTER,
) -> Iterator[PeerClient]:
    client = PeerClient(
        f"127.0.0.1:{port}",
        keys,
        server_key,
        CLIENT_ID,
        cluster,
        encrypt_bulk=encrypt_bulk,
        limits=limits,
    )
    try:
        yield client
    finally:
        client.close()


def read_whole(client: PeerClient, digest: bytes, size: int) -> bytes | None:
    """A blob's first bytes; None when the peer has it not."""
    buffer = bytearray(size)
    is_here = client.read_into(digest, 0, memoryview(buffer), DEADLINE_S)
    return bytes(buffer) if is_here else None


class RawChannel:
    """A channel without keys that sends whatever bytes it is told to."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> "RawChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closing twice is fine."""
        self.socket.close(0)
        self._context.term()

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def receive(self, deadline_s: float = DEADLINE_S) -> tuple[int, Reply] | None:
        """The next reply; None when there is none before the deadline."""
        if not self.socket.poll(int(deadline_s * 1000)):
            return None
        return decode_reply(self.socket.recv_multipart()[0])

    def greet(self) -> Welcome:
        """Begin a session with request 1."""
        self.send(encode(1, Hello(PEER_PROTOCOL, CLUSTER, CLIENT_ID, b"n" * 16)))
        reply = self.receive()
        assert reply is not None and isinstance(reply[1], Welcome)
        return reply[1]


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def raw_zmtp(port: int) -> socket.socket:
    """A TCP connection on which zmq's handshake without keys was done by hand."""
    connection = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
    connection.sendall(ZMTP_GREETING)
    receive_exactly(connection, len(ZMTP_GREETING))
    connection.sendall(ZMTP_READY)
    head = receive_exactly(connection, 2)
    assert head[:1] == b"\x04"
    receive_exactly(connection, head[1])
    return connection


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """With a timeout, so piece by piece: such a socket never waits for all."""
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece, f"hung up after {len(data)} of {count} bytes"
        data += piece
    return data


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other side closes before the socket's timeout; what it says first is passed
    over."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


class Ground:
    """A server with one blob, and an honest client of it."""

    def __init__(self, directory: Path, stack: ExitStack, limits: PeerLimits = QUICK) -> None:
        self.source = DirectorySource(directory)
        self.digest = self.source.add(DATA)
        self.server = stack.enter_context(serving(self.source, limits=limits))
        self.client = stack.enter_context(asking(self.server.port))

    def is_well(self) -> bool:
        return read_whole(self.client, self.digest, len(DATA)) == DATA

    def tickets(self, channel: RawChannel, number: int, ranges: list[Range]) -> list[bytes]:
        channel.send(encode(number, TicketsWanted(tuple(ranges))))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Tickets)
        tickets = [ticket for ticket in reply[1].tickets if ticket is not None]
        assert len(tickets) == len(ranges)
        return tickets


class SlowSource(DirectorySource):
    """A source whose look-ups wait until `gate` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.waiting = 0
        self._lock = threading.Lock()

    def sizes(self, digests: object) -> list[int | None]:
        with self._lock:
            self.waiting += 1
        assert self.gate.wait(60)
        return super().sizes(digests)  # type: ignore[arg-type]  # whatever it was


def open_descriptors() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


def peer_threads() -> list[str]:
    """The threads of servers in this process."""
    return sorted(
        t.name for t in threading.enumerate() if t.name.startswith(("kvfs-peer", "kvfs-b"))
    )


def kernel_threads() -> int:
    """All threads of this process, zmq's own among them."""
    return len(os.listdir("/proc/self/task"))


def is_settled(count: object, expected: int, deadline_s: float = 10.0) -> bool:
    """Whether a count comes down to what it was; zmq ends its threads in its own time."""
    assert callable(count)
    end_s = time.monotonic() + deadline_s
    while count() > expected and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(count() <= expected)


def refused_s(call: Callable[[], object], match: str | None = None) -> float:
    """How long a call takes that must raise `Unavailable`."""
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match=match):
        call()
    return time.monotonic() - begin_s


def serves(client: PeerClient, digest: bytes) -> bool:
    """Whether a peer gives a blob of 1000 zeros."""
    try:
        return read_whole(client, digest, 1000) == bytes(1000)
    except Unavailable:
        return False
