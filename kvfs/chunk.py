"""The chunk file: a safetensors file whose payload begins at a multiple of 4096 bytes.

8 bytes give the length of the JSON header, which is padded with spaces; the tensors follow without
gaps. `__metadata__` says what the bytes are, and nothing of when, where or by whom they were made:
equal chunks are equal files. docs/format.md has it all.

Any bytes whatever decode to a chunk or raise one `Corrupt`.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import xxhash

from kvfs.config import CHUNK_BYTES_MAX, CHUNK_HEADER_BYTES_MAX, PAGE_BYTES
from kvfs.digest import digest_of
from kvfs.errors import Corrupt, InvalidInput
from kvfs.meta.contract import DIGEST_BYTES, ChunkInfo
from kvfs.names import PART_MAX, check_fingerprint, check_model, parse_key

FORMAT = "kvfs/1"
TOKEN_MAX = 2**32 - 1  # of ids and of positions
ENGINE_CHARACTERS_MAX = 256
RANK_MAX = 16  # of a tensor

# Only whole bytes: engines pack smaller types into U8.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_HEX_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its dtype in the words of safetensors, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk file says about itself. Its payload is the tensors in this order."""

    model: str
    fingerprint: str
    key: str
    parent: str  # key of the chunk before, empty at the start of a prompt
    token_start: int
    token_end: int
    group: int
    shard: int
    engine: str
    digest: bytes  # xxh3_128 of the payload
    token_ids: tuple[int, ...] | None  # None: not stored
    tensors: tuple[TensorSpec, ...]


# Writing ------------------------------------------------------------------------------------------
def encode_header(header: ChunkHeader) -> bytes:
    """Everything before the payload, a multiple of 4096 bytes long; its length does not depend on
    the digest. Raises `InvalidInput`."""
    reason = _find_fault(header)
    if reason is not None:
        raise InvalidInput("chunk header", reason)
    table: dict[str, Any] = {_METADATA: _metadata_of(header)}
    begin = 0
    for tensor in header.tensors:
        end = begin + _tensor_bytes(tensor)
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = _ENCODER.encode(table).encode()
    header_bytes = -(-(_LENGTH.size + len(text)) // PAGE_BYTES) * PAGE_BYTES
    if header_bytes > CHUNK_HEADER_BYTES_MAX:
        raise InvalidInput("chunk header", f"is longer than {CHUNK_HEADER_BYTES_MAX} bytes")
    if header_bytes + begin > CHUNK_BYTES_MAX:
        raise InvalidInput("chunk", f"is larger than {CHUNK_BYTES_MAX} bytes")
    length = header_bytes - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def payload_bytes(header: ChunkHeader) -> int:
    """The size of all tensors together."""
    return sum(map(_tensor_bytes, header.tensors))


def _metadata_of(header: ChunkHeader) -> dict[str, str]:
    metadata = {
        "format": FORMAT,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "key": header.key,
        "parent": header.parent,
        "token_start": str(header.token_start),
        "token_end": str(header.token_end),
        "group": str(header.group),
        "shard": str(header.shard),
        "engine": header.engine,
        "digest": header.digest.hex(),
    }
    if header.token_ids is not None:
        metadata["token_ids"] = " ".join(map(str, header.token_ids))
    return metadata


# Reading ------------------------------------------------------------------------------------------
def header_bytes_needed(first_page: Bytes) -> int:
    """How many bytes of the file `decode_header` needs, from its first 8 or more bytes.

    That is also where the payload begins. Raises `Corrupt`.
    """
    if len(first_page) < _LENGTH.size:
        _refuse("the file ends inside its header")
    needed: int = _LENGTH.unpack_from(first_page)[0] + _LENGTH.size
    if needed % PAGE_BYTES or not PAGE_BYTES <= needed <= CHUNK_HEADER_BYTES_MAX:
        _refuse("it does not begin with the length of a chunk's header")
    return needed


def decode_header(data: Bytes, file_bytes: int) -> tuple[ChunkHeader, int]:
    """The header of a file of `file_bytes`, and where its payload begins.

    `data` holds at least the header. The payload is not looked at. Raises `Corrupt`.
    """
    payload_offset = header_bytes_needed(data)
    if len(data) < payload_offset:
        _refuse("the file ends inside its header")
    table = _parse_json(bytes(data[_LENGTH.size : payload_offset]))
    metadata = table.pop(_METADATA, None)
    if type(metadata) is not dict:
        _refuse("its header has no __metadata__")
    tensors, size_bytes = _decode_tensors(table)
    header = _decode_metadata(metadata, tensors)
    reason = _find_fault(header)
    if reason is not None:
        _refuse(reason)
    if file_bytes != payload_offset + size_bytes:
        _refuse(f"it has {file_bytes} bytes, its header says {payload_offset + size_bytes}")
    if file_bytes > CHUNK_BYTES_MAX:
        _refuse(f"it is larger than {CHUNK_BYTES_MAX} bytes")
    return header, payload_offset


def verify(data: Bytes) -> ChunkHeader:
    """The header of a whole file in one buffer, its payload checked. Raises `Corrupt`."""
    header, payload_offset = decode_header(data, len(data))
    if digest_of(memoryview(data)[payload_offset:]) != header.digest:
        _refuse("its payload does not have the digest that its header says")
    return header


def chunk_info(header: ChunkHeader) -> ChunkInfo:
    """What the metadata keeps of a chunk."""
    return ChunkInfo(
        key=header.key.encode(),
        parent=header.parent.encode(),
        token_start=header.token_start,
        token_end=header.token_end,
        group=header.group,
        shard=header.shard,
        tokens_digest=b"" if header.token_ids is None else digest_tokens(header.token_ids),
    )


def digest_tokens(token_ids: Sequence[int]) -> bytes:
    """xxh3_64 of token ids as little-endian u32: how chunks are found by what they hold."""
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise InvalidInput("token ids", f"must be 0 to {TOKEN_MAX}") from error
    return xxhash.xxh3_64_digest(packed)


def _refuse(reason: str) -> NoReturn:
    raise Corrupt("chunk", reason)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant)


def _parse_json(padded: bytes) -> dict[str, Any]:
    raw = padded.rstrip(b" ")
    if not (raw.startswith(b"{") and raw.endswith(b"}")):
        _refuse("its header is no JSON object")
    try:
        table: dict[str, Any] = _DECODER.decode(raw.decode())
    except RecursionError:
        _refuse("its header is nested too deep")
    except ValueError as error:  # of JSON, of UTF-8, and of integers with thousands of digits
        _refuse(f"its header is no JSON: {error}")
    return table


def _decode_tensors(table: dict[str, Any]) -> tuple[tuple[TensorSpec, ...], int]:
    """The tensors in the order of their bytes, and the size of all; they leave no gap."""
    placed = []
    for name, entry in table.items():
        if type(entry) is not dict or entry.keys() != _TENSOR_KEYS:
            _refuse(f"tensor {name[:80]!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
            _refuse(f"tensor {name[:80]!r} has fields of a wrong type")
        if len(offsets) != 2 or not all(map(_is_size, offsets)) or not all(map(_is_size, shape)):
            _refuse(f"tensor {name[:80]!r} has sizes that no chunk has")
        placed.append((offsets[0], offsets[1], TensorSpec(name, dtype, tuple(shape))))
    placed.sort(key=_begin_of)
    position = 0
    for begin, end, tensor in placed:
        if begin != position or tensor.dtype not in DTYPE_BYTES:
            _refuse(f"tensor {tensor.name[:80]!r} leaves a gap, overlaps, or has an unknown dtype")
        if len(tensor.shape) > RANK_MAX or end - begin != _tensor_bytes(tensor):
            _refuse(f"tensor {tensor.name[:80]!r} has another size than its shape says")
        position = end
    return tuple(tensor for _, _, tensor in placed), position


_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}


def _begin_of(place: tuple[int, int, TensorSpec]) -> int:
    return place[0]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= CHUNK_BYTES_MAX


def _tensor_bytes(tensor: TensorSpec) -> int:
    size_bytes = DTYPE_BYTES[tensor.dtype]
    for extent in tensor.shape:
        size_bytes *= extent
    return size_bytes


def _decode_metadata(metadata: Mapping[str, Any], tensors: tuple[TensorSpec, ...]) -> ChunkHeader:
    for name, value in metadata.items():
        if type(value) is not str:
            _refuse(f"{name[:80]!r} in its metadata is no text")
    text = _Texts(metadata)
    if text["format"] != FORMAT:
        _refuse(f"its format is {text['format'][:80]!r}; this kvfs reads {FORMAT}")
    if not _HEX_DIGEST.fullmatch(text["digest"]):
        _refuse("its digest is none")
    return ChunkHeader(
        model=text["model"],
        fingerprint=text["fingerprint"],
        key=text["key"],
        parent=text["parent"],
        token_start=text.number("token_start"),
        token_end=text.number("token_end"),
        group=text.number("group"),
        shard=text.number("shard"),
        engine=text["engine"],
        digest=bytes.fromhex(text["digest"]),
        token_ids=text.numbers("token_ids") if "token_ids" in metadata else None,
        tensors=tensors,
    )


class _Texts:
    """The strings of a header's metadata; what is missing or no number is `Corrupt`."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = metadata

    def __getitem__(self, name: str) -> str:
        value = self._metadata.get(name)
        if value is None:
            _refuse(f"{name} is missing in its metadata")
        return value

    def number(self, name: str) -> int:
        value = self[name]
        if not _NUMBER.fullmatch(value):
            _refuse(f"{name} is no number in its metadata")
        return int(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        value = self[name]
        try:
            numbers = tuple(map(int, value.split(" ")))
        except ValueError:
            numbers = ()
        if " ".join(map(str, numbers)) != value:
            _refuse(f"{name} are no numbers in its metadata")
        return numbers


# Rules for both -----------------------------------------------------------------------------------
def _find_fault(header: ChunkHeader) -> str | None:
    """What is wrong with a header's fields, for whoever wrote it; None when nothing is."""
    try:
        check_model(header.model)
        check_fingerprint(header.fingerprint)
    except InvalidInput as error:
        return f"{error.subject} {error.reason}"
    parsed = parse_key(header.key)
    if parsed is None or parsed[1:] != (header.group, header.shard):
        return f"key {header.key[:160]!r} is not <hash in hex>-g<group>-s<shard> of its own"
    if header.parent and parse_key(header.parent) is None:
        return f"parent {header.parent[:160]!r} is no key"
    if header.parent == header.key:
        return "it cannot be its own parent"
    for value, limit in (
        (header.token_start, TOKEN_MAX),
        (header.token_end, TOKEN_MAX),
        (header.group, PART_MAX),
        (header.shard, PART_MAX),
    ):
        if type(value) is not int or not 0 <= value <= limit:
            return f"{value!r} is not 0 to {limit}"
    if header.token_start >= header.token_end:
        return f"its tokens run from {header.token_start} to {header.token_end}"
    if len(header.engine) > ENGINE_CHARACTERS_MAX or not header.engine.isprintable():
        return f"engine must be at most {ENGINE_CHARACTERS_MAX} printable characters"
    if len(header.digest) != DIGEST_BYTES:
        return f"digest must be {DIGEST_BYTES} bytes"
    return _find_token_fault(header) or _find_tensor_fault(header.tensors)


def _find_token_fault(header: ChunkHeader) -> str | None:
    ids = header.token_ids
    if ids is None:
        return None
    if len(ids) != header.token_end - header.token_start:
        return f"{len(ids)} token ids for {header.token_end - header.token_start} tokens"
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > TOKEN_MAX:
        return f"token ids must be integers from 0 to {TOKEN_MAX}"
    return None


def _find_tensor_fault(tensors: Sequence[TensorSpec]) -> str | None:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names) or "" in names or _METADATA in names:
        return f"tensor names must be there, differ, and not be {_METADATA}"
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return "a tensor's name is no valid Unicode text"
    position = 0
    for tensor in tensors:
        element_bytes = DTYPE_BYTES.get(tensor.dtype)
        if element_bytes is None:
            return f"dtype {tensor.dtype[:80]!r} is none of {', '.join(DTYPE_BYTES)}"
        if position % element_bytes:
            return f"tensor {tensor.name[:80]!r} is not aligned; put wider dtypes first"
        if len(tensor.shape) > RANK_MAX:
            return f"tensor {tensor.name[:80]!r} has more than {RANK_MAX} dimensions"
        for extent in tensor.shape:
            if type(extent) is not int or not 0 < extent <= CHUNK_BYTES_MAX:
                return f"{extent!r} in the shape of {tensor.name[:80]!r} is not 1 or more"
        position += _tensor_bytes(tensor)
        if position > CHUNK_BYTES_MAX:
            return f"the tensors are larger than {CHUNK_BYTES_MAX} bytes"
    return None
