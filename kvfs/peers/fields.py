"""The kinds of fields that messages between nodes have. Pure.

Each has a type on the wire and two functions, for either way; both raise `InvalidInput` for what
breaks a rule, so that nothing is sent that nobody accepts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from kvfs.config import PEER_BATCH_ITEMS_MAX
from kvfs.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Field:
    """`kind` is exact: a bool is no integer here."""

    kind: type
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def refuse(subject: str, reason: str) -> NoReturn:
    raise InvalidInput(subject, reason)


def same(check: Callable[[Any], Any], kind: type) -> Field:
    """A field that travels as it is."""
    return Field(kind, check, check)


def integer(what: str, largest: int, least: int = 0) -> Field:
    def check(value: int) -> int:
        if type(value) is not int or not least <= value <= largest:
            refuse(what, f"{value!r:.40} is not in {least}..{largest}")
        return value

    return same(check, int)


def exact_bytes(what: str, size: int) -> Field:
    def check(value: bytes) -> bytes:
        return checked_size(what, value, size)

    return same(check, bytes)


def checked_size(what: str, value: bytes, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        refuse(what, f"must be {size} bytes")
    return value


def text(what: str, size_max: int) -> Field:
    def check(value: str) -> str:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            refuse(what, "is no UTF-8")
        if size > size_max:
            refuse(what, f"has {size} bytes; {size_max} are the limit")
        if not value.isprintable():  # it goes to logs
            refuse(what, "is not printable")
        return value

    return same(check, str)


def real(what: str) -> Field:
    def check(value: float) -> float:
        if not math.isfinite(value) or value < 0:
            refuse(what, f"{value!r:.40} is no finite number from 0 on")
        return value

    return Field(float, lambda value: check(float(value)), check)


def batch(
    what: str, item_bytes: int, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]
) -> Field:
    """Items of one size, end to end in one field of bytes."""

    def check_count(count: int) -> None:
        if not 1 <= count <= PEER_BATCH_ITEMS_MAX:
            refuse(what, f"{count} are not in 1..{PEER_BATCH_ITEMS_MAX}")

    def pack_all(items: tuple[Any, ...]) -> bytes:
        check_count(len(items))
        return b"".join(map(pack, items))

    def unpack_all(value: bytes) -> tuple[Any, ...]:
        count, rest = divmod(len(value), item_bytes)
        if rest:
            refuse(what, f"{len(value)} bytes are no multiple of {item_bytes}")
        check_count(count)
        return tuple(
            unpack(value[begin : begin + item_bytes]) for begin in range(0, len(value), item_bytes)
        )

    return Field(bytes, pack_all, unpack_all)
