"""The codec: every message comes back as it went, and what breaks a rule is refused in words."""

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.config import BATCH_ITEMS_MAX, FRAME_BYTES_MAX, STAGES_PER_CLIENT_MAX
from kvfs.errors import Corrupt, InvalidInput, KvfsError, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys
from kvfs.replicate import Holder, HolderState
from kvfs.wire import (
    FrameDecoder,
    Reply,
    Request,
    check_batch,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    pack_chunk_entry,
    pack_chunk_keys,
    pack_entry,
    pack_holder,
    unpack_chunk_entry,
    unpack_chunk_keys,
    unpack_entry,
    unpack_holder,
    unpack_record,
    unpack_request,
)

INODE = Inode(7, 0o100644, 1, 2, 1, 5, 10, 20, 30, 0, b"d" * 16, b"", 40, True)
CHUNK = ChunkInfo(b"ab-g0-s0", b"", 0, 256, 0, 0, b"12345678")


def _through(frame: bytes, step: int) -> list[object]:
    decoder = FrameDecoder()
    values: list[object] = []
    for start in range(0, len(frame), step):
        values += decoder.feed(frame[start : start + step])
    return values


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_survive_any_cut_of_the_stream(step: int) -> None:
    first = Request(1, "sizes", [[b"kv/a", b"\xff\n"]])
    second = Request(2, "status", [])
    values = _through(encode_request(first) + encode_request(second), step)
    assert [decode_request(value) for value in values] == [first, second]


def test_reply_carries_its_result_and_descriptor_count() -> None:
    reply = Reply(3, [[5, b"d"], None], 1)
    assert [decode_reply(v) for v in _through(encode_reply(reply), 9)] == [reply]


@pytest.mark.parametrize(
    "error",
    [
        NamespaceError(2, b"kv/\xff"),
        NamespaceError(2, "kv/\udcff"),
        InvalidInput("size", "is negative"),
        Corrupt("ab", "changed"),
        OutOfSpace("full"),
        Unavailable("away"),
        KvfsError("else"),
    ],
)
def test_refusals_come_back_as_the_same_error(error: KvfsError) -> None:
    (value,) = _through(encode_reply(Reply(4, None, 0, error)), 1000)
    decoded = decode_reply(value).error
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)


def test_a_refusal_fits_a_frame_whatever_was_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_batch(["\0" * FRAME_BYTES_MAX], bytes, 1, "paths")
    assert len(encode_reply(Reply(1, None, 0, caught.value))) < 1000


def test_records_come_back_equal() -> None:
    entry = Entry(b"name\xfe", INODE)
    assert unpack_entry(msgpack.unpackb(msgpack.packb(pack_entry(entry)))) == entry
    chunk = ChunkEntry(CHUNK, INODE)
    assert unpack_chunk_entry(msgpack.unpackb(msgpack.packb(pack_chunk_entry(chunk)))) == chunk


def test_keys_come_back_equal() -> None:
    keys = ChunkKeys(b"hash" * 3, 4, ((0, 0), (1, 3)))
    assert unpack_chunk_keys(msgpack.unpackb(msgpack.packb(pack_chunk_keys(keys)))) == keys


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b"abc", 2, [[0, 0]]],
        [b"abc", 0, [[0, 0]]],
        [b"abc", -3, [[0, 0]]],
        [b"x" * 65, 65, [[0, 0]]],
        ["abc", 3, [[0, 0]]],
        [b"abc", 3, [[0, 0, 0]]],
        [b"abc", 3, [[0, True]]],
        [b"abc", 3, [0]],
        [b"abc", 3, [[0, -1]]],
        [b"abc", 3, [[65_536, 0]]],
        [b"abc", 3, [[0, 0]] * 5000],
    ],
)
def test_keys_that_are_none_are_refused(values: object) -> None:
    with pytest.raises(InvalidInput):
        unpack_chunk_keys(values)


@pytest.mark.parametrize(
    "values", [[], [b"d", 1, 2], [b"d", 1, 2, "x", 3], [b"d", True, 2, 0, 3], 5]
)
def test_a_record_of_wrong_shape_is_refused(values: object) -> None:
    with pytest.raises(InvalidInput):
        unpack_record(Blob, values)


@pytest.mark.parametrize("state", HolderState)
def test_a_holder_comes_back_in_its_state(state: HolderState) -> None:
    holder = Holder(b"n" * 16, state, "host", "host:1", "/store", is_this=True)
    packed = msgpack.unpackb(msgpack.packb(pack_holder(holder)))
    assert unpack_holder(packed) == holder
    for number, wrong in [(0, "n"), (1, "elsewhere"), (1, 0), (4, b"/store"), (5, 1)]:
        with pytest.raises(InvalidInput, match="holder"):
            unpack_holder([*packed[:number], wrong, *packed[number + 1 :]])
    with pytest.raises(InvalidInput, match="holder"):
        unpack_holder(packed[:5])


def test_an_announced_giant_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidInput, match="limit"):
        list(FrameDecoder().feed(struct.pack("<I", FRAME_BYTES_MAX + 1)))


def test_a_request_too_large_for_a_frame_is_refused_where_it_is_made() -> None:
    with pytest.raises(InvalidInput, match="fit a frame"):
        encode_request(Request(1, "sizes", [[b"x" * (FRAME_BYTES_MAX + 1)]]))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xdd\x00\x10\x00\x00" + b"\x80" * 2**20, id="a million empty maps"),
        pytest.param(b"\x93\x01\xa1x\x91\x80", id="one empty map"),
        pytest.param(b"\x93\x01\xa1x\x91\x81\x01\x02", id="a map"),
        pytest.param(b"\xdc\x20\x00" + (b"\x93\x90\x90\x90" * 2**13), id="empty lists"),
        pytest.param(b"\xdc\xff\xff" + bytes(2**16 - 1), id="a long list"),
        pytest.param(b"\xdc\x08\x00" + (b"\xdc\x01\x00" + bytes(256)) * 2048, id="many numbers"),
        pytest.param(b"\xdc\x08\x00" + (b"\xdc\x01\x00" + b"\xa0" * 256) * 2048, id="many texts"),
        pytest.param(b"\x91\xd4\x01\x00", id="an extension"),
        pytest.param(b"\x91\xc7\x00\x01", id="an empty extension"),
        pytest.param(b"\x91\xd6\xff\x00\x00\x00\x00", id="a time"),
        pytest.param(b"\x93\x01\xda\x20\x00" + b"x" * 8192 + b"\x90", id="a long operation"),
        pytest.param(b"\xdc\x40\x00" + b"\xc5\x01\x00" + bytes(2**20), id="ends early"),
    ],
)
def test_a_frame_of_more_objects_than_a_request_has_is_refused_before_they_are_made(
    body: bytes,
) -> None:
    with pytest.raises(InvalidInput):
        unpack_request(body)


@pytest.mark.parametrize("path_bytes", [1, 140, 3000])
def test_the_largest_batches_are_no_such_frame(path_bytes: int) -> None:
    path = b"p" * path_bytes
    chunk = [b"k" * 200, b"p" * 200, 0, 2**63, 65_535, 65_535, b"t" * 8]
    file = [2**48, path, b"d" * 16, 2**30, chunk]
    for request in (
        Request(1, "sizes", [[path] * BATCH_ITEMS_MAX]),
        Request(2**31, "publish", [[file] * STAGES_PER_CLIENT_MAX]),
        Request(3, "stage", [[2**30] * 200]),
        Request(4, "chunk_sizes", [path, path, 1, [[65_535, 65_535]] * BATCH_ITEMS_MAX]),
    ):
        body = encode_request(request)[4:]
        assert decode_request(unpack_request(body)) == request


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.binary(max_size=300) | st.text(max_size=300),
    lambda below: st.lists(below, max_size=40),
))  # fmt: skip
def test_stepping_over_items_finds_as_many_as_there_are(value: object) -> None:
    item: bytes = msgpack.packb(value)
    repeats = 300_000 // len(item) + 1
    fits = repeats * _count(value) + 1 <= 4 * BATCH_ITEMS_MAX and repeats <= 2 * BATCH_ITEMS_MAX
    body = b"\xdd" + struct.pack(">I", repeats) + item * repeats
    try:
        unpacked = unpack_request(body)
    except InvalidInput as error:
        assert not fits or "lists" in str(error)
    else:
        assert fits and unpacked == [value] * repeats


def _count(value: object) -> int:
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        for value in FrameDecoder().feed(struct.pack("<I", len(body)) + body):
            decode_request(value)
    except InvalidInput:
        return
    assert len(body) > 0
