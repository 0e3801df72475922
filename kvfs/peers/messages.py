"""What nodes say to each other, and the codec.

Pure: bytes in, objects out. A message is one flat msgpack array `[kind, number, field, ...]` of
integers, texts and bytes: no lists in it, no maps, no extensions. Batches are packed into one field
(digests end to end, little-endian records), so that nothing grows with what a stranger announces.

A request's number is larger than that of the one before it in its session; its reply carries the
same. A refusal of what can't be read has number 0. The bytes of a `Bytes` reply follow as a message
part of their own, so that they land in the caller's buffer without a detour.

Any bytes are a message or one `InvalidInput`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum, unique
from typing import Any, NoReturn, TypeVar

import msgpack

from kvfs.config import (
    NAME_BYTES_MAX,
    PEER_FRAME_BYTES_MAX,
    PEER_READ_BYTES_MAX,
    PEER_TEXT_BYTES_MAX,
)
from kvfs.errors import InvalidInput
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.peers.fields import (
    Field,
    batch,
    checked_size,
    exact_bytes,
    integer,
    real,
    refuse,
    text,
)

PEER_PROTOCOL = 2
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
    """You will probably want these blobs soon. `spare_only`, 0 or 1: at the cost of nothing that
    you have."""

    digests: tuple[bytes, ...]
    spare_only: int = 0


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


# What the fields hold ---------------------------------------------------------------------------
def _check_range(offset: int, length: int) -> None:
    for value, least in ((offset, 0), (length, 1)):
        if type(value) is not int or not least <= value <= _INTEGER_MAX:
            refuse("range", f"{value!r:.40} is not in {least}..{_INTEGER_MAX}")
    if offset + length > _INTEGER_MAX:
        refuse("range", "ends behind any file")


def _pack_range(item: Range) -> bytes:
    _check_range(item.offset, item.length)
    return _RANGE.pack(checked_size("digest", item.digest, DIGEST_BYTES), item.offset, item.length)


def _unpack_range(value: bytes) -> Range:
    digest, offset, length = _RANGE.unpack(value)
    _check_range(offset, length)
    return Range(digest, offset, length)


def _pack_size(size: int | None) -> bytes:
    if size is not None and not 0 <= size <= _INTEGER_MAX:
        refuse("size", f"{size!r:.40} is none")
    return _SIZE.pack(_NONE if size is None else size)


def _unpack_size(value: bytes) -> int | None:
    (size,) = _SIZE.unpack(value)
    if size < _NONE:
        refuse("size", f"{size} is negative")
    return None if size == _NONE else int(size)


def _pack_ticket(ticket: bytes | None) -> bytes:
    if ticket == _NO_TICKET:
        refuse("ticket", "is all zero")
    return _NO_TICKET if ticket is None else checked_size("ticket", ticket, TICKET_BYTES)


def _unpack_ticket(value: bytes) -> bytes | None:
    return None if value == _NO_TICKET else value


def _pack_length(length: int | None) -> int:
    return _NONE if length is None else int(_LENGTH.pack(length))


def _unpack_length(value: int) -> int | None:
    return None if value == _NONE else int(_LENGTH.unpack(value))


def _unpack_code(value: int) -> Code:
    try:
        return Code(value)
    except ValueError:
        refuse("code", f"{value!r:.40} is none")


_DIGEST = exact_bytes("digest", DIGEST_BYTES)
_NODE_ID = exact_bytes("node id", NODE_ID_BYTES)
_NONCE = exact_bytes("nonce", NONCE_BYTES)
_CLUSTER = text("cluster", NAME_BYTES_MAX)
_OFFSET = integer("offset", _INTEGER_MAX - PEER_READ_BYTES_MAX)
_DIGESTS = batch("digests", DIGEST_BYTES, _DIGEST.pack, _DIGEST.unpack)
_LENGTH = integer("length", PEER_READ_BYTES_MAX, least=1)

_REQUESTS: Mapping[type, tuple[int, tuple[Field, ...]]] = {
    Hello: (1, (integer("protocol", 2**16), _CLUSTER, _NODE_ID, _NONCE)),
    Lookup: (2, (_DIGESTS,)),
    TicketsWanted: (3, (batch("ranges", _RANGE.size, _pack_range, _unpack_range),)),
    Read: (4, (_DIGEST, _OFFSET, _LENGTH)),
    Hints: (5, (_DIGESTS, integer("spare_only", 1))),
    HealthWanted: (6, ()),
}
_REPLIES: Mapping[type, tuple[int, tuple[Field, ...]]] = {
    Welcome: (
        65,
        (_NODE_ID, _NONCE, text("host", NAME_BYTES_MAX), integer("port", _PORT_MAX, least=1)),
    ),
    Sizes: (66, (batch("sizes", _SIZE.size, _pack_size, _unpack_size),)),
    Tickets: (67, (batch("tickets", TICKET_BYTES, _pack_ticket, _unpack_ticket),)),
    Bytes: (68, (Field(int, _pack_length, _unpack_length),)),
    Done: (69, ()),
    Health: (70, (integer("free bytes", _INTEGER_MAX), real("load"), real("uptime"))),
    Refusal: (71, (Field(int, int, _unpack_code), text("text", PEER_TEXT_BYTES_MAX))),
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


def shortened(reason: str) -> str:
    """A text that fits a `Refusal`, whatever it holds."""
    printable = "".join(c if c.isprintable() else "?" for c in reason[:PEER_TEXT_BYTES_MAX])
    return printable.encode()[:PEER_TEXT_BYTES_MAX].decode(errors="ignore")


def _decode(
    body: bytes, kinds: Mapping[int, tuple[type, tuple[Field, ...]]], what: str
) -> tuple[int, Any]:
    values = _unpack(body)
    if type(values) is not list or len(values) < 2 or list(map(type, values[:2])) != [int, int]:
        refuse(what, "is not [kind, number, field, ...]")
    kind, layout = kinds.get(values[0], (None, ()))
    if kind is None:
        refuse(what, f"{values[0]} is no kind of it")
    number = values[1]
    if not (0 if kind is Refusal else 1) <= number <= _INTEGER_MAX:
        refuse(what, f"{number} is no number")
    if list(map(type, values[2:])) != [field.kind for field in layout]:
        refuse(what, f"does not have the fields of {kind.__name__}")
    unpacked = [field.unpack(value) for field, value in zip(layout, values[2:], strict=True)]
    return number, kind(*unpacked)


def _unpack(body: bytes) -> Any:
    if len(body) > PEER_FRAME_BYTES_MAX:
        refuse("message", f"has {len(body)} bytes; {PEER_FRAME_BYTES_MAX} are the limit")
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
