"""Which file is read after which: a bounded table of what readers did, and nothing else.

For each file it counts what the same reader opened next. A reader that is new follows the last one
that was, as programs do that are run for one file each. Counts are halved as they grow, so that a
new habit overtakes an old one; the files that were read longest ago are forgotten. No I/O, no
clock: reads carry their time.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvfs.config import (
    PREFETCH_FILES_MAX,
    PREFETCH_FOLLOWERS_COUNTED,
    PREFETCH_FOLLOWERS_KEPT,
    PREFETCH_READ_AFTER_S,
    PREFETCH_READERS_MAX,
)

_SEEN_MIN = 2  # times that a file must have followed another


@dataclass(frozen=True, slots=True)
class _LastRead:
    ino: int
    at_ns: int


class Successors:
    """See the module's docstring. Files are inode numbers, readers any numbers of the caller's."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, dict[int, int]] = OrderedDict()  # the last read at the right
        self._readers: OrderedDict[int, _LastRead] = OrderedDict()  # the same
        self._first_read: _LastRead | None = None  # of the reader that came last

    def __len__(self) -> int:
        """Files of which is known what followed."""
        return len(self._rows)

    def note(self, ino: int, reader: int, now_ns: int) -> None:
        """A reader begins to read a file. What it read a moment before is followed by this one."""
        last, this = self._readers.pop(reader, None), _LastRead(ino, now_ns)
        if last is None:
            last, self._first_read = self._first_read, this
        self._readers[reader] = this
        if len(self._readers) > PREFETCH_READERS_MAX:
            self._readers.popitem(last=False)
        if last is None or last.ino == ino:
            return
        if now_ns - last.at_ns <= PREFETCH_READ_AFTER_S * 1e9:
            self._count(last.ino, ino)

    def _count(self, before: int, after: int) -> None:
        row = self._rows.setdefault(before, {})
        self._rows.move_to_end(before)
        row[after] = row.get(after, 0) + 1
        if len(row) > PREFETCH_FOLLOWERS_KEPT:
            del row[min((ino for ino in row if ino != after), key=lambda ino: row[ino])]
        if sum(row.values()) > PREFETCH_FOLLOWERS_COUNTED:
            halves = {ino: count // 2 for ino, count in row.items() if count > 1}
            self._rows[before] = halves
        if len(self._rows) > PREFETCH_FILES_MAX:
            self._rows.popitem(last=False)

    def after(self, ino: int, limit: int) -> list[int]:
        """The files that are likely to be read next, in order, at most `limit`: each has followed
        the one before in most of its reads, and more than once."""
        line: list[int] = []
        while len(line) < limit:
            follower = self._likeliest(line[-1] if line else ino)
            if follower is None or follower == ino or follower in line:
                break
            line.append(follower)
        return line

    def _likeliest(self, ino: int) -> int | None:
        row = self._rows.get(ino)
        if not row:
            return None
        follower, count = max(row.items(), key=lambda item: item[1])
        is_habit = count >= _SEEN_MIN and 2 * count > sum(row.values())
        return follower if is_habit else None
