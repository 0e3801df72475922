"""A client whose peer lies, on its channel or on bulk streams: one error in time, no leak."""

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.errors import KvfsError, Unavailable
from kvfs.peers.messages import (
    Bytes,
    Code,
    Done,
    Lookup,
    Refusal,
    Reply,
    Request,
    Sizes,
    Tickets,
    TicketsWanted,
    encode,
)
from tests.peers import (
    DEADLINE_S,
    HEADER,
    QUICK,
    asking,
    is_settled,
    open_descriptors,
    read_whole,
    refused_s,
)
from tests.processes import wait_until
from tests.scripted_peers import scripted, scripted_bulk

ABSENT = b"a" * 16
DIGEST = b"d" * 16
TICKET = b"t" * 32
WHOLE = HEADER.pack(b"KVB1", 0, 1000) + b"w" * 1000
HALF = HEADER.pack(b"KVB1", 0, 1000) + bytes(500)
NO_TICKET = HEADER.pack(b"KVB1", 2, 0)


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
        assert refused_s(lambda: client.sizes([ABSENT], 10)) < 5
        assert refused_s(lambda: client.sizes([ABSENT], 10), "did not answer") < 0.2


def test_a_peer_that_says_nothing_is_unavailable_in_time() -> None:
    with scripted(lambda number, request: None) as peer, asking(peer.port, limits=QUICK) as client:
        assert refused_s(lambda: client.sizes([ABSENT], 0.3), "no answer") < 3
        time.sleep(QUICK.backoff_s_max)
        assert refused_s(lambda: client.sizes([ABSENT], 30), "no answer") < 5


def give_ticket(number: int, request: Request) -> Reply:
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
        scripted(give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30)) < 10
        time.sleep(QUICK.backoff_s_max)
        assert client.sizes([DIGEST], DEADLINE_S) == [5]
    assert is_settled(open_descriptors, descriptors)


def test_a_stream_that_stalls_keeps_to_a_short_deadline() -> None:
    with (
        scripted_bulk([[HALF]], hang_up=False) as bulk_port,
        scripted(give_ticket, bulk_port) as peer,
        asking(peer.port, limits=replace(QUICK, progress_s=20)) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(DIGEST, 0, buffer, 0.3)) < 5


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
        scripted(give_ticket, bulk_port) as peer,
        asking(peer.port) as client,
    ):
        for _ in range(2):
            assert read_whole(client, DIGEST, 1000) == b"w" * 1000


def test_a_ticket_that_has_expired_is_asked_for_once_more() -> None:
    with (
        scripted_bulk([[NO_TICKET], [WHOLE], [NO_TICKET]]) as bulk_port,
        scripted(give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        assert read_whole(client, DIGEST, 1000) == b"w" * 1000
        asked = len(peer.requests)
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30), "take the ticket") < 5
        assert len(peer.requests) == asked + 2


def test_a_bulk_listener_that_is_not_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bulk_port = listener.getsockname()[1]
    with (
        scripted(give_ticket, bulk_port) as peer,
        asking(peer.port, limits=QUICK) as client,
    ):
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(DIGEST, 0, buffer, 30), "bulk stream") < 5


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
        scripted(give_ticket, bulk_port) as peer,
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
        assert refused_s(lambda: client.read_into(DIGEST, 0, buffer, 10)) < 5
        assert guarded[:10] == guarded[-10:] == b"x" * 10
