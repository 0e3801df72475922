"""The codec between a node and its clients: frames of msgpack, and the records that travel in them.

Pure: bytes in, objects out. A frame is a little-endian u32 length and one msgpack value. A request
is `[id, operation, [argument, ...]]`, a reply `[id, result, descriptors]` where `descriptors` says
how many file descriptors came along, and a refusal `[id, None, 0, [kind, subject, reason]]`.
Records travel as arrays of their fields, in the order of their class.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from kvfs.config import BATCH_ITEMS_MAX, FRAME_BYTES_MAX
from kvfs.errors import Corrupt, InvalidInput, KvfsError, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys

PROTOCOL = 2
_PATHS = "surrogateescape"  # texts may be paths of any bytes
_LENGTH = struct.Struct("<I")

Record = TypeVar("Record", Inode, Blob, ChunkInfo)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks."""

    number: int
    operation: str
    arguments: list[Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node answers; `error` is set when it refuses."""

    number: int
    result: Any
    descriptors: int = 0
    error: KvfsError | None = None


def encode_request(request: Request) -> bytes:
    """One frame. Raises `InvalidInput` when it would be larger than any node accepts."""
    return _frame([request.number, request.operation, request.arguments], "request")


def encode_reply(reply: Reply) -> bytes:
    """One frame; see the module's docstring. Raises `InvalidInput` when it would be too large."""
    if reply.error is None:
        return _frame([reply.number, reply.result, reply.descriptors], "reply")
    return _frame([reply.number, None, 0, _pack_error(reply.error)], "reply")


def _frame(value: Any, what: str) -> bytes:
    body: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors=_PATHS)
    if len(body) > FRAME_BYTES_MAX:
        raise InvalidInput(what, f"{len(body)} bytes; at most {FRAME_BYTES_MAX} fit a frame")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into frames. Raises `InvalidInput` on the first that breaks a rule."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every value that is complete after `data`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise InvalidInput(
                    "frame", f"announces {length} bytes; {FRAME_BYTES_MAX} is the limit"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield _unpack(body)


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False, unicode_errors=_PATHS)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidInput("frame", f"is no msgpack: {error}") from error


def decode_request(value: Any) -> Request:
    """Give a decoded frame its type. Raises `InvalidInput`."""
    match value:
        case [int(number), str(operation), list(arguments)] if type(number) is int:
            return Request(number, operation, arguments)
    raise InvalidInput("request", "is not [id, operation, arguments]")


def decode_reply(value: Any) -> Reply:
    """Give a decoded frame its type. Raises `InvalidInput`."""
    match value:
        case [int(number), result, int(descriptors)]:
            return Reply(number, result, descriptors)
        case [int(number), None, 0, [str(kind), subject, str(reason)]]:
            return Reply(number, None, 0, _unpack_error(kind, subject, reason))
    raise InvalidInput("reply", "is not [id, result, descriptors]")


def _pack_error(error: KvfsError) -> list[Any]:
    match error:
        case NamespaceError():
            return ["namespace", [error.code, error.path], ""]
        case InvalidInput() | Corrupt():
            return [type(error).__name__, error.subject, error.reason]
        case OutOfSpace() | Unavailable():
            return [type(error).__name__, "", str(error)]
    return ["KvfsError", "", str(error)]


def _unpack_error(kind: str, subject: Any, reason: str) -> KvfsError:
    match kind, subject:
        case "namespace", [int(code), bytes(path)]:
            return NamespaceError(code, path)
        case "InvalidInput", str():
            return InvalidInput(subject, reason)
        case "Corrupt", str():
            return Corrupt(subject, reason)
        case "OutOfSpace", _:
            return OutOfSpace(reason)
        case "Unavailable", _:
            return Unavailable(reason)
    return KvfsError(reason)


# A listing of ten million files passes here: names and types of fields are looked up once.
_FIELDS = {kind: attrgetter(*(f.name for f in fields(kind))) for kind in (Inode, Blob, ChunkInfo)}
_KINDS = {kind: [f.type for f in fields(kind)] for kind in (Inode, Blob, ChunkInfo)}


def pack_record(record: Inode | Blob | ChunkInfo) -> list[Any]:
    """The fields of a flat record, in order."""
    return list(_FIELDS[type(record)](record))


def unpack_record(kind: type[Record], values: Any) -> Record:
    """The record again. Raises `InvalidInput` when the number or a type of its fields is wrong."""
    if not isinstance(values, list) or list(map(type, values)) != _KINDS[kind]:
        raise InvalidInput(kind.__name__, f"{values!r:.200} does not have its fields")
    return kind(*values)


def pack_entry(entry: Entry) -> list[Any]:
    return [entry.name, pack_record(entry.inode)]


def unpack_entry(value: Any) -> Entry:
    match value:
        case [bytes(name), list(inode)]:
            return Entry(name, unpack_record(Inode, inode))
    raise InvalidInput("entry", "is not [name, inode]")


def pack_chunk_entry(entry: ChunkEntry) -> list[Any]:
    return [pack_record(entry.info), pack_record(entry.inode)]


def unpack_chunk_entry(value: Any) -> ChunkEntry:
    match value:
        case [list(info), list(inode)]:
            return ChunkEntry(unpack_record(ChunkInfo, info), unpack_record(Inode, inode))
    raise InvalidInput("chunk entry", "is not [chunk, inode]")


def pack_chunk_keys(keys: ChunkKeys) -> list[Any]:
    return [keys.hashes, keys.hash_bytes, [list(part) for part in keys.parts]]


def unpack_chunk_keys(values: Any) -> ChunkKeys:
    """The keys again. Raises `InvalidInput`."""
    match values:
        case [bytes(hashes), int(hash_bytes), list(parts)]:
            check_batch(parts, list, BATCH_ITEMS_MAX, "parts")
            for part in parts:
                if list(map(type, part)) != [int, int]:
                    raise InvalidInput("part", f"{part!r:.80} is not [group, shard]")
            return ChunkKeys(hashes, hash_bytes, tuple(map(tuple, parts)))
    raise InvalidInput("keys", "are not hashes, their length and parts")


def check_batch(values: Sequence[Any], kind: type, limit: int, what: str) -> None:
    """Refuse a batch that is too long or holds another type. Raises `InvalidInput`."""
    if not isinstance(values, list) or len(values) > limit:
        raise InvalidInput(what, f"must be a list of at most {limit}")
    for value in values:
        if type(value) is not kind:  # a bool is an int only to Python
            raise InvalidInput(what, f"{value!r:.80} is no {kind.__name__}")
