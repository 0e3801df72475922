"""Senders that break rules, stall or flood lose their session, and an honest client nothing."""

import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from kvfs.config import MIB, PEER_FRAME_BYTES_MAX
from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import (
    PEER_PROTOCOL,
    Code,
    HealthWanted,
    Hello,
    Lookup,
    Read,
    Refusal,
    Sizes,
    encode,
)
from kvfs.peers.server import PeerServer
from scripts.peer_rig import CLIENT_ID, CLUSTER, SERVER_ID, DirectorySource
from tests.peers import (
    DATA,
    DEADLINE_S,
    QUICK,
    Ground,
    RawChannel,
    SlowSource,
    asking,
    is_hung_up,
    peer_threads,
    raw_zmtp,
    read_whole,
    serving,
)
from tests.processes import wait_until

ABSENT = b"a" * 16


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1" * 100, id="no msgpack"),
        pytest.param(msgpack.packb([2, 5, b"d" * 17]), id="a part of a digest"),
        pytest.param(msgpack.packb([99, 5]), id="an unknown kind"),
        pytest.param(msgpack.packb([66, 5, bytes(8)]), id="a reply"),
        pytest.param(b"\x91" * 100_000, id="deep lists"),
        pytest.param(bytes(PEER_FRAME_BYTES_MAX), id="the largest frame"),
    ],
)
def test_a_malformed_message_costs_its_sender_the_session(ground: Ground, body: bytes) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.greet()
        channel.send(encode(2, HealthWanted()))
        assert channel.receive() is not None
        channel.send(body)
        reply = channel.receive()
        assert reply is not None and reply[0] == 0
        assert isinstance(reply[1], Refusal) and reply[1].code is Code.INVALID
        channel.send(encode(3, HealthWanted()))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert reply[1].code is Code.NO_SESSION


def test_a_message_of_two_parts_ends_the_session(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.greet()
        channel.send(encode(2, HealthWanted()), b"more", b"and more")
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert "more than one part" in reply[1].text
        wait_until(lambda: ground.server.session_count == 1)


@pytest.mark.parametrize("number", [7, 6, 1])
def test_a_number_that_does_not_grow_is_a_replay(ground: Ground, number: int) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.greet()
        channel.send(encode(7, HealthWanted()))
        assert channel.receive() is not None
        channel.send(encode(number, HealthWanted()))
        reply = channel.receive()
        assert reply == (number, Refusal(Code.REPLAY, f"number {number} is not new"))
        channel.send(encode(8, HealthWanted()))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert reply[1].code is Code.NO_SESSION


def test_a_second_hello_ends_the_session(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.greet()
        channel.send(encode(2, Hello(PEER_PROTOCOL, CLUSTER, CLIENT_ID, b"n" * 16)))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert reply[1].code is Code.INVALID
        channel.greet()  # begins a new one


def test_another_version_is_told_so(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.send(encode(1, Hello(PEER_PROTOCOL + 1, CLUSTER, CLIENT_ID, b"n" * 16)))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert reply[1].code is Code.STRANGER


def test_who_does_not_say_hello_gets_no_answer_but_that(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        channel.send(encode(1, Lookup((ground.digest,))))
        assert channel.receive() == (1, Refusal(Code.NO_SESSION, "say hello first"))


def test_a_message_too_large_costs_the_connection(ground: Ground) -> None:
    with raw_zmtp(ground.server.port) as connection:
        size = PEER_FRAME_BYTES_MAX + 1
        connection.sendall(b"\x02" + size.to_bytes(8, "big") + bytes(1000))
        assert is_hung_up(connection)


def test_half_a_message_costs_the_connection(ground: Ground) -> None:
    with raw_zmtp(ground.server.port) as connection:
        connection.sendall(b"\x02" + (1000).to_bytes(8, "big") + bytes(10))
        assert is_hung_up(connection)


@pytest.mark.parametrize("said", [b"", b"\xff" + bytes(8), b"GET / HTTP/1.1\r\n\r\n" * 10])
def test_half_a_handshake_costs_the_connection(ground: Ground, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", ground.server.port), DEADLINE_S) as connection:
        connection.sendall(said)
        assert is_hung_up(connection)


def test_requests_too_many_end_the_session(tmp_path: Path) -> None:
    source = SlowSource(tmp_path)
    digest = source.add(b"abc")
    limits = replace(QUICK, workers=2, session_requests_max=4)
    with (
        serving(source, limits=limits) as server,
        RawChannel(server.port) as channel,
        asking(server.port) as client,
    ):
        channel.greet()
        for number in range(2, 7):
            channel.send(encode(number, Lookup((digest,))))
        reply = channel.receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        assert "more than 4 requests" in reply[1].text
        source.gate.set()
        assert read_whole(client, digest, 3) == b"abc"
        assert channel.receive(0.2) is None  # what it had asked before is not answered
        assert source.waiting <= 2 + 1  # nor asked, but for what was under way


def test_a_node_with_too_much_to_do_says_so(tmp_path: Path) -> None:
    source = SlowSource(tmp_path)
    limits = replace(QUICK, workers=1, requests_max=3)
    with serving(source, limits=limits) as server, RawChannel(server.port) as channel:
        channel.greet()
        for number in range(2, 6):
            channel.send(encode(number, Lookup((ABSENT,))))
        reply = channel.receive()
        assert reply == (5, Refusal(Code.BUSY, "the node has too much to do"))
        source.gate.set()
        replies = [channel.receive() for _ in range(3)]
        assert replies == [(number, Sizes((None,))) for number in (2, 3, 4)]


def test_sessions_too_many_push_out_the_longest_idle(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack, replace(QUICK, sessions_per_peer_max=3))
        channels = [stack.enter_context(RawChannel(ground.server.port)) for _ in range(4)]
        for channel in channels:
            channel.greet()
        channels[0].send(encode(2, HealthWanted()))
        reply = channels[0].receive()
        assert reply is not None and isinstance(reply[1], Refusal)
        channels[3].send(encode(2, HealthWanted()))
        reply = channels[3].receive()
        assert reply is not None and not isinstance(reply[1], Refusal)
        assert ground.is_well()


def test_channels_too_many_are_not_let_in(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack, replace(QUICK, connections_max=2))
        assert ground.is_well()
        channel = stack.enter_context(RawChannel(ground.server.port))
        channel.greet()
        with asking(ground.server.port) as late, pytest.raises(Unavailable):
            late.health(2.0)
        assert ground.is_well()
        channel.close()

        wait_until(lambda: _lets_in(ground.server.port))


def _lets_in(port: int) -> bool:
    with asking(port) as client:
        try:
            return client.health(2.0).load == 0.0
        except Unavailable:
            return False


def test_who_does_not_read_answers_loses_the_session(tmp_path: Path) -> None:
    """Its answers are bounded: what does not fit is not kept."""
    with ExitStack() as stack:
        limits = replace(
            QUICK,
            session_idle_s=60,
            progress_s=30,
            session_requests_max=100_000,
            requests_max=100_000,
        )
        ground = Ground(tmp_path, stack, limits)
        connection = stack.enter_context(raw_zmtp(ground.server.port))
        _send_zmtp(connection, encode(1, Hello(PEER_PROTOCOL, CLUSTER, CLIENT_ID, b"n" * 16)))
        read = Read(ground.digest, 0, len(DATA))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        number = 1
        wait_until(lambda: ground.server.session_count == 1)
        end_s = time.monotonic() + DEADLINE_S
        while ground.server.session_count == 1:
            assert time.monotonic() < end_s
            number += 1
            _send_zmtp(connection, encode(number, read))
        assert number > 16  # what zmq queues for it
        assert ground.is_well()


def test_a_message_of_endless_parts_costs_the_connection(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    """zmq would gather them for ever."""
    allow_warnings.append("cut 1 peers that sent messages without an end")
    with ExitStack() as stack:
        limits = replace(QUICK, unshown_bytes_max=8 * MIB, session_idle_s=60)
        ground = Ground(tmp_path, stack, limits)
        greeted = stack.enter_context(RawChannel(ground.server.port))
        greeted.greet()
        for number in range(2, 20):  # as much, in messages that end
            greeted.send(encode(number, Lookup((ABSENT,) * 4096)) + bytes(MIB // 2))
            assert greeted.receive() is not None
        connection = stack.enter_context(raw_zmtp(ground.server.port))
        part = b"\x03" + (MIB // 2).to_bytes(8, "big") + bytes(MIB // 2)
        end_s = time.monotonic() + DEADLINE_S
        with pytest.raises(ConnectionError):
            while time.monotonic() < end_s:
                connection.sendall(part)
        wait_until(lambda: ground.server.connection_count == 1)
        greeted.send(encode(99, HealthWanted()))
        assert greeted.receive() is not None
        assert ground.is_well()


def test_connections_of_strangers_are_bounded(tmp_path: Path) -> None:
    """Those that are let in stay in; the others are hung up on at once, not after a handshake."""
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack, replace(QUICK, connections_max=10, handshake_s=30))
        assert ground.is_well()
        strangers = [stack.enter_context(socket.socket()) for _ in range(30)]
        for stranger in strangers:
            stranger.settimeout(DEADLINE_S)
            try:
                stranger.connect(("127.0.0.1", ground.server.port))
            except ConnectionError:  # it was cut already
                pass
        assert all(is_hung_up(stranger) for stranger in strangers[-15:])
        assert ground.is_well()
        wait_until(lambda: ground.server.connection_count <= 10)
        for stranger in strangers:
            stranger.close()
        wait_until(lambda: _lets_in(ground.server.port))


def _send_zmtp(connection: socket.socket, body: bytes) -> None:
    connection.sendall(b"\x02" + len(body).to_bytes(8, "big") + body)


def test_a_source_that_fails_is_a_refusal(tmp_path: Path, allow_warnings: list[str]) -> None:
    class FailingSource(DirectorySource):
        def sizes(self, digests: object) -> list[int | None]:
            raise OSError(5, "Input/output error")

        def open(self, digest: bytes) -> int | None:
            raise OSError(5, "Input/output error")

        def hinted(self, digests: object, *, spare_only: bool) -> None:
            raise ZeroDivisionError

    allow_warnings += ["a peer's request failed", "met a bug"]
    with serving(FailingSource(tmp_path)) as server, asking(server.port) as client:
        with pytest.raises(Unavailable, match="Input/output error"):
            client.sizes([ABSENT], DEADLINE_S)
        with pytest.raises(Unavailable, match="met a bug"):
            client.hint([ABSENT], DEADLINE_S)
        assert client.health(DEADLINE_S).load == 0.0


def test_closing_takes_bounded_time_while_the_source_hangs(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("threads of the peer server are busy")
    source = SlowSource(tmp_path)
    server = PeerServer(
        source, "127.0.0.1:0", SERVER_ID, CLUSTER, None, limits=replace(QUICK, close_s=0.5)
    )
    server.start()
    with RawChannel(server.port) as channel:
        channel.greet()
        channel.send(encode(2, Lookup((ABSENT,))))
        wait_until(lambda: source.waiting == 1)
        begin_s = time.monotonic()
        server.close()
        assert time.monotonic() - begin_s < 5
    source.gate.set()
    wait_until(lambda: not peer_threads())


def test_a_flood_of_malformed_messages_delays_nobody_for_long(ground: Ground) -> None:
    ended = threading.Event()
    sent = 0

    def flood() -> None:
        nonlocal sent
        with RawChannel(ground.server.port) as channel:
            while not ended.is_set():
                channel.send(b"\xc1" * 100)
                sent += 1
                while channel.receive(0) is not None:
                    pass

    flooder = threading.Thread(target=flood)
    flooder.start()
    try:
        wait_until(lambda: sent > 100)
        for _ in range(20):
            assert ground.is_well()
    finally:
        ended.set()
        flooder.join(20)
    assert not flooder.is_alive()


def test_honest_clients_of_one_server_do_not_wait_for_each_other(ground: Ground) -> None:
    def read(client: PeerClient, found: list[bool]) -> None:
        found.extend(read_whole(client, ground.digest, len(DATA)) == DATA for _ in range(20))

    with ExitStack() as stack:
        clients = [stack.enter_context(asking(ground.server.port)) for _ in range(6)]
        found: list[bool] = []
        threads = [threading.Thread(target=read, args=(client, found)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [True] * 120
