"""The feed of a cluster's changes since some entry: the question, and what an answer says.

A node asks this before it answers anybody, so that it has a codec of its own (`kvfs.meta.exchange`
says why)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.config import CLUSTER_NEWS_ENTRIES
from kvfs.meta.exchange import Unexpected
from kvfs.meta.journal import Point
from kvfs.meta.shared import NODE_ID_BYTES

MARK_BYTES = 16
FEED_END = 2**63  # behind every entry of the feed: who begins there wants its number only
_COUNTERS = (b"epoch", b"inodes", b"seq", b"mark")
_COUNTER_DIGITS = 15  # as the scripts take it, whose numbers are exact as far as that
_STRING, _ARRAY = b"$*"
_DEPTH_MAX = 3  # arrays in arrays: entries, one of them, its fields


@dataclass(frozen=True, slots=True)
class News:
    """The feed since some entry, at most so much of it that there may be `more`."""

    epoch: bytes
    inodes: int
    last: Point  # the last entry that the server has
    seen: bytes  # the mark of the entry since which this is; empty where the feed has it no more
    entries: tuple[tuple[Point, bytes, bytes], ...]  # where, which node, what it wrote of it

    def continues(self, known: Point) -> bool:
        """Whether the server has all that a node knew of when it asked; a feed that was cut does
        not say, and then it counts as so."""
        if not known.sequence or known == self.last:
            return True
        return known.sequence < self.last.sequence and self.seen in (known.mark, b"")


class NewsAnswer(NamedTuple):
    """As the server said it: its counters, and entries by their ids; None for no feed."""

    counters: list[bytes | None]
    entries: list[tuple[bytes, Mapping[bytes, bytes] | None]] | None


class NewsQuestion:
    """What is asked of the server, once: its counters, then the feed from an entry on."""

    def __init__(self, prefix: bytes, after: int) -> None:
        """`prefix`: of all keys on the server. `after`: the number of that entry."""
        self.counters = [prefix + name for name in _COUNTERS]
        self.feed = prefix + b"feed"
        self.bounds = f"{after}-0", "+", CLUSTER_NEWS_ENTRIES + 1
        # What was read of the answer, which may be large, and come in many parts.
        self._counters: list[bytes | None] | None = None
        self._count = -1
        self._entries: list[tuple[bytes, Mapping[bytes, bytes] | None]] = []
        self._at = 0

    def pack(self) -> Iterator[bytes]:
        """As `Question.pack`."""
        bounds = [str(bound).encode() for bound in self.bounds]
        yield _pack(b"MGET", *self.counters) + _pack(
            b"XRANGE", self.feed, *bounds[:2], b"COUNT", bounds[2]
        )

    def read(self, answer: bytearray) -> NewsAnswer | None:
        """As `Question.read`."""
        try:
            if self._counters is None:
                self._counters, self._at = _read(answer, 0)
            if self._count < 0:
                self._count, self._at = _read_size(answer, self._at, _ARRAY)
                if self._count < 0:
                    raise Unexpected
            while len(self._entries) < self._count:
                (entry_id, fields), self._at = _read(answer, self._at)
                pairs = fields and dict(zip(fields[::2], fields[1::2], strict=True))
                self._entries.append((entry_id, pairs))
            if self._at != len(answer) or len(self._counters) != len(self.counters):
                raise Unexpected
        except _Partial:
            return None
        except (TypeError, ValueError) as error:
            raise Unexpected from error
        return NewsAnswer(self._counters, self._entries)


class _Partial(Exception):
    """More of an answer is to come."""


def _pack(*words: bytes) -> bytes:
    """A command."""
    return b"*%d\r\n%b" % (len(words), b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words))


def _read_size(answer: bytearray, at: int, kind: int) -> tuple[int, int]:
    """The size of a string or an array, and where it begins. Raises `_Partial` where more is to
    come, and `Unexpected` for anything else."""
    if at < len(answer) and answer[at] != kind:
        raise Unexpected
    end = answer.find(b"\r\n", at)
    if end < 0:
        raise _Partial
    try:
        return int(answer[at + 1 : end]), end + 2
    except ValueError as error:
        raise Unexpected from error


def _read(answer: bytearray, at: int, depth: int = _DEPTH_MAX) -> tuple[Any, int]:
    """A string, or an array of such; and where the next one begins. Raises as `_read_size`."""
    if at < len(answer) and answer[at] == _ARRAY:
        if depth == 0:
            raise Unexpected
        size, at = _read_size(answer, at, _ARRAY)
        if size < 0:
            return None, at
        items = []
        for _ in range(size):
            item, at = _read(answer, at, depth - 1)
            items.append(item)
        return items, at
    size, at = _read_size(answer, at, _STRING)
    if size < 0:
        return None, at
    end = at + size
    if len(answer) < end + 2:
        raise _Partial
    return bytes(answer[at:end]), end + 2


def read_news(answer: NewsAnswer, after: int, known_epoch: bytes) -> News | None:
    """What it means; None where a counter or the feed is lost. Of another epoch nothing else says
    anything. Entries that no node wrote are left out."""
    (epoch, raw_inodes, raw_sequence, mark), entries = answer
    inodes, sequence = _read_counter(raw_inodes), _read_counter(raw_sequence)
    if epoch != known_epoch:
        return News(epoch or b"", inodes or 0, Point(sequence or 0, mark or b""), b"", ())
    if inodes is None or sequence is None or entries is None:
        return None
    read = (read_entry(entry_id, fields) for entry_id, fields in entries)
    shown = [entry for entry in read if entry is not None]
    seen = shown.pop(0)[0].mark if shown and shown[0][0].sequence == after else b""
    # The entries were asked for after the number: one may have come between.
    last = Point(sequence, mark or b"")
    if shown and shown[-1][0].sequence > last.sequence:
        last = shown[-1][0]
    return News(epoch, inodes, last, seen, tuple(shown))


def read_entry(
    entry_id: bytes, fields: Mapping[bytes, bytes] | None
) -> tuple[Point, bytes, bytes] | None:
    """An entry of the feed; None for one that no node wrote."""
    number = _read_counter(entry_id.removesuffix(b"-0"))
    words = fields.get(b"") if fields and len(fields) == 1 else None
    mark_end = NODE_ID_BYTES + MARK_BYTES
    if number is None or words is None or len(words) < mark_end:
        return None
    at = Point(number, words[NODE_ID_BYTES:mark_end])
    return at, words[:NODE_ID_BYTES], words[mark_end:]


def _read_counter(raw: bytes | None) -> int | None:
    """A number that the scripts wrote; None for anything else, which they make anew."""
    if raw is None or len(raw) > _COUNTER_DIGITS or not raw.isdigit():
        return None
    return int(raw)
