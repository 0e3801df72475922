"""Open directories: a place in a listing for every number that the kernel may come back with.

A listing goes on after a *cursor* (of the namespace: a name, since it lists in byte order); the
kernel asks for what follows a number. An open directory remembers which cursor has which number.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfs.config import LISTED_NAMES_MAX
from kvfs.errors import NamespaceError
from kvfs.meta.contract import Entry

_PAGE_ENTRIES = 128
_DOTS = 2  # positions 1 and 2 are `.` and `..`


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry, and the cursor that stands for the place behind it."""

    cursor: bytes
    entry: Entry


@dataclass(slots=True)
class OpenDirectory:
    """One opendir(). `list_after(cursor, limit)` lists what follows; b"" is the beginning."""

    number: int
    parent: int
    list_after: Callable[[bytes, int], Sequence[Listed]]
    cursors: list[bytes] = field(default_factory=list)  # at each position, from `first`
    first: int = _DOTS + 1

    def dots(self, position: int) -> list[tuple[int, bytes, int]]:
        """What is left of `.` and `..` after a position: position, name and number of each."""
        both = [(1, b".", self.number), (2, b"..", self.parent)]
        return both[position:]

    def after(self, position: int) -> list[tuple[int, Listed]]:
        """A page of entries that follow a position, each with its own; none at the end."""
        position = max(position, _DOTS)
        page = self.list_after(self._cursor_at(position), _PAGE_ENTRIES)
        return list(enumerate(page, start=position + 1))

    def note(self, position: int, cursor: bytes) -> None:
        """The kernel was given what has this cursor at a position."""
        del self.cursors[max(0, position - self.first) :]
        self.cursors.append(cursor)
        if len(self.cursors) > LISTED_NAMES_MAX:
            half = len(self.cursors) // 2
            del self.cursors[:half]
            self.first += half

    def _cursor_at(self, position: int) -> bytes:
        if position == _DOTS:
            return b""
        if not self.first <= position < self.first + len(self.cursors):
            raise NamespaceError(errno.EINVAL)  # seekdir further back than is remembered
        return self.cursors[position - self.first]
