"""Any bytes are a message between nodes or one `InvalidInput`; what is one comes back the same."""

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from kvfs.config import PEER_READ_BYTES_MAX
from kvfs.errors import InvalidInput
from kvfs.peers.messages import (
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
)

ids = st.binary(min_size=16, max_size=16)
texts = st.text(st.characters(categories=["L", "N", "P"]), max_size=60)
digests = st.lists(ids, min_size=1, max_size=40).map(tuple)
lengths = st.integers(1, PEER_READ_BYTES_MAX)
ranges = st.builds(Range, ids, st.integers(0, 2**62), st.integers(1, 2**61))
reals = st.floats(0, allow_nan=False, allow_infinity=False)
sizes = st.lists(st.none() | st.integers(0, 2**63 - 1), min_size=1, max_size=40).map(tuple)
tickets = st.none() | st.binary(min_size=32, max_size=32).filter(any)

requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(Hello, st.integers(0, 2**16), texts, ids, ids),
    st.builds(Lookup, digests),
    st.builds(TicketsWanted, st.lists(ranges, min_size=1, max_size=40).map(tuple)),
    st.builds(Read, ids, st.integers(0, 2**62), lengths),
    st.builds(Hints, digests),
    st.just(HealthWanted()),
)
replies: st.SearchStrategy[Reply] = st.one_of(
    st.builds(Welcome, ids, ids, texts, st.integers(1, 65_535)),
    st.builds(Sizes, sizes),
    st.builds(Tickets, st.lists(tickets, min_size=1, max_size=40).map(tuple)),
    st.builds(Bytes, st.none() | lengths),
    st.just(Done()),
    st.builds(Health, st.integers(0, 2**63 - 1), reals, reals),
    st.builds(Refusal, st.sampled_from(Code), texts),
)
numbers = st.integers(1, 2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.binary(max_size=80) | st.text(max_size=80),
    lambda below: st.lists(below, max_size=8) | st.dictionaries(st.text(max_size=3), below),
    max_leaves=20,
)  # fmt: skip


def _decode_both(body: bytes) -> None:
    """Decode bytes as either; what is accepted must come back the same when it is encoded."""
    for decode in (decode_request, decode_reply):
        try:
            number, message = decode(body)
        except InvalidInput as error:
            assert error.subject and error.reason
        else:
            assert decode(encode(number, message)) == (number, message)


@given(numbers, requests)
def test_every_request_reads_back(number: int, request: Request) -> None:
    assert decode_request(encode(number, request)) == (number, request)


@given(numbers, replies)
def test_every_reply_reads_back(number: int, reply: Reply) -> None:
    assert decode_reply(encode(number, reply)) == (number, reply)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    _decode_both(body)


@given(values)
def test_any_msgpack_is_a_message_or_refused(value: object) -> None:
    _decode_both(msgpack.packb(value, unicode_errors="surrogatepass"))


@given(numbers, requests | replies, st.data())
def test_a_message_with_changed_bytes_is_another_or_refused(
    number: int, message: Request | Reply, data: st.DataObject
) -> None:
    body = bytearray(encode(number, message))
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(body) - 1))
        body[index] = data.draw(st.integers(0, 255))
    _decode_both(bytes(body[: data.draw(st.integers(0, len(body)))]))
    _decode_both(bytes(body))
