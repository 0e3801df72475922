"""The codec between a node and its clients: frames of msgpack, and the records that travel in them.

Pure: bytes in, objects out. A frame is a little-endian u32 length and one msgpack value. A request
is `[id, operation, [argument, ...]]`, a reply `[id, result, descriptors]` where `descriptors` says
how many file descriptors came along, and a refusal `[id, None, 0, [kind, subject, reason]]`.
Records travel as arrays of their fields, in the order of their class.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from kvfs.config import BATCH_ITEMS_MAX, FRAME_BYTES_MAX
from kvfs.errors import Corrupt, InvalidInput, KvfsError, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys
from kvfs.replicate import Holder, HolderState

PROTOCOL = 5
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
    """Cuts a byte stream into frames. Raises `InvalidInput` on the first that breaks a rule.
    `unpack` makes a value of a frame: a node gives `unpack_request`, for what strangers send."""

    def __init__(self, unpack: Callable[[bytes], Any] | None = None) -> None:
        self._buffer = bytearray()
        self._unpack = unpack or _unpack

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
            yield self._unpack(body)


def _unpack(body: bytes, **limits: Any) -> Any:
    try:
        return msgpack.unpackb(
            body, raw=False, strict_map_key=False, unicode_errors=_PATHS, **limits
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidInput("frame", f"is no msgpack: {error}") from error


# A frame of few bytes may announce millions of objects, which would hold the node's loop for
# seconds. What a request may hold is a little more than the largest batch has, so that one that is
# too long is still refused in words.
_LIST_ITEMS_MAX = 2 * BATCH_ITEMS_MAX
_LISTS_MAX = 2 * BATCH_ITEMS_MAX
_ITEMS_MAX = 4 * BATCH_ITEMS_MAX  # as a publication of 1,024 chunks has, 13 each
_TEXT_BYTES_MAX = 4096  # only operations are text; paths are bytes
_UNCOUNTED_BYTES_MAX = 256 * 1024  # so many bytes hold no more items than take 20 ms


def unpack_request(body: bytes) -> Any:
    """The value of a frame that a client sent, in less than 50 ms whatever it holds. Raises
    `InvalidInput`."""
    if len(body) > _UNCOUNTED_BYTES_MAX:
        _check_items(body)
    lists = 0

    def count(values: list[Any]) -> list[Any]:
        nonlocal lists
        lists += 1
        if lists > _LISTS_MAX:
            raise ValueError(f"more than {_LISTS_MAX} lists")
        return values

    return _unpack(
        body,
        list_hook=count,
        object_hook=_refuse_kind,  # for empty maps, which no length keeps out
        ext_hook=_refuse_kind,
        max_map_len=0,
        max_ext_len=0,
        max_array_len=_LIST_ITEMS_MAX,
        max_str_len=_TEXT_BYTES_MAX,
    )


def _refuse_kind(*values: Any) -> None:
    raise ValueError("no request has maps or extensions")


# By an item's first byte: its own bytes, and how many of them are the length of what follows.
_HEADS = (
    dict.fromkeys(range(256), (1, 0))  # small integers, constants, heads of short lists
    | {0xA0 + size: (1 + size, 0) for size in range(32)}
    | {0xC4: (2, 1), 0xC5: (3, 2), 0xC6: (5, 4), 0xC7: (3, 1), 0xC8: (4, 2), 0xC9: (6, 4)}
    | {0xCA: (5, 0), 0xCB: (9, 0), 0xCC: (2, 0), 0xCD: (3, 0), 0xCE: (5, 0), 0xCF: (9, 0)}
    | {0xD0: (2, 0), 0xD1: (3, 0), 0xD2: (5, 0), 0xD3: (9, 0)}
    | {0xD4: (3, 0), 0xD5: (4, 0), 0xD6: (6, 0), 0xD7: (10, 0), 0xD8: (18, 0)}
    | {0xD9: (2, 1), 0xDA: (3, 2), 0xDB: (5, 4), 0xDC: (3, 0), 0xDD: (5, 0)}
    | {0xDE: (3, 0), 0xDF: (5, 0)}
)


def _check_items(body: bytes) -> None:
    """Raise `InvalidInput` for msgpack of too many items, without making any: it steps over them,
    and a list is one item before those in it."""
    at = 0
    for _ in range(_ITEMS_MAX):
        if at >= len(body):
            return
        own_bytes, length_bytes = _HEADS[body[at]]
        length = int.from_bytes(body[at + 1 : at + 1 + length_bytes], "big")
        at += own_bytes + length
    if at < len(body):
        raise InvalidInput("frame", f"holds more than {_ITEMS_MAX} items")


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
_RECORDS = (Inode, Blob, ChunkInfo)
_FIELDS = {kind: attrgetter(*(f.name for f in fields(kind))) for kind in _RECORDS}
_KINDS = {kind: [f.type for f in fields(kind)] for kind in _RECORDS}


def pack_record(record: Inode | Blob | ChunkInfo) -> list[Any]:
    """The fields of a flat record, in order."""
    return list(_FIELDS[type(record)](record))


def unpack_record(kind: type[Record], values: Any) -> Record:
    """The record again. Raises `InvalidInput` when the number or a type of its fields is wrong."""
    if not isinstance(values, list) or list(map(type, values)) != _KINDS[kind]:
        raise InvalidInput(kind.__name__, "does not have its fields")
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


def pack_holder(holder: Holder) -> list[Any]:
    return [
        holder.node_id,
        holder.state.value,
        holder.host,
        holder.address,
        holder.store,
        holder.is_this,
    ]


def unpack_holder(value: Any) -> Holder:
    """The holder again. Raises `InvalidInput`."""
    match value:
        case [bytes(node_id), str(word), str(host), str(address), str(store), bool(is_this)]:
            state = next((state for state in HolderState if state.value == word), None)
            if state is not None:
                return Holder(node_id, state, host, address, store, is_this)
    raise InvalidInput("holder", "does not have its fields")


def pack_chunk_keys(keys: ChunkKeys) -> list[Any]:
    return [keys.hashes, keys.hash_bytes, [list(part) for part in keys.parts]]


def unpack_chunk_keys(values: Any) -> ChunkKeys:
    """The keys again. Raises `InvalidInput`."""
    match values:
        case [bytes(hashes), int(hash_bytes), list(parts)]:
            check_batch(parts, list, BATCH_ITEMS_MAX, "parts")
            for part in parts:
                if list(map(type, part)) != [int, int]:
                    raise InvalidInput("part", "is not [group, shard]")
            return ChunkKeys(hashes, hash_bytes, tuple(map(tuple, parts)))
    raise InvalidInput("keys", "are not hashes, their length and parts")


def check_batch(values: Sequence[Any], kind: type, limit: int, what: str) -> None:
    """Refuse a batch that is too long or holds another type. Raises `InvalidInput`."""
    if not isinstance(values, list) or len(values) > limit:
        raise InvalidInput(what, f"must be a list of at most {limit}")
    for value in values:
        if type(value) is not kind:  # a bool is an int only to Python
            raise InvalidInput(what, f"a {type(value).__name__} is no {kind.__name__}")
