"""The codec between nodes: every message comes back as it went; what breaks a rule is refused."""

import math
import struct
from typing import Any

import msgpack
import pytest

from kvfs.config import PEER_BATCH_ITEMS_MAX, PEER_FRAME_BYTES_MAX, PEER_READ_BYTES_MAX
from kvfs.errors import InvalidInput
from kvfs.peers.messages import (
    PEER_PROTOCOL,
    Bytes,
    Code,
    Done,
    Health,
    HealthWanted,
    Hello,
    Hints,
    Lookup,
    Range,
    Read,
    Refusal,
    Reply,
    Request,
    Sizes,
    Tickets,
    TicketsWanted,
    Welcome,
    decode_reply,
    decode_request,
    encode,
    shortened,
)

DIGEST = b"d" * 16
TICKET = b"t" * 32
NODE, NONCE = b"n" * 16, b"o" * 16
HELLO = Hello(PEER_PROTOCOL, "cluster é", NODE, NONCE)
LARGEST = 2**63 - 1

REQUESTS: list[Request] = [
    HELLO,
    Lookup((DIGEST, bytes(16))),
    Lookup((DIGEST,) * PEER_BATCH_ITEMS_MAX),
    TicketsWanted((Range(DIGEST, 0, 1), Range(bytes(16), 2**62, 2**40))),
    Read(DIGEST, 7, PEER_READ_BYTES_MAX),
    Hints((DIGEST,)),
    Hints((DIGEST,), 1),
    HealthWanted(),
]
REPLIES: list[Reply] = [
    Welcome(NODE, NONCE, "", 1),
    Welcome(NODE, NONCE, "::1", 65_535),
    Sizes((None, 0, LARGEST)),
    Sizes((None,) * PEER_BATCH_ITEMS_MAX),
    Tickets((TICKET, None)),
    Bytes(PEER_READ_BYTES_MAX),
    Bytes(None),
    Done(),
    Health(5, 0.25, 1e9),
    Refusal(Code.REPLAY, "no"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda item: type(item).__name__)
def test_requests_come_back_as_they_went(request_: Request) -> None:
    assert decode_request(encode(LARGEST, request_)) == (LARGEST, request_)


@pytest.mark.parametrize("reply", REPLIES, ids=lambda item: type(item).__name__)
def test_replies_come_back_as_they_went(reply: Reply) -> None:
    assert decode_reply(encode(3, reply)) == (3, reply)


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda item: type(item).__name__)
def test_the_largest_messages_fit_a_frame(message: Request | Reply) -> None:
    assert len(encode(LARGEST, message)) < PEER_FRAME_BYTES_MAX


def test_a_request_is_no_reply_and_a_reply_no_request() -> None:
    with pytest.raises(InvalidInput, match="2 is no kind"):
        decode_reply(encode(1, REQUESTS[1]))
    with pytest.raises(InvalidInput, match="66 is no kind"):
        decode_request(encode(1, REPLIES[2]))


def test_only_a_refusal_may_answer_no_request() -> None:
    refusal = Refusal(Code.INVALID, "is no message")
    assert decode_reply(encode(0, refusal)) == (0, refusal)
    with pytest.raises(InvalidInput, match="0 is no number"):
        decode_reply(encode(0, Done()))
    with pytest.raises(InvalidInput, match="0 is no number"):
        decode_request(encode(0, HELLO))


@pytest.mark.parametrize(
    "message",
    [
        Lookup(()),
        Lookup((DIGEST,) * (PEER_BATCH_ITEMS_MAX + 1)),
        Lookup((DIGEST + b"x",)),
        TicketsWanted((Range(DIGEST, -1, 1),)),
        TicketsWanted((Range(DIGEST, 0, 0),)),
        TicketsWanted((Range(DIGEST, LARGEST, 1),)),
        TicketsWanted((Range(b"short", 0, 1),)),
        Read(DIGEST, 0, PEER_READ_BYTES_MAX + 1),
        Read(DIGEST, True, 1),
        Hello(PEER_PROTOCOL, "x" * 256, NODE, NONCE),
        Hello(PEER_PROTOCOL, "\ud800", NODE, NONCE),
        Hello(PEER_PROTOCOL, "two\nlines", NODE, NONCE),
        Hello(PEER_PROTOCOL, "", NODE + b"x", NONCE),
        Hello(-1, "", NODE, NONCE),
        Sizes((-1,)),
        Bytes(-1),
        Bytes(0),
        Bytes(PEER_READ_BYTES_MAX + 1),
        Tickets((bytes(32),)),
        Tickets((b"short",)),
        Health(-1, 0.0, 0.0),
        Health(0, math.nan, 0.0),
        Health(0, 0.0, -1.0),
        Welcome(NODE, NONCE, "", 0),
        Refusal(Code.FAILED, "x" * 1025),
    ],
    ids=repr,
)
def test_what_no_node_accepts_is_refused_where_it_is_made(message: Request | Reply) -> None:
    with pytest.raises(InvalidInput):
        encode(1, message)


def _packed(*values: Any) -> bytes:
    return bytes(msgpack.packb(list(values)))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(b"\x80", id="an empty map"),
        pytest.param(b"\x81\x01\x02", id="a map"),
        pytest.param(_packed(), id="an empty list"),
        pytest.param(_packed(6), id="no number"),
        pytest.param(_packed(6, 0), id="number zero"),
        pytest.param(_packed(6, -1), id="a negative number"),
        pytest.param(_packed(6, 2**63), id="a number too large"),
        pytest.param(_packed(6, True), id="a bool as the number"),
        pytest.param(_packed(True, 1), id="a bool as the kind"),
        pytest.param(_packed(6.0, 1), id="a real as the kind"),
        pytest.param(_packed(0, 1), id="kind zero"),
        pytest.param(_packed(99, 1), id="an unknown kind"),
        pytest.param(_packed(6, 1, None), id="a field too many"),
        pytest.param(_packed(2, 1), id="a field too few"),
        pytest.param(_packed(2, 1, "d" * 16), id="text for bytes"),
        pytest.param(_packed(2, 1, b""), id="no digests"),
        pytest.param(_packed(2, 1, b"d" * 17), id="a digest and a part of one"),
        pytest.param(_packed(2, 1, [DIGEST]), id="a list in a list"),
        pytest.param(_packed(2, 1, {}), id="a map in a list"),
        pytest.param(_packed(2, 1, DIGEST * 4097), id="too many digests"),
        pytest.param(_packed(3, 1, DIGEST + struct.pack("<QQ", 0, 0)), id="an empty range"),
        pytest.param(_packed(3, 1, DIGEST + struct.pack("<QQ", 2**64 - 1, 1)), id="a far range"),
        pytest.param(_packed(3, 1, DIGEST + struct.pack("<QQ", 2**62, 2**62)), id="a long range"),
        pytest.param(_packed(4, 1, DIGEST, 0, 2**20), id="a long read"),
        pytest.param(_packed(4, 1, DIGEST, LARGEST, 1), id="a far read"),
        pytest.param(_packed(4, 1, DIGEST, 0, True), id="a bool as a length"),
        pytest.param(_packed(1, 1, 1, b"text", NODE, NONCE), id="bytes for text"),
        pytest.param(b"\x96\x01\x01\x01\xa1\xff" + _packed(NODE, NONCE)[1:], id="no UTF-8"),
        pytest.param(_packed(1, 1, 1, "a\x00b", NODE, NONCE), id="what cannot be printed"),
        pytest.param(_packed(6, 1) + b"\x00", id="something behind it"),
        pytest.param(_packed(*range(9)), id="a list too long"),
        pytest.param(b"\x91" * 5000 + b"\x90", id="lists in lists in lists"),
        pytest.param(b"\x98" * 100_000, id="lists that never end"),
        pytest.param(b"\x92\xd4\x01\x00\x01", id="an extension"),
        pytest.param(b"\x92\xd6\xff\x00\x00\x00\x00\x01", id="a time"),
        pytest.param(b"\x93\x02\x01\xc6\xff\xff\xff\xff", id="bytes that are announced only"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="items that are announced only"),
        pytest.param(_packed(2, 1, bytes(PEER_FRAME_BYTES_MAX)), id="more than a frame"),
    ],
)
def test_a_body_that_breaks_a_rule_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_request(body)
    assert caught.value.reason
    with pytest.raises(InvalidInput):
        decode_reply(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (_packed(*[[*range(8)]] * 8), "a list in a list"),
        (_packed(6, 1, {}), "maps or extensions"),
        (_packed(6, 1, msgpack.Timestamp(1, 1)), "ext_len"),
        (_packed(*range(9)), "array_len"),
    ],
)
def test_what_no_message_has_is_refused_before_it_grows(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        decode_request(body)


@pytest.mark.parametrize(
    "body",
    [
        _packed(66, 1, struct.pack("<q", -2)),
        _packed(67, 1, bytes(31)),
        _packed(68, 1, -2),
        _packed(68, 1, 0),
        _packed(68, 1, PEER_READ_BYTES_MAX + 1),
        _packed(70, 1, 1, math.inf, 0.0),
        _packed(70, 1, 1, 0, 0.0),
        _packed(71, 1, 99, "no"),
        _packed(65, 1, NODE, NONCE, "", 65_536),
    ],
)
def test_a_reply_that_breaks_a_rule_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_reply(body)


@pytest.mark.parametrize("text", ["short", "é" * 5000, "\ud800\n" * 3, "x" * 1023 + "é"])
def test_any_text_can_be_made_to_fit_a_refusal(text: str) -> None:
    refusal = Refusal(Code.FAILED, shortened(text))
    assert decode_reply(encode(1, refusal)) == (1, refusal)
    assert refusal.text[:5] == text[:5] or "?" in refusal.text
