"""One transaction over both kinds of tables: those that all nodes of a cluster share, and those of
this node's own files."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvfs.meta.shared import Record, SharedTable, SharedTransaction
from kvfs.meta.view import Tables

if TYPE_CHECKING:
    import lmdb
    from lmdb import _Database


class ClusterTransaction:
    """What `View` and `Batch` use of a transaction of LMDB, over both kinds of tables."""

    def __init__(
        self, local: "lmdb.Transaction[bytes]", shared: SharedTransaction, tables: Tables
    ) -> None:
        self.shared = shared
        self._local = local
        self._dirent = tables.dirent
        self._shared_tables = {
            tables.inode: SharedTable.INODE,
            tables.chunk: SharedTable.CHUNK,
            tables.dirent: SharedTable.DIRENT,
            tables.name: SharedTable.NAME,
            tables.holder: SharedTable.HOLDER,
            tables.child: SharedTable.CHILD,
        }

    def get(
        self, key: bytes, default: bytes | None = None, db: "_Database | None" = None
    ) -> bytes | None:
        table = self._shared_tables.get(db or self._dirent)
        if table is None:
            return self._local.get(key, default, db=db)
        value = self.shared.get(Record(table, key))
        return default if value is None else value

    def put(self, key: bytes, value: bytes, db: "_Database") -> None:
        table = self._shared_tables.get(db)
        if table is None:
            self._local.put(key, value, db=db)
        else:
            self.shared.write(Record(table, key), value)

    def delete(self, key: bytes, db: "_Database") -> bool:
        """Whether it was there, of a table of this node; always true of a shared one."""
        table = self._shared_tables.get(db)
        if table is None:
            return self._local.delete(key, db=db)
        self.shared.write(Record(table, key), None)
        return True

    def pop(self, key: bytes, db: "_Database") -> bytes | None:
        value = self.get(key, db=db)
        if value is not None:
            self.delete(key, db)
        return value

    def cursor(self, db: "_Database") -> "lmdb.Cursor[bytes] | _GroupCursor":
        table = self._shared_tables.get(db)
        return self._local.cursor(db) if table is None else _GroupCursor(self.shared, table)

    def read_ahead(self, db: "_Database", keys: Sequence[bytes]) -> None:
        """Have many values of a shared table in one round trip."""
        table = self._shared_tables[db]
        self.shared.read_ahead([Record(table, key) for key in keys])


class _GroupCursor:
    """A walk within one group: it ends where that ends."""

    def __init__(self, shared: SharedTransaction, table: SharedTable) -> None:
        self._shared = shared
        self._table = table
        self._members: Iterator[bytes] = iter(())
        self._group = self._member = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def set_range(self, start: bytes) -> bool:
        self._group, member = Record(self._table, start).split()
        self._members = self._shared.members(self._table, self._group, member)
        return self.next()

    def next(self) -> bool:
        member = next(self._members, None)
        if member is None:
            return False
        self._member = member
        return True

    def key(self) -> bytes:
        return self._group + self._member
