"""The chunk format: its exact bytes, what the safetensors library makes of it, and its limits."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash

from kvfs.chunk import (
    DTYPE_BYTES,
    ChunkHeader,
    TensorSpec,
    chunk_info,
    decode_header,
    digest_tokens,
    encode_header,
    header_bytes_needed,
    payload_bytes,
    verify,
)
from kvfs.config import CHUNK_BYTES_MAX, CHUNK_HEADER_BYTES_MAX, PAGE_BYTES
from kvfs.errors import Corrupt, InvalidInput

HEADER = ChunkHeader(
    model="org/model-é",
    fingerprint="0123456789abcdef" * 2,
    key="ab" * 32 + "-g1-s2",
    parent="cd" * 32 + "-g1-s2",
    token_start=4,
    token_end=8,
    group=1,
    shard=2,
    engine="vllm",
    digest=bytes(16),
    token_ids=(0, 7, 151_643, 2**32 - 1),
    tensors=(TensorSpec("k", "F32", (2, 3)), TensorSpec('v"\n', "U8", (5,))),
)
TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32,
    "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64,
    "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


def _file(header: ChunkHeader, payload: bytes | None = None) -> bytes:
    if payload is None:
        payload = bytes(i % 251 for i in range(payload_bytes(header)))
    header = replace(header, digest=xxhash.xxh3_128_digest(payload))
    return encode_header(header) + payload


def _raw(table: object) -> bytes:
    """A file with any JSON as its header, and no payload."""
    text = json.dumps(table).encode()
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    return struct.pack("<Q", length) + text.ljust(length)


def test_bytes_are_as_documented() -> None:
    data = encode_header(HEADER)
    text = (
        '{"__metadata__":{"format":"kvfs/1","model":"org/model-é",'
        f'"fingerprint":"{HEADER.fingerprint}","key":"{HEADER.key}","parent":"{HEADER.parent}",'
        '"token_start":"4","token_end":"8","group":"1","shard":"2","engine":"vllm",'
        f'"digest":"{"00" * 16}","token_ids":"0 7 151643 4294967295"}},'
        '"k":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"v\\"\\n":{"dtype":"U8","shape":[5],"data_offsets":[24,29]}}'
    ).encode()
    assert data == struct.pack("<Q", 4088) + text.ljust(4088)


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        replace(HEADER, token_ids=None, parent=""),
        replace(HEADER, tensors=()),
        replace(HEADER, tensors=(TensorSpec("scalar", "F64", ()),)),
        replace(HEADER, token_start=0, token_end=3000, token_ids=tuple(range(10**6, 10**6 + 3000))),
    ],
)
def test_a_file_reads_back(header: ChunkHeader) -> None:
    data = _file(header)
    found = verify(data)
    assert replace(found, digest=header.digest) == header
    offset = header_bytes_needed(data[:PAGE_BYTES])
    assert offset % PAGE_BYTES == 0
    assert decode_header(data[:offset], len(data)) == (found, offset)
    assert decode_header(memoryview(bytearray(data)), len(data)) == (found, offset)


def test_length_does_not_depend_on_the_digest() -> None:
    assert len(encode_header(HEADER)) == len(encode_header(replace(HEADER, digest=b"\xff" * 16)))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_safetensors_opens_every_dtype(dtype: str, tmp_path: Path) -> None:
    element_bytes = DTYPE_BYTES[dtype]
    tensors = (TensorSpec("b", dtype, (3, 2)), TensorSpec("a", dtype, ()))
    payload = bytes(i % 2 for i in range(7 * element_bytes))
    header = replace(HEADER, tensors=tensors)
    path = tmp_path / "x.safetensors"
    path.write_bytes(_file(header, payload))
    loaded = safetensors.torch.load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {"b": (3, 2), "a": ()}
    for name, part in (("b", payload[: 6 * element_bytes]), ("a", payload[6 * element_bytes :])):
        assert loaded[name].dtype == TORCH_DTYPES[dtype]
        assert bytes(loaded[name].reshape(-1).view(torch.uint8).numpy()) == part


def test_safetensors_reads_metadata_and_mixed_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = _file(HEADER)
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        k, v = file.get_tensor("k"), file.get_tensor('v"\n')
    payload = data[PAGE_BYTES:]
    assert bytes(k.view(torch.uint8).numpy()) == payload[:24]
    assert bytes(v.numpy()) == payload[24:]
    assert metadata["format"] == "kvfs/1"
    assert metadata["key"] == HEADER.key
    assert metadata["digest"] == xxhash.xxh3_128_hexdigest(payload)
    assert metadata["token_ids"].split() == [str(token) for token in HEADER.token_ids or ()]


def test_the_documented_reader_reads(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python")[1].split("```")[0], names)
    path = tmp_path / "x.safetensors"
    data = _file(HEADER)
    path.write_bytes(data)
    metadata, tensors = names["read_chunk"](path)
    assert metadata["key"] == HEADER.key
    assert tensors == {
        "k": ("F32", [2, 3], data[PAGE_BYTES : PAGE_BYTES + 24]),
        'v"\n': ("U8", [5], data[PAGE_BYTES + 24 :]),
    }


BAD_FIELDS: list[dict[str, Any]] = [
    {"model": ""},
    {"model": "\ud800"},
    {"fingerprint": "a/b"},
    {"key": "nothing"},
    {"key": "ab" * 32 + "-g1-s3"},
    {"group": 65536, "key": "ab" * 32 + "-g65536-s2"},
    {"group": True, "key": "ab" * 32 + "-g1-s2"},
    {"shard": -1},
    {"parent": "x"},
    {"parent": HEADER.key},
    {"token_start": -1},
    {"token_start": 8},
    {"token_end": 2**32},
    {"token_end": 9},
    {"token_ids": (1, 2, 3)},
    {"token_ids": (1, 2, 3, 2**32)},
    {"token_ids": (1, 2, 3, -1)},
    {"token_ids": (1, 2, 3, True)},
    {"token_ids": (1, 2, 3, 4.0)},
    {"engine": "x" * 257},
    {"engine": "a\nb"},
    {"digest": b"short"},
    {"tensors": (TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,)))},
    {"tensors": (TensorSpec("", "F32", (1,)),)},
    {"tensors": (TensorSpec("__metadata__", "F32", (1,)),)},
    {"tensors": (TensorSpec("\udcff", "F32", (1,)),)},
    {"tensors": (TensorSpec("a", "F4", (1,)),)},
    {"tensors": (TensorSpec("a", "F32", (0,)),)},
    {"tensors": (TensorSpec("a", "F32", (-1, -1)),)},
    {"tensors": (TensorSpec("a", "F32", (1.0,)),)},  # type: ignore[arg-type]  # on purpose
    {"tensors": (TensorSpec("a", "F32", ([],)),)},  # type: ignore[arg-type]  # on purpose
    {"tensors": (TensorSpec("a", "F32", (1,) * 17),)},
    {"tensors": (TensorSpec("a", "U8", (CHUNK_BYTES_MAX,)),)},
    {"tensors": (TensorSpec("a", "U8", (2**30, 2**30, 2**30)),)},
    {"tensors": (TensorSpec("a", "U8", (3,)), TensorSpec("b", "F32", (1,)))},
    {"tensors": tuple(TensorSpec(str(i) * 4000, "U8", (1,)) for i in range(600))},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: repr(fields)[:60])
def test_bad_fields_are_not_written(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        encode_header(replace(HEADER, **fields))


def test_largest_payload_is_the_largest_file() -> None:
    room = CHUNK_BYTES_MAX - PAGE_BYTES
    fits = replace(HEADER, tensors=(TensorSpec("a", "U8", (room,)),))
    data = encode_header(fits)
    assert decode_header(data, CHUNK_BYTES_MAX) == (fits, PAGE_BYTES)
    with pytest.raises(InvalidInput):
        encode_header(replace(HEADER, tensors=(TensorSpec("a", "U8", (room + 1,)),)))


METADATA = json.loads(encode_header(HEADER)[8:])["__metadata__"]
TENSOR = {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}


def _with(**fields: object) -> dict[str, object]:
    return {"__metadata__": METADATA | fields}


BAD_HEADERS: dict[str, object] = {
    "no object": [1, 2],
    "empty": {},
    "only a tensor": {"a": TENSOR},
    "metadata no object": {"__metadata__": "x"},
    "metadata of numbers": _with(group=1),
    "metadata without a name": {"__metadata__": {"format": "kvfs/1"}},
    "other format": _with(format="kvfs/2"),
    "unknown name": _with(host="here"),
    "leading zero": _with(token_start="04"),
    "underscore": _with(token_end="0_8"),
    "spaced digest": _with(digest="00 " * 16),
    "upper case digest": _with(digest="AA" * 16),
    "doubled spaces": _with(token_ids="1  2 3 4"),
    "no tokens": _with(token_ids=""),
    "other digits": _with(token_ids="1 2 3 ٤"),
    "huge number": _with(token_start="9" * 5000),
    "surrogate": _with(model="\ud800"),
    "tensor no object": {"__metadata__": METADATA, "a": [1]},
    "tensor without shape": {"__metadata__": METADATA, "a": {"dtype": "U8"}},
    "shape of text": {"__metadata__": METADATA, "a": TENSOR | {"shape": "12"}},
    "shape of lists": {"__metadata__": METADATA, "a": TENSOR | {"shape": [[4096]]}},
    "shape of floats": {"__metadata__": METADATA, "a": TENSOR | {"shape": [4096.0]}},
    "negative shape": {"__metadata__": METADATA, "a": TENSOR | {"shape": [-64, -64]}},
    "huge shape": {"__metadata__": METADATA, "a": TENSOR | {"shape": [10**400]}},
    "dtype no text": {"__metadata__": METADATA, "a": TENSOR | {"dtype": ["U8"]}},
    "unknown dtype": {"__metadata__": METADATA, "a": TENSOR | {"dtype": "U9"}},
    "gap before": {"__metadata__": METADATA, "a": TENSOR | {"data_offsets": [8, 4104]}},
    "overlap": {"__metadata__": METADATA, "a": TENSOR, "b": TENSOR},
    "offsets backwards": {"__metadata__": METADATA, "a": TENSOR | {"data_offsets": [4096, 0]}},
    "offsets beyond": {"__metadata__": METADATA, "a": TENSOR | {"data_offsets": [0, 2**70]}},
    "more in a tensor": {"__metadata__": METADATA, "a": TENSOR | {"x": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers_are_corrupt(name: str) -> None:
    for data in (_raw(BAD_HEADERS[name]), _raw(BAD_HEADERS[name]) + bytes(4096)):
        with pytest.raises(Corrupt):
            verify(data)


@pytest.mark.parametrize(
    "text",
    [
        b"{" * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":' + b"1" * 5000 + b"}",
        b'{"a":"\xff"}',
        b"",
        b"\xef\xbb\xbf{}",
    ],
)
def test_hostile_json_is_corrupt(text: bytes) -> None:
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    with pytest.raises(Corrupt):
        verify(struct.pack("<Q", length) + text.ljust(length))


def test_doubled_names_are_corrupt() -> None:
    data = encode_header(replace(HEADER, tensors=()))
    text = data[8:].rstrip(b" ")
    for doubled in (
        text.replace(b'"group":"1"', b'"group":"1","group":"1"'),
        text[:-1] + b"," + text[1:],
    ):
        with pytest.raises(Corrupt):
            verify(data[:8] + doubled.ljust(len(data) - 8))


@pytest.mark.parametrize(
    "length", [0, 1, 4087, 4089, 2**64 - 1, 2**63, CHUNK_HEADER_BYTES_MAX + PAGE_BYTES - 8]
)
def test_bad_header_lengths_are_corrupt(length: int) -> None:
    data = struct.pack("<Q", length) + encode_header(HEADER)[8:]
    with pytest.raises(Corrupt):
        header_bytes_needed(data)
    with pytest.raises(Corrupt):
        verify(data)


def test_changed_payload_is_corrupt_and_so_is_another_length() -> None:
    data = bytearray(_file(HEADER))
    for changed in (data[:-1], data + b"\0", data[:PAGE_BYTES], data[:100], data[:7], b""):
        with pytest.raises(Corrupt):
            verify(changed)
    data[-1] ^= 1
    with pytest.raises(Corrupt, match="digest"):
        verify(data)


def test_chunk_info_holds_what_metadata_keeps() -> None:
    info = chunk_info(HEADER)
    assert (info.key, info.parent) == (HEADER.key.encode(), HEADER.parent.encode())
    assert (info.token_start, info.token_end, info.group, info.shard) == (4, 8, 1, 2)
    packed = b"".join(token.to_bytes(4, "little") for token in HEADER.token_ids or ())
    assert info.tokens_digest == xxhash.xxh3_64_digest(packed)
    assert chunk_info(replace(HEADER, token_ids=None)).tokens_digest == b""


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_tokens_that_are_none_have_no_digest(tokens: list[int]) -> None:
    with pytest.raises(InvalidInput):
        digest_tokens(tokens)
