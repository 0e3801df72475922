"""The chunk file: a safetensors file whose payload begins at a multiple of 4096 bytes.

8 bytes give the length of the JSON header, which is padded with spaces; the tensors follow without
gaps. `__metadata__` says what the bytes are, and nothing of when, where or by whom they were made.
There is one way to write a chunk, and a reader takes no other: equal chunks are equal files.
docs/format.md has it all.

Any bytes whatever decode to a chunk or raise one `Corrupt`.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from json.encoder import encode_basestring
from typing import NoReturn

import xxhash

from kvfs.config import CHUNK_BYTES_MAX, CHUNK_HEADER_BYTES_MAX, PAGE_BYTES, whole_pages
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
_FREE_FIELDS = frozenset(("engine", "digest", "token_ids"))  # say nothing of what the bytes mean
_BEGIN = f'{{"{_METADATA}":'
_DIGEST_BEGIN = b',"digest":"'  # in no text: a quote in one has a backslash before it
_CACHED_CHARACTERS_MAX = 64 * 1024
_CACHED_TENSORS_MAX = 1024
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

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
    _check_fields(header)
    table = _table(header.tensors)
    try:
        text = f"{_BEGIN}{_ENCODER.encode(_metadata_of(header))}{table.text}}}".encode()
    except UnicodeEncodeError:
        _reject("a name in it is no valid Unicode text")
    header_bytes = whole_pages(_LENGTH.size + len(text))
    if header_bytes > CHUNK_HEADER_BYTES_MAX:
        _reject(f"it is longer than {CHUNK_HEADER_BYTES_MAX} bytes")
    if header_bytes + table.size_bytes > CHUNK_BYTES_MAX:
        _reject(f"the file would be larger than {CHUNK_BYTES_MAX} bytes")
    length = header_bytes - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def with_digest(encoded: bytes, digest: bytes) -> bytes:
    """What `encode_header` gave, with another digest in it."""
    begin = encoded.index(_DIGEST_BEGIN) + len(_DIGEST_BEGIN)
    return encoded[:begin] + digest.hex().encode() + encoded[begin + 2 * DIGEST_BYTES :]


def payload_bytes(header: ChunkHeader) -> int:
    """The size of all tensors together. Raises `InvalidInput` for tensors that no chunk has."""
    return _table(header.tensors).size_bytes


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
    raw = _raw_header(data)
    payload_offset = len(raw)
    header = _parse_header(raw[_LENGTH.size :].rstrip(b" "))
    try:
        expected = encode_header(header)
        size_bytes = payload_bytes(header)
    except InvalidInput as error:
        _refuse(str(error))
    # This one comparison finds doubled names, gaps and overlaps between tensors, other types,
    # unknown fields, other spellings: whatever our own writer would not have written.
    if raw != expected:
        _refuse("its header is not written as the format demands")
    if file_bytes != payload_offset + size_bytes:
        _refuse(f"it has {file_bytes} bytes, its header says {payload_offset + size_bytes}")
    return header, payload_offset


def match_header(data: Bytes, file_bytes: int, wanted: ChunkHeader) -> int:
    """Where the payload begins, of a file that was stored as `wanted`: who wrote it, its token ids
    and its digest may be others, what its bytes mean and where they lie may not.

    For those who know what they want: a fraction of what `decode_header` costs. Raises `Corrupt`,
    with the first field that differs.
    """
    raw = _raw_header(data)
    metadata, rest = _split_header(raw[_LENGTH.size :].rstrip(b" "))
    for name, value in _metadata_of(wanted).items():
        if name not in _FREE_FIELDS and metadata.get(name) != value:
            _refuse(f"its {name} is not what was asked for")
    table = _table(wanted.tensors)
    if rest != table.text + "}":
        _refuse("its tensors are not what was asked for")
    if file_bytes != len(raw) + table.size_bytes:
        _refuse(f"it has {file_bytes} bytes, its header says {len(raw) + table.size_bytes}")
    return len(raw)


def verify(data: Bytes) -> ChunkHeader:
    """The header of a whole file in one buffer, its payload checked. Raises `Corrupt`."""
    header, payload_offset = decode_header(data, len(data))
    if digest_of(memoryview(data)[payload_offset:]) != header.digest:
        _refuse("its payload does not have the digest that its header says")
    return header


def _raw_header(data: Bytes) -> bytes:
    payload_offset = header_bytes_needed(data)
    raw = bytes(data[:payload_offset])
    if len(raw) < payload_offset:
        _refuse("the file ends inside its header")
    return raw


def _parse_header(raw: bytes) -> ChunkHeader:
    """A header from bytes of any kind; whether its values are allowed is not looked at here."""
    metadata, rest = _split_header(raw)
    is_small = len(rest) <= _CACHED_CHARACTERS_MAX
    with _refusing():
        tensors = _parse_tensors(rest) if is_small else _parse_tensors.__wrapped__(rest)
        return _build_header(metadata, tensors)


def _split_header(raw: bytes) -> tuple[dict[str, str], str]:
    """The metadata, and the text that follows it."""
    with _refusing():
        text = raw.decode()
        if not text.startswith(_BEGIN):
            _refuse(f"its header does not begin with {_BEGIN}")
        metadata, end = _DECODER.raw_decode(text, len(_BEGIN))
    if type(metadata) is not dict or set(map(type, metadata.values())) != {str}:
        _refuse(f"{_METADATA} in its header is no object of texts")
    if metadata.get("format") != FORMAT:
        _refuse(f"its format is {metadata.get('format', '')[:80]!r}; this kvfs reads {FORMAT}")
    return metadata, text[end:]


@contextmanager
def _refusing() -> Iterator[None]:
    """Whatever JSON, UTF-8, numbers, and what is indexed, raise for bytes of any kind."""
    try:
        yield
    except RecursionError:
        _refuse("its header is nested too deep")
    except KeyError as error:
        _refuse(f"{error} is missing in its header")
    except (TypeError, ValueError) as error:
        _refuse(f"its header cannot be read: {error}")


@lru_cache(maxsize=16)  # all chunks of a model's shard say the same here
def _parse_tensors(rest: str) -> tuple[TensorSpec, ...]:
    """The tensors from what follows the metadata, up to the end of the JSON object."""
    table = json.loads("{" + rest.removeprefix(","))
    return tuple(
        TensorSpec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()
    )


def _build_header(metadata: dict[str, str], tensors: tuple[TensorSpec, ...]) -> ChunkHeader:
    token_ids = metadata.get("token_ids")
    return ChunkHeader(
        model=metadata["model"],
        fingerprint=metadata["fingerprint"],
        key=metadata["key"],
        parent=metadata["parent"],
        token_start=int(metadata["token_start"]),
        token_end=int(metadata["token_end"]),
        group=int(metadata["group"]),
        shard=int(metadata["shard"]),
        engine=metadata["engine"],
        digest=bytes.fromhex(metadata["digest"]),
        token_ids=None if token_ids is None else tuple(map(int, token_ids.split(" "))),
        tensors=tensors,
    )


def _refuse(reason: str) -> NoReturn:
    raise Corrupt("chunk", reason)


# What the metadata keeps --------------------------------------------------------------------------
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
    """xxh3_64 of token ids as little-endian u32: how chunks are found by what they hold.

    Raises `InvalidInput`.
    """
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise InvalidInput("token ids", f"must be 0 to {TOKEN_MAX}") from error
    return xxhash.xxh3_64_digest(packed)


# Rules --------------------------------------------------------------------------------------------
def _check_fields(header: ChunkHeader) -> None:
    check_model(header.model)
    check_fingerprint(header.fingerprint)
    for value, limit in (
        (header.token_start, TOKEN_MAX),
        (header.token_end, TOKEN_MAX),
        (header.group, PART_MAX),
        (header.shard, PART_MAX),
    ):
        if type(value) is not int or not 0 <= value <= limit:
            _reject(f"a token position, group or shard is not 0 to {limit}")
    parsed = parse_key(header.key)
    if parsed is None or parsed[1:] != (header.group, header.shard):
        _reject(f"key {header.key[:80]!r} is not <hash in hex>-g<group>-s<shard> of its own")
    if header.parent and parse_key(header.parent) is None:
        _reject(f"parent {header.parent[:80]!r} is no key")
    if header.parent == header.key:
        _reject("the chunk is its own parent")
    if header.token_start >= header.token_end:
        _reject(f"the tokens run from {header.token_start} to {header.token_end}")
    if len(header.engine) > ENGINE_CHARACTERS_MAX or not header.engine.isprintable():
        _reject(f"engine is not at most {ENGINE_CHARACTERS_MAX} printable characters")
    if len(header.digest) != DIGEST_BYTES:
        _reject(f"digest has not {DIGEST_BYTES} bytes")
    ids = header.token_ids
    if ids is not None:
        if len(ids) != header.token_end - header.token_start:
            _reject(f"{len(ids)} token ids for {header.token_end - header.token_start} tokens")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > TOKEN_MAX:
            _reject(f"token ids are not integers from 0 to {TOKEN_MAX}")
    names = {tensor.name for tensor in header.tensors}
    if len(names) != len(header.tensors) or "" in names or _METADATA in names:
        _reject(f"tensor names are missing, doubled or {_METADATA}")
    # True and 1.0 equal 1, so the cache of layouts would not tell them apart.
    if not set(map(type, chain.from_iterable(t.shape for t in header.tensors))) <= {int}:
        _reject("an extent in the shape of a tensor is no integer")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What tensors of one dtype and shape have in common."""

    element_bytes: int
    size_bytes: int
    text: str  # in the header, up to the offsets


@dataclass(frozen=True, slots=True)
class _Table:
    """All tensors of a chunk: their text in the header, behind the metadata, and their size."""

    text: str
    size_bytes: int


def _table(tensors: tuple[TensorSpec, ...]) -> _Table:
    """Raises `InvalidInput`. Expects extents that are integers."""
    is_small = len(tensors) <= _CACHED_TENSORS_MAX
    try:
        return _table_of(tensors) if is_small else _table_of.__wrapped__(tensors)
    except TypeError:  # from JSON: what cannot be hashed
        _reject("a tensor has a dtype that is no text")


@lru_cache(maxsize=16)  # as _parse_tensors
def _table_of(tensors: tuple[TensorSpec, ...]) -> _Table:
    parts = []
    begin = 0
    for tensor in tensors:
        layout = _layout_of(tensor.dtype, tensor.shape)
        if begin % layout.element_bytes:
            _reject(f"tensor {tensor.name[:80]!r} is not aligned; put wider dtypes first")
        end = begin + layout.size_bytes
        parts.append(f",{encode_basestring(tensor.name)}:{{{layout.text}{begin},{end}]}}")
        begin = end
    return _Table("".join(parts), begin)


@lru_cache(maxsize=256)  # a chunk has many tensors, but few kinds
def _layout_of(dtype: str, shape: tuple[int, ...]) -> _Layout:
    element_bytes = DTYPE_BYTES.get(dtype)
    if element_bytes is None:
        _reject(f"dtype {dtype!r:.80} is none of {', '.join(DTYPE_BYTES)}")
    if len(shape) > RANK_MAX:
        _reject(f"a tensor has more than {RANK_MAX} dimensions")
    size_bytes = element_bytes
    for extent in shape:
        if not 0 < extent <= CHUNK_BYTES_MAX:
            _reject(f"an extent in the shape of a tensor is not 1 to {CHUNK_BYTES_MAX}")
        size_bytes *= extent
    if size_bytes > CHUNK_BYTES_MAX:
        _reject(f"a tensor is larger than {CHUNK_BYTES_MAX} bytes")
    extents = ",".join(map(str, shape))
    text = f'"dtype":"{dtype}","shape":[{extents}],"data_offsets":['
    return _Layout(element_bytes, size_bytes, text)


def _reject(reason: str) -> NoReturn:
    raise InvalidInput("chunk header", reason)
