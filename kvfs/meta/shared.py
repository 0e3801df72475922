"""The tables that all nodes of a cluster share, as one transaction sees them.

`SharedTransaction` is no transaction of the server: it reads records (through a cache, so perhaps
old ones), notes what it saw, and keeps what it writes. `Commit` is all of that, for one script on
the server to compare and to write, or to refuse.

A table of points has one value for each key. A table of groups is walked in order: the first bytes
of a key are its group, the rest its member; one of them has values as well.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvfs.config import CLUSTER_PAGE_MEMBERS
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.meta.records import ROOT_DIRENT_KEY, is_name

FIRST_PAGE_MEMBERS = (
    16  # most groups have one or two; and less read is less to be changed by others
)


NODE_ID_BYTES = 16


class SharedTable(Enum):
    """The letter of each table in the names of the server's keys."""

    INODE = "i"  # ino -> inode
    CHUNK = "c"  # ino -> chunk record
    DIRENT = "d"  # parent | name -> ino, size of a published file
    NAME = "n"  # ino | parent, name
    HOLDER = "h"  # digest | ino
    CHILD = "k"  # namespace, parent key | ino
    COPY = "o"  # digest | node id: who has the bytes
    LOOSE = "l"  # node id | ino: what that node has not finished; of interest to nobody else
    GONE = "g"  # node id -> since when its lease has been over; written by `members.lua`

    __hash__ = object.__hash__  # Enum's own is Python's slowest step in hearing what others do


# Numbers are given once, so that a new one's need not be told to anybody: as long as nobody keeps
# that they are missing.
KEPT_IF_THERE = (SharedTable.INODE, SharedTable.NAME)


_CHILD_HEAD_BYTES = 9


def _child_group_bytes(key: bytes) -> int:
    return 9 + key[8]  # namespace, length of the parent's key, that key


_GROUP_BYTES: dict[SharedTable, Callable[[bytes], int]] = {
    SharedTable.DIRENT: lambda _: 8,
    SharedTable.NAME: lambda _: 8,
    SharedTable.HOLDER: lambda _: DIGEST_BYTES,
    SharedTable.CHILD: _child_group_bytes,
    SharedTable.COPY: lambda _: DIGEST_BYTES,
    SharedTable.LOOSE: lambda _: NODE_ID_BYTES,
}


_MEMBER_BYTES = {
    SharedTable.HOLDER: 8,
    SharedTable.CHILD: 8,
    SharedTable.LOOSE: 8,
    SharedTable.COPY: NODE_ID_BYTES,
}
_POINT_BYTES = {SharedTable.INODE: 8, SharedTable.CHUNK: 8, SharedTable.GONE: NODE_ID_BYTES}


def is_member(table: SharedTable, member: bytes) -> bool:
    """Whether a node may have put it into a group of that table."""
    size_bytes = _MEMBER_BYTES.get(table)
    if size_bytes is not None:
        return len(member) == size_bytes
    return is_name(member[8:] if table is SharedTable.NAME else member)


def is_key(table: SharedTable, key: bytes) -> bool:
    """Whether a node may have written a record of that table there."""
    size_bytes = _POINT_BYTES.get(table)
    if size_bytes is not None:
        return len(key) == size_bytes
    if table is SharedTable.CHILD and len(key) < _CHILD_HEAD_BYTES:
        return False
    cut = _GROUP_BYTES[table](key)
    return len(key) >= cut and (is_member(table, key[cut:]) or key == ROOT_DIRENT_KEY)


@dataclass(frozen=True, slots=True)
class Record:
    """Where one value is, or one member of a group."""

    table: SharedTable
    key: bytes

    @property
    def is_grouped(self) -> bool:
        return self.table in _GROUP_BYTES

    def split(self) -> tuple[bytes, bytes]:
        """Group and member."""
        cut = _GROUP_BYTES[self.table](self.key)
        return self.key[:cut], self.key[cut:]


@dataclass(frozen=True, slots=True)
class Page:
    """Members of a group that are not less than `start`, in order, the first `limit`."""

    table: SharedTable
    group: bytes
    start: bytes
    limit: int


def copies_page(digest: bytes, limit: int = FIRST_PAGE_MEMBERS) -> Page:
    """The first of the nodes that have the bytes of a digest."""
    return Page(SharedTable.COPY, digest, b"", limit)


def holders_page(digest: bytes) -> Page:
    """The first of the files that hold a digest."""
    return Page(SharedTable.HOLDER, digest, b"", FIRST_PAGE_MEMBERS)


class Source(Protocol):
    """Where records come from; what they say may be old."""

    def values(self, wanted: Sequence[Record]) -> list[bytes | None]:
        """The value of each."""
        ...

    def members(self, page: Page) -> tuple[bytes, ...]: ...

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        """Directory entries by their keys; `records.NO_DIRENT` for none."""
        ...


@dataclass(slots=True)
class Commit:
    """What a transaction saw and wants."""

    values: dict[Record, bytes | None] = field(default_factory=dict)  # seen
    pages: dict[Page, tuple[bytes, ...]] = field(default_factory=dict)  # seen
    writes: dict[Record, bytes | None] = field(default_factory=dict)  # None: it goes
    was_sent: bool = False  # so that the server may have written, whatever it answered

    @property
    def is_empty(self) -> bool:
        return not (self.values or self.pages or self.writes)


class SharedTransaction:
    """See the module's docstring."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._new: dict[SharedTable, set[bytes]] = {}  # what is stored of these is nothing
        self.commit = Commit()

    def get(self, record: Record) -> bytes | None:
        """A value as this transaction sees it."""
        if record in self.commit.writes:
            return self.commit.writes[record]
        if self.is_new(record):
            return None
        seen = self.commit.values
        if record not in seen:
            [seen[record]] = self._source.values([record])
        return seen[record]

    def read_ahead(self, records: Sequence[Record]) -> None:
        """Have many values in one round trip."""
        seen = self.commit.values
        missing = [record for record in dict.fromkeys(records) if record not in seen]
        seen.update(zip(missing, self._source.values(missing), strict=True))

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        """Many directory entries, for who only reads: nothing is noted of what was seen."""
        assert not self.commit.writes
        return self._source.dirents(keys)

    def write(self, record: Record, value: bytes | None) -> None:
        """Set a value, or take it away with None."""
        self.commit.writes[record] = value

    def leave(self, record: Record) -> None:
        """Do not write it after all: it is as it should be."""
        del self.commit.writes[record]

    def members(self, table: SharedTable, group: bytes, start: bytes) -> Iterator[bytes]:
        """Members of a group that are not less than `start`, in order, as they are now: what is
        written between two steps may or may not show."""
        changed = {
            member: value is not None
            for record, value in self.commit.writes.items()
            if record.table is table
            for at, member in [record.split()]
            if at == group and member >= start
        }
        added = iter(sorted(member for member, is_there in changed.items() if is_there))
        waiting = next(added, None)
        for member in self._stored(table, group, start):
            while waiting is not None and waiting < member:
                yield waiting
                waiting = next(added, None)
            if waiting == member:
                waiting = next(added, None)
            if changed.get(member, True):
                yield member
        while waiting is not None:
            yield waiting
            waiting = next(added, None)

    def begin_new(self, table: SharedTable, key: bytes) -> None:
        """A value, or a group, that cannot be there yet, so that it is not asked for."""
        self._new.setdefault(table, set()).add(key)

    def is_new(self, record: Record) -> bool:
        """Whether it belongs to what could not be there before."""
        key = record.split()[0] if record.is_grouped else record.key
        return key in self._new.get(record.table, ())

    def _stored(self, table: SharedTable, group: bytes, start: bytes) -> Iterator[bytes]:
        if group in self._new.get(table, ()):
            return
        limit = FIRST_PAGE_MEMBERS
        while True:
            page = Page(table, group, start, limit)
            members = self.commit.pages.get(page)
            if members is None:
                members = self.commit.pages[page] = self._source.members(page)
            for member in members:
                if is_member(table, member):
                    yield member
            if len(members) < limit:
                return
            start, limit = members[-1] + b"\0", CLUSTER_PAGE_MEMBERS
