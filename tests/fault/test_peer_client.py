"""A client whose peer is dead, frozen or lies: one error in time, no leak."""

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvfs.config import MIB, PeerLimits
from kvfs.errors import KvfsError, Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import (
    Bytes,
    Code,
    Done,
    Hello,
    Lookup,
    Refusal,
    Reply,
    Request,
    Sizes,
    Tickets,
    TicketsWanted,
    Welcome,
    decode_request,
    encode,
)
from scripts.peer_rig import SERVER_ID, DirectorySource, PeerProcess
from tests.peers import (
    DEADLINE_S,
    QUICK,
    asking,
    is_settled,
    kernel_threads,
    make_keys,
    open_descriptors,
    read_whole,
    receive_exactly,
    serving,
)
from tests.processes import wait_until

ABSENT = b"a" * 16
DIGEST = b"d" * 16
TICKET = b"t" * 32
HEADER = struct.Struct("<4sB3xQ")


def _refused_s(call: Callable[[], object], match: str | None = None) -> float:
    """How long a call takes that must raise `Unavailable`."""
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match=match):
        call()
    return time.monotonic() - begin_s


@pytest.fixture
def frozen_at_the_end() -> Iterator[list[PeerProcess]]:
    """Processes that are killed at the end, frozen or not."""
    started: list[PeerProcess] = []
    yield started
    for process in started:
        process.kill()


# Processes that die or freeze ---------------------------------------------------------------------
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_peer_killed_in_the_middle_of_a_read_costs_one_error(
    tmp_path: Path, encrypted: bool, frozen_at_the_end: list[PeerProcess]
) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    (tmp_path / "known").write_text(f"{client_keys.pair.public} client\n")
    source = DirectorySource(tmp_path)
    size = 512 * MIB
    with open(tmp_path / DIGEST.hex(), "wb") as file:
        file.truncate(size)
    words = ["--pair", str(tmp_path / "server.pair"), "--known", str(tmp_path / "known")]
    peer = PeerProcess(tmp_path, words)
    frozen_at_the_end.append(peer)
    small = source.add(b"abc")
    buffer = memoryview(bytearray(size))
    buffer[0] = buffer[-1] = 0xFF
    errors: list[KvfsError] = []

    def read() -> None:
        try:
            client.read_into(DIGEST, 0, buffer, 60)
        except KvfsError as error:
            errors.append(error)

    key = server_keys.pair.public
    with asking(peer.port, client_keys, key, encrypt_bulk=encrypted) as client:
        assert read_whole(client, small, 3) == b"abc"
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: buffer[0] == 0)
        peer.freeze()  # so that it does not finish first
        begin_s = time.monotonic()
        peer.kill()
        reader.join(20)
        assert not reader.is_alive() and time.monotonic() - begin_s < 10
        assert buffer[-1] == 0xFF and len(errors) == 1 and isinstance(errors[0], Unavailable)
        assert _refused_s(lambda: client.sizes([small], 5)) < 2


@pytest.mark.parametrize("deadline_s", [0.3, 30.0], ids=["short", "long"])
def test_a_frozen_peer_costs_one_error_in_time_and_is_back_when_it_thaws(
    tmp_path: Path, deadline_s: float, frozen_at_the_end: list[PeerProcess]
) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    peer = PeerProcess(tmp_path)
    frozen_at_the_end.append(peer)
    limits = replace(QUICK, backoff_s_min=0.5, backoff_s_max=0.5)
    with asking(peer.port, limits=limits) as client:
        assert read_whole(client, digest, 1000) == bytes(1000)
        peer.freeze()
        # The deadline, or what the peer may take to move anything.
        assert _refused_s(lambda: client.sizes([digest], deadline_s)) < 5
        for _ in range(5):
            spent_s = _refused_s(lambda: client.sizes([digest], deadline_s), "did not answer")
            assert spent_s < 0.2
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(digest, 0, buffer, deadline_s)) < 5
        peer.thaw()
        wait_until(lambda: _serves(client, digest))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_who_has_others_to_ask_leaves_a_frozen_peer_sooner(
    tmp_path: Path, encrypted: bool, frozen_at_the_end: list[PeerProcess]
) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    (tmp_path / "known").write_text(f"{client_keys.pair.public} client\n")
    digest = DirectorySource(tmp_path).add(bytes(1000))
    words = ["--pair", str(tmp_path / "server.pair"), "--known", str(tmp_path / "known")]
    peer = PeerProcess(tmp_path, words)
    frozen_at_the_end.append(peer)
    limits = replace(QUICK, progress_s=60)
    key = server_keys.pair.public
    with asking(peer.port, client_keys, key, encrypt_bulk=encrypted, limits=limits) as client:
        assert read_whole(client, digest, 1000) == bytes(1000)
        peer.freeze()
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(digest, 0, buffer, 60, silence_s=0.3)) < 5


def _serves(client: PeerClient, digest: bytes) -> bool:
    try:
        return read_whole(client, digest, 1000) == bytes(1000)
    except Unavailable:
        return False


def test_a_dead_peer_is_refused_at_once_and_asked_ever_more_seldom() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    descriptors, threads = open_descriptors(), kernel_threads()
    with asking(port, limits=replace(QUICK, backoff_s_min=0.2, backoff_s_max=5)) as client:
        assert _refused_s(lambda: client.health(10), "cannot be reached") < 5
        assert _refused_s(lambda: client.health(10), "is asked again in 0.") < 0.2
        wait_until(lambda: _message(client) == "cannot be reached")
        assert _refused_s(lambda: client.health(10), "is asked again in 0.[34]") < 0.2
    assert is_settled(open_descriptors, descriptors)
    assert is_settled(kernel_threads, threads)


def _message(client: PeerClient) -> str:
    try:
        client.health(10)
    except Unavailable as error:
        return str(error).partition(": ")[2]
    return ""


# Peers that lie -----------------------------------------------------------------------------------
Script = Callable[[int, Request], "list[bytes] | Reply | None"]


class ScriptedPeer:
    """A peer's channel; `script` answers all but the greeting with a reply, parts, or nothing."""

    def __init__(self, script: Script, bulk_port: int = 1) -> None:
        self.requests: list[Request] = []
        self._script = script
        self._bulk_port = bulk_port
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(20)
        self._socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            route, body = self._socket.recv_multipart()
            number, request = decode_request(body)
            if isinstance(request, Hello):
                answer: list[bytes] | Reply | None = self._greet(request)
            else:
                self.requests.append(request)
                answer = self._script(number, request)
            if answer is None:
                continue
            parts = answer if isinstance(answer, list) else [encode(number, answer)]
            self._socket.send_multipart([route, *parts])

    def _greet(self, hello: Hello) -> Reply:
        return Welcome(SERVER_ID, hello.nonce, "", self._bulk_port)


@contextmanager
def scripted(script: Script, bulk_port: int = 1) -> Iterator[ScriptedPeer]:
    peer = ScriptedPeer(script, bulk_port)
    try:
        yield peer
    finally:
        peer.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([b"\xc1"], id="no message"),
        pytest.param([encode(1, Sizes((1,)))], id="of another request"),
        pytest.param([encode(2, Sizes((1, 2)))], id="too many sizes"),
        pytest.param([encode(2, Done())], id="of another kind"),
        pytest.param([encode(2, Bytes(None))], id="bytes"),
        pytest.param([encode(2, Sizes((1,))), b"more"], id="a part too many"),
        pytest.param([encode(2, Bytes(3)), b"abc"], id="bytes that nobody wants"),
        pytest.param([b""], id="nothing"),
        pytest.param([encode(0, Refusal(Code.INVALID, "no"))], id="a refusal of nothing"),
    ],
)
def test_an_answer_that_is_none_is_unavailable(answer: list[bytes]) -> None:
    with (
        scripted(lambda number, request: answer) as peer,
        asking(peer.port, limits=replace(QUICK, backoff_s_min=5)) as client,
    ):
        assert _refused_s(lambda: client.sizes([ABSENT], 10)) < 5
        assert _refused_s(lambda: client.sizes([ABSENT], 10), "did not answer") < 0.2


def test_a_peer_that_says_nothing_is_unavailable_in_time() -> None:
    with scripted(lambda number, request: None) as peer, asking(peer.port, limits=QUICK) as client:
        assert _refused_s(lambda: client.sizes([ABSENT], 0.3), "no answer") < 3
        time.sleep(QUICK.backoff_s_max)
        assert _refused_s(lambda: client.sizes([ABSENT], 30), "no answer") < 5


def test_a_host_that_accepts_and_says_nothing_is_unavailable_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with asking(port, limits=QUICK) as client:
            assert _refused_s(lambda: client.sizes([ABSENT], 0.3)) < 3
            time.sleep(QUICK.backoff_s_max)
            assert _refused_s(lambda: client.sizes([ABSENT], 30)) < 5


def test_closing_ends_calls_that_wait_in_other_threads() -> None:
    descriptors, threads = open_descriptors(), kernel_threads()
    errors: list[KvfsError] = []

    def ask() -> None:
        try:
            client.sizes([ABSENT], 60)
        except Unavailable as error:
            errors.append(error)

    with scripted(lambda number, request: None) as peer:
        with asking(peer.port, limits=replace(PeerLimits(), progress_s=60)) as client:
            asked = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asked:
                thread.start()
            wait_until(lambda: len(peer.requests) == 3)
            begin_s = time.monotonic()
            client.close()
            assert time.monotonic() - begin_s < 3
        for thread in asked:
            thread.join(10)
        assert ["the client is closed" in str(error) for error in errors] == [True] * 3
    assert is_settled(open_descriptors, descriptors)
    assert is_settled(kernel_threads, threads)


# Bulk streams that lie ----------------------------------------------------------------------------
@contextmanager
def scripted_bulk(connections: list[list[bytes]], *, hang_up: bool = True) -> Iterator[int]:
    """A bulk listener; its port. For each connection what it says to one ticket after the other; at
    the end it hangs up, or says nothing. More connections than scripts get the last one."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve(connection: socket.socket, script: list[bytes]) -> None:
            connection.settimeout(DEADLINE_S)
            try:
                for said in script:
                    receive_exactly(connection, 32)
                    connection.sendall(said)
            except (AssertionError, OSError):  # the client has gone
                return
            if hang_up:
                connection.close()

        def accept() -> None:
            with ExitStack() as stack:
                accepted = 0
                while not ended.is_set():
                    try:
                        connection = stack.enter_context(listener.accept()[0])
                    except TimeoutError:
                        continue
                    script = connections[min(accepted, len(connections) - 1)]
                    accepted += 1
                    thread = threading.Thread(target=serve, args=(connection, script))
                    thread.start()
                    stack.callback(thread.join, 20)
                    stack.callback(_shut, connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(20)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed
        pass


WHOLE = HEADER.pack(b"KVB1", 0, 1000) + b"w" * 1000
HALF = HEADER.pack(b"KVB1", 0, 1000) + bytes(500)
NO_TICKET = HEADER.pack(b"KVB1", 2, 0)


def _give_ticket(number: int, request: Request) -> Reply:
    match request:
        case TicketsWanted(ranges):
            return Tickets((TICKET,) * len(ranges))
        case Lookup(digests):
            return Sizes((5,) * len(digests))
    return Done()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEADER.pack(b"KVB1", 0, 1000)[:7], id="half a header"),
        pytest.param(HEADER.pack(b"HTTP", 0, 1000), id="no header of ours"),
        pytest.param(HEADER.pack(b"KVB1", 9, 1000), id="an unknown status"),
        pytest.param(HEADER.pack(b"KVB1", 0, 999) + bytes(999), id="another length"),
        pytest.param(HEADER.pack(b"KVB1", 1, 1000), id="a length of nothing"),
        pytest.param(HEADER.pack(b"KVB1", 0, 1000) + bytes(500), id="half the bytes"),
        pytest.param(HEADER.pack(b"KVB1", 2, 0), id="that the ticket is none"),
    ],
)
@pytest.mark.parametrize("hang_up", [True, False], ids=["and hangs up", "and stalls"])
def test_a_stream_that_does_not_hold_what_it_must_is_unavailable(
    said: bytes, hang_up: bool
) -> None:
    descriptors = open_descriptors()
    with (
        scripted_bulk([[said]], hang_up=hang_up) as bulk_port,
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30)) < 10
        time.sleep(QUICK.backoff_s_max)
        assert client.sizes([DIGEST], DEADLINE_S) == [5]
    assert is_settled(open_descriptors, descriptors)


def test_a_stream_that_stalls_keeps_to_a_short_deadline() -> None:
    with (
        scripted_bulk([[HALF]], hang_up=False) as bulk_port,
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port, limits=replace(QUICK, progress_s=20)) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(DIGEST, 0, buffer, 0.3)) < 5


@pytest.mark.parametrize(
    "connections",
    [
        pytest.param([[WHOLE], [WHOLE]], id="kept, and hung up on when it is used"),
        pytest.param([[WHOLE, HALF], [WHOLE]], id="kept, and breaks off"),
        pytest.param([[WHOLE, NO_TICKET], [WHOLE]], id="kept, and the ticket has expired"),
        pytest.param([[WHOLE, HEADER.pack(b"HTTP", 0, 0)], [WHOLE]], id="kept, and is garbled"),
    ],
)
def test_a_kept_stream_that_fails_is_replaced_once(connections: list[list[bytes]]) -> None:
    with (
        scripted_bulk(connections) as bulk_port,
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port) as client,
    ):
        for _ in range(2):
            assert read_whole(client, DIGEST, 1000) == b"w" * 1000


def test_a_ticket_that_has_expired_is_asked_for_once_more() -> None:
    with (
        scripted_bulk([[NO_TICKET], [WHOLE], [NO_TICKET]]) as bulk_port,
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        assert read_whole(client, DIGEST, 1000) == b"w" * 1000
        asked = len(peer.requests)
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30), "take the ticket") < 5
        assert len(peer.requests) == asked + 2


def test_a_bulk_listener_that_is_not_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bulk_port = listener.getsockname()[1]
    with (
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert _refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30), "bulk stream") < 5


def test_closing_ends_a_read_that_waits_in_another_thread() -> None:
    errors: list[KvfsError] = []
    buffer = memoryview(bytearray(b"x" * 1000))

    def read() -> None:
        try:
            client.read_into(DIGEST, 0, buffer, 60)
        except Unavailable as error:
            errors.append(error)

    with (
        scripted_bulk([[HALF]], hang_up=False) as bulk_port,
        scripted(_give_ticket, bulk_port) as peer,
        asking(peer.port, limits=replace(QUICK, progress_s=60)) as client,
    ):
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: buffer[0] == 0)
        client.close()
        reader.join(10)
        assert not reader.is_alive()
        assert len(errors) == 1 and "closed" in str(errors[0])


@pytest.mark.parametrize(
    "payload",
    [[], [b"short"], [bytes(999)], [bytes(2000)], [bytes(1000), b"more"]],
    ids=["missing", "short", "a byte too short", "long", "and more"],
)
def test_bytes_inside_the_channel_that_do_not_fit_are_unavailable(
    tmp_path: Path, payload: list[bytes]
) -> None:
    """As the encrypted way does, here without keys so that the peer can be scripted."""

    def answer(number: int, request: Request) -> list[bytes]:
        return [encode(number, Bytes(1000)), *payload]

    with scripted(answer) as peer, asking(peer.port, limits=QUICK) as client:
        client._encrypts_bulk = True
        guarded = bytearray(b"x" * 1020)
        buffer = memoryview(guarded)[10:1010]
        assert _refused_s(lambda: client.read_into(DIGEST, 0, buffer, 10)) < 5
        assert guarded[:10] == guarded[-10:] == b"x" * 10


def test_too_few_descriptors_are_an_error_and_pass(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    peer = PeerProcess(tmp_path)  # in another process, which has enough
    try:
        with asking(peer.port, limits=QUICK) as client:
            assert _serves(client, digest)
            client._channels.drop_idle()
            client._streams.drop_idle()
            before = open_descriptors()
            held = []
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, limits[1]))
            try:
                for spare in range(12):  # at each step of making a channel and a stream
                    while _can_open(held):
                        pass
                    for fd in held[:spare]:
                        os.close(fd)
                    del held[:spare]
                    try:
                        client.read_into(digest, 0, memoryview(bytearray(1000)), 10)
                    except Unavailable:
                        time.sleep(QUICK.backoff_s_max)
                    client._channels.drop_idle()
                    client._streams.drop_idle()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for fd in held:
                    os.close(fd)
            wait_until(lambda: _serves(client, digest))
    finally:
        peer.kill()


def _can_open(held: list[int]) -> bool:
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def test_a_deadline_that_has_passed_already_is_an_error_and_no_more(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    with serving(source) as server, asking(server.port) as client:
        for deadline_s in (0.0, -1.0):
            with pytest.raises(Unavailable):
                client.read_into(digest, 0, memoryview(bytearray(1000)), deadline_s)
        wait_until(lambda: _serves(client, digest))
