"""A trace of requests: when each came, and which blocks its prompt has.

The format is the public one of Mooncake: one JSON object a line, with `timestamp` (ms, never less
than in the line above), `input_length` and `output_length` (tokens), and `hash_ids`: numbers of the
prompt's blocks of 512 tokens, in order, where equal numbers mean equal prompts up to and with that
block. Other fields may be there, and empty lines.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from kvfs.config import REPLAY_LINE_BYTES_MAX, REPLAY_REQUEST_BLOCKS_MAX, REPLAY_REQUESTS_MAX
from kvfs.errors import InvalidInput

_BLOCK_MAX = 2**64 - 1
_TOKENS_MAX = 2**53
_AT_MS_MAX = 2.0**53


@dataclass(frozen=True, slots=True)
class Request:
    """One line. `at_s`: seconds since the first request."""

    at_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is longer than a trace may have, as of a device that never
    ends, no more than shows that, which `read_trace` refuses."""
    return iter(lambda: file.readline(REPLAY_LINE_BYTES_MAX + 1), b"")


def read_trace(name: str, lines: Iterable[bytes], limit: int | None = None) -> Iterator[Request]:
    """The first `limit` requests. Raises `InvalidInput` that names the line which is none."""
    first_ms: float | None = None
    last_ms = 0.0
    count = 0
    for number, line in enumerate(lines, 1):
        if len(line) <= REPLAY_LINE_BYTES_MAX and not line.strip():
            continue
        if count == limit:
            return
        if count == REPLAY_REQUESTS_MAX:
            raise InvalidInput(
                name, f"has more than {REPLAY_REQUESTS_MAX:,} requests; take fewer with --limit"
            )
        try:
            at_ms, request = _parse(line)
            if first_ms is not None and at_ms < last_ms:
                raise ValueError(f"timestamp {at_ms:g} is before the {last_ms:g} of the line above")
        except ValueError as error:
            raise InvalidInput(f"{name}, line {number}", str(error)) from None
        last_ms = at_ms
        first_ms = at_ms if first_ms is None else first_ms
        count += 1
        yield Request((at_ms - first_ms) / 1e3, *request)
    if not count:
        raise InvalidInput(name, "has no requests; each line is a JSON object with hash_ids")


def _parse(line: bytes) -> tuple[float, tuple[tuple[int, ...], int, int]]:
    """When, and blocks and tokens. ValueError says what is wrong."""
    if len(line) > REPLAY_LINE_BYTES_MAX:
        raise ValueError(
            f"is longer than {REPLAY_LINE_BYTES_MAX:,} bytes; name a file with one request a line"
        )
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); write the trace as"
            " UTF-8, one JSON object a line"
        ) from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("is no JSON object")
    at_ms = _field(fields, "timestamp")
    if (
        not isinstance(at_ms, int | float)
        or isinstance(at_ms, bool)
        or not 0 <= at_ms <= _AT_MS_MAX
    ):
        raise ValueError(f"timestamp {at_ms!r:.40} is no time in ms")
    tokens = []
    for key in ("input_length", "output_length"):
        value = _field(fields, key)
        if type(value) is not int or not 0 <= value <= _TOKENS_MAX:
            raise ValueError(f"{key} {value!r:.40} is no number of tokens")
        tokens.append(value)
    blocks = _field(fields, "hash_ids")
    if not isinstance(blocks, list) or not all(
        type(block) is int and 0 <= block <= _BLOCK_MAX for block in blocks
    ):
        raise ValueError(f"hash_ids {blocks!r:.40} is no list of numbers from 0 to 2**64 - 1")
    if len(blocks) > REPLAY_REQUEST_BLOCKS_MAX:
        raise ValueError(f"hash_ids are {len(blocks):,}; {REPLAY_REQUEST_BLOCKS_MAX:,} are allowed")
    return float(at_ms), (tuple(blocks), tokens[0], tokens[1])


def _field(fields: dict[str, object], key: str) -> object:
    try:
        return fields[key]
    except KeyError:
        raise ValueError(f"has no {key}") from None
