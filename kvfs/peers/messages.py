"""What nodes say to each other, and the codec.

Pure: bytes in, objects out. A message is one flat msgpack array `[kind, number, field, ...]` of
integers, texts and bytes: no lists in it, no maps, no extensions. Batches are packed into one field
(digests end to end, little-endian records), so that nothing grows with what a stranger announces.

A request's number is larger than that of the one before it in its session; its reply carries the
same. A refusal of what can't be read has number 0. The bytes of a `Bytes` reply follow as a message
part of their own, so that they land in the caller's buffer without a detour.

Any bytes are a message or one `InvalidInput`.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum, unique
from typing import Any, NoReturn, TypeVar

import msgpack

from kvfs.config import (
    NAME_BYTES_MAX,
    PEER_BATCH_ITEMS_MAX,
    PEER_FRAME_BYTES_MAX,
    PEER_READ_BYTES_MAX,
    PEER_TEXT_BYTES_MAX,
)
from kvfs.errors import InvalidInput
from kvfs.meta.contract import DIGEST_BYTES

PEER_PROTOCOL = 1
NODE_ID_BYTES = 16
NONCE_BYTES = 16
TICKET_BYTES = 32

_INTEGER_MAX = 2**63 - 1
_PORT_MAX = 65_535
_RANGE = struct.Struct(f"<{DIGEST_BYTES}sQQ")
_SIZE = struct.Struct("<q")
_NONE = -1  # a size, or a length: not here
_NO_TICKET = bytes(TICKET_BYTES)
_VALUES_MAX = 8  # of a message, kind and number among them


@unique
class Code(IntEnum):
    """Why a request was refused."""

    INVALID = 1  # it breaks a rule; the session has ended
    REPLAY = 2  # its number does not grow; the session has ended
    NO_SESSION = 3  # say hello first, or again
    BUSY = 4  # too much is unanswered already
    FAILED = 5  # the node could not, for a reason of its own
    STRANGER = 6  # another cluster, or another version of this protocol


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a blob: at least one."""

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The first request of a session. `nonce` is new for each."""

    protocol: int
    cluster: str
    node_id: bytes
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of these blobs are here?"""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TicketsWanted:
    """Let me have these ranges through the bulk stream."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Let me have this range inside the channel; it has at most `PEER_READ_BYTES_MAX`."""

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Hints:
    """You will probably want these blobs soon."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HealthWanted:
    """How are you?"""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session is open. An empty `bulk_host` is the host that was connected to."""

    node_id: bytes
    nonce: bytes
    bulk_host: str
    bulk_port: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """For each digest of a `Lookup` the blob's size in bytes; None: not here."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Tickets:
    """For each range a ticket; None: not here, or not so long."""

    tickets: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of a `Read` follow as the next part of the message; None: not here."""

    length: int | None


@dataclass(frozen=True, slots=True)
class Done:
    """Hints were taken."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a node is: bytes that it could still store, load (0: idle, 1: busy), time since start."""

    free_bytes: int
    load: float
    uptime_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, and why."""

    code: Code
    text: str


Request = Hello | Lookup | TicketsWanted | Read | Hints | HealthWanted
Reply = Welcome | Sizes | Tickets | Bytes | Done | Health | Refusal
Message = TypeVar("Message", Request, Reply)


# Fields: a type on the wire, and two functions that raise InvalidInput --------------------------
@dataclass(frozen=True, slots=True)
class _Field:
    kind: type
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _refuse(subject: str, reason: str) -> NoReturn:
    raise InvalidInput(subject, reason)


def _same(check: Callable[[Any], Any], kind: type) -> _Field:
    """A field that travels as it is."""
    return _Field(kind, check, check)


def _integer(what: str, largest: int, least: int = 0) -> _Field:
    def check(value: int) -> int:
        if type(value) is not int or not least <= value <= largest:
            _refuse(what, f"{value!r:.40} is not in {least}..{largest}")
        return value

    return _same(check, int)


def _exact_bytes(what: str, size: int) -> _Field:
    def check(value: bytes) -> bytes:
        return _checked_size(what, value, size)

    return _same(check, bytes)


def _checked_size(what: str, value: bytes, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        _refuse(what, f"must be {size} bytes")
    return value


def _text(what: str, size_max: int) -> _Field:
    def check(value: str) -> str:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            _refuse(what, "is no UTF-8")
        if size > size_max:
            _refuse(what, f"has {size} bytes; {size_max} are the limit")
        if not value.isprintable():  # it goes to logs
            _refuse(what, "is not printable")
        return value

    return _same(check, str)


def _real(what: str) -> _Field:
    def check(value: float) -> float:
        if not math.isfinite(value) or value < 0:
            _refuse(what, f"{value!r:.40} is no finite number from 0 on")
        return value

    return _Field(float, lambda value: check(float(value)), check)


def _batch(
    what: str, item_bytes: int, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]
) -> _Field:
    """Items of one size, end to end in one field of bytes."""

    def check_count(count: int) -> None:
        if not 1 <= count <= PEER_BATCH_ITEMS_MAX:
            _refuse(what, f"{count} are not in 1..{PEER_BATCH_ITEMS_MAX}")

    def pack_all(items: tuple[Any, ...]) -> bytes:
        check_count(len(items))
        return b"".join(map(pack, items))

    def unpack_all(value: bytes) -> tuple[Any, ...]:
        count, rest = divmod(len(value), item_bytes)
        if rest:
            _refuse(what, f"{len(value)} bytes are no multiple of {item_bytes}")
        check_count(count)
        return tuple(
            unpack(value[begin : begin + item_bytes]) for begin in range(0, len(value), item_bytes)
        )

    return _Field(bytes, pack_all, unpack_all)


def _check_range(offset: int, length: int, longest: int = _INTEGER_MAX) -> None:
    for value, least, largest in ((offset, 0, _INTEGER_MAX), (length, 1, longest)):
        if type(value) is not int or not least <= value <= largest:
            _refuse("range", f"{value!r:.40} is not in {least}..{largest}")
    if offset + length > _INTEGER_MAX:
        _refuse("range", "ends behind any file")


def _pack_range(item: Range) -> bytes:
    _check_range(item.offset, item.length)
    return _RANGE.pack(_checked_size("digest", item.digest, DIGEST_BYTES), item.offset, item.length)


def _unpack_range(value: bytes) -> Range:
    digest, offset, length = _RANGE.unpack(value)
    _check_range(offset, length)
    return Range(digest, offset, length)


def _pack_size(size: int | None) -> bytes:
    if size is not None and not 0 <= size <= _INTEGER_MAX:
        _refuse("size", f"{size!r:.40} is none")
    return _SIZE.pack(_NONE if size is None else size)


def _unpack_size(value: bytes) -> int | None:
    (size,) = _SIZE.unpack(value)
    if size < _NONE:
        _refuse("size", f"{size} is negative")
    return None if size == _NONE else int(size)


def _pack_ticket(ticket: bytes | None) -> bytes:
    if ticket == _NO_TICKET:
        _refuse("ticket", "is all zero")
    return _NO_TICKET if ticket is None else _checked_size("ticket", ticket, TICKET_BYTES)


def _unpack_ticket(value: bytes) -> bytes | None:
    return None if value == _NO_TICKET else value


def _pack_length(length: int | None) -> int:
    return _NONE if length is None else _unpack_length(length) or 0


def _unpack_length(value: int) -> int | None:
    if not _NONE <= value <= PEER_READ_BYTES_MAX:
        _refuse("length", f"{value!r:.40} is not in {_NONE}..{PEER_READ_BYTES_MAX}")
    return None if value == _NONE else value


def _unpack_code(value: int) -> Code:
    try:
        return Code(value)
    except ValueError:
        _refuse("code", f"{value!r:.40} is none")


_DIGEST = _exact_bytes("digest", DIGEST_BYTES)
_NODE_ID = _exact_bytes("node id", NODE_ID_BYTES)
_NONCE = _exact_bytes("nonce", NONCE_BYTES)
_CLUSTER = _text("cluster", NAME_BYTES_MAX)
_OFFSET = _integer("offset", _INTEGER_MAX - PEER_READ_BYTES_MAX)
_DIGESTS = _batch("digests", DIGEST_BYTES, _DIGEST.pack, _DIGEST.unpack)
_LENGTH = _integer("length", PEER_READ_BYTES_MAX, least=1)

_REQUESTS: Mapping[type, tuple[int, tuple[_Field, ...]]] = {
    Hello: (1, (_integer("protocol", 2**16), _CLUSTER, _NODE_ID, _NONCE)),
    Lookup: (2, (_DIGESTS,)),
    TicketsWanted: (3, (_batch("ranges", _RANGE.size, _pack_range, _unpack_range),)),
    Read: (4, (_DIGEST, _OFFSET, _LENGTH)),
    Hints: (5, (_DIGESTS,)),
    HealthWanted: (6, ()),
}
_REPLIES: Mapping[type, tuple[int, tuple[_Field, ...]]] = {
    Welcome: (
        65,
        (_NODE_ID, _NONCE, _text("host", NAME_BYTES_MAX), _integer("port", _PORT_MAX, least=1)),
    ),
    Sizes: (66, (_batch("sizes", _SIZE.size, _pack_size, _unpack_size),)),
    Tickets: (67, (_batch("tickets", TICKET_BYTES, _pack_ticket, _unpack_ticket),)),
    Bytes: (68, (_Field(int, _pack_length, _unpack_length),)),
    Done: (69, ()),
    Health: (70, (_integer("free bytes", _INTEGER_MAX), _real("load"), _real("uptime"))),
    Refusal: (71, (_Field(int, int, _unpack_code), _text("text", PEER_TEXT_BYTES_MAX))),
}
_LAYOUTS = {**_REQUESTS, **_REPLIES}
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _LAYOUTS}
_REQUEST_KINDS = {number: (kind, layout) for kind, (number, layout) in _REQUESTS.items()}
_REPLY_KINDS = {number: (kind, layout) for kind, (number, layout) in _REPLIES.items()}


# The codec ----------------------------------------------------------------------------------------
def encode(number: int, message: Request | Reply) -> bytes:
    """One frame. Raises `InvalidInput` for what no node accepts."""
    kind, layout = _LAYOUTS[type(message)]
    values = [
        field.pack(getattr(message, name))
        for name, field in zip(_NAMES[type(message)], layout, strict=True)
    ]
    body: bytes = msgpack.packb([kind, number, *values], use_bin_type=True)
    return body


def decode_request(body: bytes) -> tuple[int, Request]:
    """A request and its number. Raises `InvalidInput`."""
    number, request = _decode(body, _REQUEST_KINDS, "request")
    return number, request


def decode_reply(body: bytes) -> tuple[int, Reply]:
    """A reply and the number of its request. Raises `InvalidInput`."""
    number, reply = _decode(body, _REPLY_KINDS, "reply")
    return number, reply


def shortened(text: str) -> str:
    """A text that fits a `Refusal`, whatever it holds."""
    printable = "".join(c if c.isprintable() else "?" for c in text[:PEER_TEXT_BYTES_MAX])
    whole = printable.encode()
    return whole[:PEER_TEXT_BYTES_MAX].decode(errors="ignore")


def _decode(
    body: bytes, kinds: Mapping[int, tuple[type, tuple[_Field, ...]]], what: str
) -> tuple[int, Any]:
    values = _unpack(body)
    if type(values) is not list or len(values) < 2 or list(map(type, values[:2])) != [int, int]:
        _refuse(what, "is not [kind, number, field, ...]")
    kind, layout = kinds.get(values[0], (None, ()))
    if kind is None:
        _refuse(what, f"{values[0]} is no kind of it")
    number = values[1]
    if not (0 if kind is Refusal else 1) <= number <= _INTEGER_MAX:
        _refuse(what, f"{number} is no number")
    if list(map(type, values[2:])) != [field.kind for field in layout]:
        _refuse(what, f"does not have the fields of {kind.__name__}")
    unpacked = [field.unpack(value) for field, value in zip(layout, values[2:], strict=True)]
    return number, kind(*unpacked)


def _unpack(body: bytes) -> Any:
    if len(body) > PEER_FRAME_BYTES_MAX:
        _refuse("message", f"has {len(body)} bytes; {PEER_FRAME_BYTES_MAX} are the limit")
    lists = 0

    def count(values: list[Any]) -> list[Any]:
        nonlocal lists
        lists += 1
        if lists > 1:
            raise ValueError("a list in a list")
        return values

    try:
        return msgpack.unpackb(
            body,
            raw=False,
            list_hook=count,
            object_hook=_refuse_kind,  # for empty maps, which no length keeps out
            ext_hook=_refuse_kind,
            max_map_len=0,
            max_ext_len=0,
            max_array_len=_VALUES_MAX,
            max_str_len=PEER_TEXT_BYTES_MAX,
            max_bin_len=PEER_FRAME_BYTES_MAX,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise InvalidInput("message", f"is no msgpack of ours: {error}") from error


def _refuse_kind(*values: Any) -> NoReturn:
    raise ValueError("no message has maps or extensions")
