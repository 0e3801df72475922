"""What a node of a cluster keeps of the shared tables in its own database: records that it wrote,
or read on the way to a write. They are what it knows while it is cut off from the server, and what
it fills a server with that has lost everything.

Of directories only names matter, so that their time stamps, which everybody changes, may be old.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvfs.errors import Corrupt
from kvfs.meta import records
from kvfs.meta.contract import ChunkInfo, Inode
from kvfs.meta.records import pack_native, pack_ordered
from kvfs.meta.shared import Commit, Page, Record, SharedTable, is_key
from kvfs.meta.unreadable import UNREADABLE
from kvfs.meta.view import Tables

if TYPE_CHECKING:
    import lmdb
    from lmdb import _Database


class Mirror:
    """Within one transaction of the database."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", tables: Tables) -> None:
        self._txn = txn
        self._tables: dict[SharedTable, _Database] = {
            SharedTable.INODE: tables.inode,
            SharedTable.CHUNK: tables.chunk,
            SharedTable.DIRENT: tables.dirent,
            SharedTable.NAME: tables.name,
        }

    def value(self, record: Record) -> bytes | None:
        """What was known last."""
        table = self._tables.get(record.table)
        return None if table is None else self._txn.get(record.key, db=table)

    def inode(self, ino: int) -> Inode | None:
        """An inode as it was known last."""
        raw = self.value(inode_record(ino))
        try:
            return None if raw is None else records.decode_inode(ino, raw)
        except Corrupt as error:  # an older version kept whatever the server said
            UNREADABLE.note(error)
            return None

    def chunk(self, ino: int) -> ChunkInfo | None:
        """As `inode`, what is known of it as a chunk."""
        raw = self.value(chunk_record(ino))
        try:
            return None if raw is None else records.decode_chunk(raw).info
        except Corrupt as error:
            UNREADABLE.note(error)
            return None

    def members(self, page: Page) -> tuple[bytes, ...]:
        """The names of a directory that were known last."""
        if page.table is not SharedTable.DIRENT:
            return ()
        found: list[bytes] = []
        for key in self._keys(page.group + page.start):
            if len(found) == page.limit or not key.startswith(page.group):
                break
            found.append(key[len(page.group) :])
        return tuple(found)

    def names(self, parent: int, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Names and inode numbers of a directory, those behind `after`."""
        page = Page(SharedTable.DIRENT, pack_ordered(parent), after + b"\0" * bool(after), limit)
        found = []
        for name in self.members(page):
            raw = self._txn.get(page.group + name, db=self._tables[SharedTable.DIRENT])
            assert raw is not None
            found.append((name, records.dirent_ino(raw)))
        return found

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        """All (parent, name) of an inode that are known."""
        prefix = pack_ordered(ino)
        found = []
        for key in self._keys(prefix, SharedTable.NAME):
            if not key.startswith(prefix):
                break
            found.append(records.split_name_key(key))
        return found

    def _keys(self, start: bytes, table: SharedTable = SharedTable.DIRENT) -> Iterator[bytes]:
        with self._txn.cursor(self._tables[table]) as cursor:
            found = cursor.set_range(start)
            while found:
                yield cursor.key()
                found = cursor.next()

    def learn(self, commit: Commit) -> None:
        """A transaction of this node went through."""
        for record, value in (commit.values | commit.writes).items():
            self.put(record, value)

    def put(self, record: Record, value: bytes | None) -> None:
        """This is how a record is now; None: it is not."""
        table = self._tables.get(record.table)
        if table is None or not is_key(record.table, record.key):
            return
        if value is None or not _is_sound(record, value):
            self._txn.delete(record.key, db=table)
        else:
            self._txn.put(record.key, value, db=table)

    def outdated(self, changed: Iterable[Record]) -> Sequence[Record]:
        """Those of the records that others changed of which what is known here matters."""
        return [record for record in changed if self._matters(record)]

    def renamed(self, changed: Iterable[Record]) -> list[Record]:
        """Those of the names that others gave or took away that are of inodes known here."""
        return [
            record
            for record in changed
            if record.table is SharedTable.NAME
            and self.value(inode_record(_inode_of(record))) is not None
        ]

    def _matters(self, record: Record) -> bool:
        if record.table is SharedTable.NAME:
            return False  # see `renamed`
        known = self.value(record)
        if record.table is SharedTable.CHUNK:
            return self.value(Record(SharedTable.INODE, record.key)) is not None
        if known is None or record.table is not SharedTable.INODE:
            return known is not None
        inode = self.inode(int.from_bytes(record.key, "little"))
        return inode is None or not inode.is_directory


def _is_sound(record: Record, value: bytes) -> bool:
    try:
        if record.table is SharedTable.INODE:
            records.decode_inode(int.from_bytes(record.key, "little"), value)
        elif record.table is SharedTable.CHUNK:
            records.decode_chunk(value)
    except Corrupt as error:
        UNREADABLE.note(error)
        return False
    return record.table is not SharedTable.DIRENT or records.is_dirent(value)


def _inode_of(name: Record) -> int:
    """Whose name it is."""
    return int.from_bytes(name.split()[0], "big")


def inode_record(ino: int) -> Record:
    """Where an inode is."""
    return Record(SharedTable.INODE, pack_native(ino))


def chunk_record(ino: int) -> Record:
    """Where the chunk record of an inode is."""
    return Record(SharedTable.CHUNK, pack_native(ino))
