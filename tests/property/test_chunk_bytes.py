"""Any bytes whatever are a chunk or one `Corrupt`; what is a chunk is written in one way only."""

import json
import struct
import tempfile
from dataclasses import fields, replace

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.chunk import (
    DTYPE_BYTES,
    ChunkHeader,
    TensorSpec,
    decode_header,
    encode_header,
    header_bytes_needed,
    match_header,
    payload_bytes,
    verify,
    with_digest,
)
from kvfs.config import PAGE_BYTES
from kvfs.errors import Corrupt, InvalidInput
from kvfs.names import chunk_key

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
parts = st.integers(0, 65535)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    group, shard = draw(parts), draw(parts)
    keys = st.binary(min_size=1, max_size=64).map(lambda raw: chunk_key(raw, group, shard))
    key = draw(keys)
    start = draw(st.integers(0, 2**32 - 50))
    tokens = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)))
    names = draw(st.lists(texts, max_size=5, unique=True))
    tensors = [
        TensorSpec(
            name,
            draw(st.sampled_from(sorted(DTYPE_BYTES))),
            tuple(draw(st.lists(st.integers(1, 4), max_size=4))),
        )
        for name in names
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    return ChunkHeader(
        model=draw(texts),
        fingerprint=draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
        key=key,
        parent=draw(st.just("") | keys.filter(lambda parent: parent != key)),
        token_start=start,
        token_end=start + len(tokens),
        group=group,
        shard=shard,
        engine=draw(st.sampled_from(["", "vllm", "lmcache é"])),
        digest=bytes(16),
        token_ids=draw(st.just(tokens) | st.none()),
        tensors=tuple(tensors),
    )


@st.composite
def files(draw: st.DrawFn) -> bytes:
    header = draw(headers())
    payload = draw(st.randoms(use_true_random=False)).randbytes(payload_bytes(header))
    return encode_header(replace(header, digest=xxhash.xxh3_128_digest(payload))) + payload


def _check(data: bytes) -> ChunkHeader | None:
    """Read bytes in every way; None where they are refused as they should be."""
    try:
        needed = header_bytes_needed(data)
        found, offset = decode_header(data, len(data))
        header = verify(data)
    except Corrupt as error:
        assert error.reason
        return None
    assert header == found
    assert offset == needed and offset % PAGE_BYTES == 0
    assert data[:offset] == encode_header(header)
    assert len(data) == offset + payload_bytes(header)
    assert match_header(data, len(data), header) == offset
    return header


@given(headers())
def test_every_header_reads_back(header: ChunkHeader) -> None:
    data = encode_header(header)
    found, offset = decode_header(data, len(data) + payload_bytes(header))
    assert (found, offset) == (header, len(data))


@given(
    headers(),
    st.sampled_from(["m", ',"digest":"', '"digest":"']),
    st.binary(min_size=16, max_size=16),
)
def test_a_digest_is_put_where_a_header_has_it(
    header: ChunkHeader, model: str, digest: bytes
) -> None:
    header = replace(header, model=model)
    encoded = encode_header(replace(header, digest=digest))
    assert with_digest(encode_header(header), digest) == encoded


@given(headers(), headers(), st.data())
def test_a_match_is_of_what_was_asked_for(
    stored: ChunkHeader, other: ChunkHeader, draw: st.DataObject
) -> None:
    """One field, any, of another chunk: it matters where it says what the bytes mean."""
    name = draw.draw(st.sampled_from([field.name for field in fields(ChunkHeader)]))
    wanted = replace(stored, **{name: getattr(other, name)})
    data = encode_header(stored)
    file_bytes = len(data) + payload_bytes(stored)
    is_free = name in ("engine", "digest", "token_ids")
    if is_free or wanted == stored:
        assert match_header(data, file_bytes, wanted) == len(data)
    else:
        with pytest.raises(Corrupt):
            match_header(data, file_bytes, wanted)


@given(files(), st.data())
def test_a_match_of_any_bytes_is_a_payload_that_fits_or_refused(
    data: bytes, draw: st.DataObject
) -> None:
    wanted = verify(data)
    position = draw.draw(st.integers(0, len(data)))
    changed = data[:position] + draw.draw(st.binary(max_size=4)) + data[position:]
    changed = changed[: draw.draw(st.integers(0, len(changed)))]
    try:
        offset = match_header(changed, len(changed), wanted)
    except Corrupt as error:
        assert error.reason
        return
    assert len(changed) - offset == payload_bytes(wanted)


@settings(max_examples=50)
@given(files())
def test_the_real_library_agrees(data: bytes) -> None:
    header = _check(data)
    assert header is not None
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        tensors = safetensors.torch.load_file(file.name)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        tensor.name: tensor.shape for tensor in header.tensors
    }
    offset = header_bytes_needed(data)
    for tensor in header.tensors:
        raw = bytes(tensors[tensor.name].reshape(-1).view(torch.uint8).numpy())
        assert data[offset : offset + len(raw)] == raw
        offset += len(raw)
    assert offset == len(data)


@given(files(), st.data())
def test_a_flipped_byte_is_seen(data: bytes, draw: st.DataObject) -> None:
    end = len(data) if draw.draw(st.booleans()) else len(data[8:].rstrip(b" ")) + 8
    position = draw.draw(st.integers(0, min(end, len(data)) - 1))
    changed = bytearray(data)
    changed[position] ^= draw.draw(st.integers(1, 255))
    found = _check(bytes(changed))
    if found is not None:  # another digit of a token, say: it is what the header says now
        assert position < header_bytes_needed(data)
        assert found != verify(data)


@given(files(), st.data())
def test_a_cut_or_longer_file_is_seen(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data) - 1))
    assert _check(data[:cut]) is None
    assert _check(data + draw.draw(st.binary(min_size=1, max_size=5000))) is None


@given(files(), files(), st.data())
def test_spliced_files_are_refused_or_whole(one: bytes, two: bytes, draw: st.DataObject) -> None:
    begin = draw.draw(st.integers(0, len(one)))
    resume = draw.draw(st.integers(0, len(two)))
    _check(one[:begin] + two[resume:])


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert _check(data) is None
    assert _check(struct.pack("<Q", PAGE_BYTES - 8) + data.ljust(PAGE_BYTES - 8)) is None


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["kvfs/1", "U8", "dtype", "shape", "data_offsets", "ab-g0-s0", "0", "1"])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
def test_a_header_with_any_json_in_it_is_refused_or_whole(draw: st.DataObject) -> None:
    data = draw.draw(files())
    offset = header_bytes_needed(data)
    table = json.loads(data[8:offset])
    place: dict[str, object] = table
    while True:
        name = draw.draw(st.sampled_from(sorted(place)) | texts)
        inner = place.get(name)
        if not isinstance(inner, dict) or draw.draw(st.booleans()):
            break
        place = inner
    place[name] = draw.draw(json_values)
    text = json.dumps(table, ensure_ascii=draw.draw(st.booleans()), separators=(",", ":"))
    raw = text.encode("utf-8", "surrogatepass")
    length = -(-(8 + len(raw)) // PAGE_BYTES) * PAGE_BYTES - 8
    _check(struct.pack("<Q", length) + raw.ljust(length) + data[offset:])


@given(headers(), st.data())
def test_any_field_is_written_or_refused(header: ChunkHeader, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(["token_start", "token_end", "group", "shard"]))
    changed = replace(header, **{name: draw.draw(st.integers(-(2**70), 2**70))})
    changed = replace(changed, model=draw.draw(st.text(max_size=5)))
    try:
        data = encode_header(changed)
    except InvalidInput:
        return
    assert decode_header(data, len(data) + payload_bytes(changed))[0] == changed
