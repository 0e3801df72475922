"""The embedded metadata engine: one LMDB database in the node's directory.

`engine` has the methods of the contract; this module opens the database, runs the transactions, and
says what is wrong with either.

Durability. A transaction is not synced, and the map is not written through memory, so that a killed
process loses nothing and can't corrupt anything: what was committed lies in the page cache. A crash
of the *machine* loses what came after the last `sync`, and since the kernel writes pages back in
any order it may leave a database that can't be read at all; nothing in it can then be trusted. The
node must treat metadata that was open when the machine went down as lost and rebuild it from the
files: that costs misses, never wrong bytes.
"""

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self, TypeVar

import lmdb

from kvfs.config import (
    META_BYTES_MAX,
    META_IDENTITY_BYTES,
    META_READERS_MAX,
    MIB,
    PAGE_BYTES,
)
from kvfs.errors import Corrupt, InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.meta import records
from kvfs.meta.batch import Batch
from kvfs.meta.contract import ROOT_INO, Inode, Usage
from kvfs.meta.engine import TableEngine
from kvfs.meta.lookups import Lookups
from kvfs.meta.records import State
from kvfs.meta.view import STATE_KEY, STATE_TABLE, TABLES_MAX, InodeCache, Tables, View

LAYOUT_VERSION = 1
_VERSION_KEY = b"version"
_IDENTITY_KEY = b"identity"
_COMMIT_BYTES = MIB  # what a transaction may write: with less room left, room is what it lacked
log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_LOCK_BYTES = 2 * PAGE_BYTES
_PAGE_SIZE = struct.Struct("=I")
_PAGE_SIZE_AT = 40  # in LMDB's first page: behind its header, magic, version, address, map size
_PAGE_SIZES = frozenset(PAGE_BYTES << shift for shift in range(5))  # that LMDB may have
# What says of this process, and not of the file, that it cannot be opened: a limit on its address
# space (`ulimit -v`) leaves no room for the map.
_NOT_OF_THE_FILE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM})
DISTRUST_MARK = "distrusted"  # in the database's directory, once a damaged page was met
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)
# A read says BadTxnError after the first of those; a write, after whatever ended it.
_DAMAGE_READ = (*_DAMAGE, lmdb.BadTxnError)
_NO_ROOM = "the disk has no room for metadata: free some, or raise min_free"


@dataclass(frozen=True, slots=True)
class Database:
    """An open database and its tables."""

    env: lmdb.Environment
    tables: Tables
    directory: Path
    is_new: bool  # made by `open`
    identity: bytes  # what no other database has

    @classmethod
    def open(cls, directory: Path, root: Inode, map_bytes: int = META_BYTES_MAX) -> "Database":
        """Open the database in `directory`, making both when they are missing, with `root`.

        Raises `InvalidInput` for a database of another version, `Corrupt` for one that is none,
        `OutOfSpace` and `Unavailable` when its disk takes none.
        """
        directory.mkdir(parents=True, exist_ok=True)
        _take_lock_room(directory / "lock.mdb")
        try:
            env = lmdb.open(
                os.fsencode(directory),
                map_size=map_bytes,
                max_dbs=TABLES_MAX,
                max_readers=META_READERS_MAX,
                sync=False,
                metasync=False,
                writemap=False,
                readahead=False,
                mode=0o600,
            )
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise Corrupt(
                str(directory), f"holds no metadata database ({error}); move it away and rebuild it"
            ) from error
        except lmdb.Error as error:
            raise Unavailable(f"{directory}: the metadata cannot be opened: {error}") from error
        try:
            with env.begin(write=True) as txn:
                is_new = _check_version(env, txn, directory)
                tables = Tables.open(env, txn)
                if is_new:
                    _lay_out(txn, tables, root)
                identity = _identify(txn, tables)
        except _DAMAGE as error:
            env.close()
            raise _distrust(directory, error) from error
        except lmdb.Error as error:
            env.close()
            raise _failure(error, directory) from error
        except BaseException:
            env.close()
            raise
        return cls(env, tables, directory, is_new, identity)

    def skip_inos(self, count: int) -> int:
        """Leave out so many inode numbers; the one that is next. Raises `OutOfSpace` and
        `Unavailable`."""
        try:
            with self.env.begin(write=True) as txn:
                raw = txn.get(STATE_KEY, db=self.tables.state)
                assert raw is not None
                state = records.decode_state(raw)
                state.next_ino += count
                txn.put(STATE_KEY, records.encode_state(state), db=self.tables.state)
        except lmdb.Error as error:
            raise _failure(error, self.directory) from error
        return state.next_ino


class LmdbEngine(TableEngine):
    """`MetaEngine` on LMDB; see there for what each method promises."""

    def __init__(self, database: "Database") -> None:
        self._env = database.env
        self._directory = database.directory
        self._tables = database.tables
        self.is_new = database.is_new  # made just now
        self.identity = database.identity
        self._cache = InodeCache()
        self._packed_totals: bytes | None = None  # as on record; None: not known
        self._lookups = Lookups(self.usage().inodes)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        root_uid: int = 0,
        root_gid: int = 0,
        now_ns: int | None = None,
        map_bytes: int = META_BYTES_MAX,
    ) -> Self:
        """Open the database in `directory`; `root_uid`, `root_gid` and `now_ns` are for a new root
        directory. Raises as `Database.open`."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        root = records.new_root(root_uid, root_gid, now_ns)
        return cls(Database.open(directory, root, map_bytes))

    def close(self) -> None:
        """Close the database; it is not synced."""
        self._env.close()

    def sync(self) -> None:
        """Make everything so far durable. Blocks; safe in a worker thread while others write.
        Raises `OutOfSpace` and `Unavailable`."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise _failure(error, self._directory) from error

    @contextmanager
    def _reading(self) -> Iterator[View]:
        try:
            with self._env.begin(self._tables.dirent) as txn:
                yield View(txn, self._tables, self._cache)
        except _DAMAGE_READ as error:
            raise _distrust(self._directory, error) from error

    def usage(self) -> Usage:
        if self._packed_totals is None:
            with self._reading_own() as view:
                self._packed_totals = view.packed_state()
        state = records.decode_state(self._packed_totals)
        return Usage(state.inodes, state.blobs, state.size_bytes, tuple(state.allocated_bytes))

    def _reading_own(self) -> AbstractContextManager[View]:
        return self._reading()

    @contextmanager
    def _writing(self) -> Iterator["lmdb.Transaction[bytes]"]:
        self._packed_totals = None
        try:
            with self._env.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise self._explain(error) from error

    def _explain(self, error: lmdb.Error) -> KvfsError:
        """What a transaction that could not be written means. Nothing of it was kept."""
        if isinstance(error, _DAMAGE):
            return _distrust(self._directory, error)
        return _failure(error, self._directory)

    def _write(self, change: Callable[[Batch], _Result]) -> _Result:
        known_totals, self._packed_totals = self._packed_totals, None
        try:  # not by `_writing`: this is what most changes of names wait for
            with self._env.begin(write=True) as txn:
                batch = Batch(txn, self._tables, self._cache, known_totals)
                result = change(batch)
                packed_totals = batch.finish()
        except lmdb.Error as error:
            raise self._explain(error) from error
        self._packed_totals = packed_totals
        batch.committed()
        self._lookups.note(batch)
        return result


def _take_lock_room(file: Path) -> None:
    """LMDB maps its lock file and writes there: on a full disk that would end the process."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(_NO_ROOM) from error
    finally:
        os.close(fd)


def find_damage(directory: Path) -> str | None:
    """Why a database file cannot be used, found without touching pages that are not there (which
    would end the process); None when it is whole as far as a look shows, or missing. Nothing is
    changed. OSError, where it cannot be read, says nothing of it and passes."""
    file = directory / "data.mdb"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as opened:
        size_bytes = os.fstat(fd).st_size
        head = opened.read(PAGE_BYTES)
    if size_bytes < 2 * PAGE_BYTES:
        return f"{file} is cut short"
    (page_bytes,) = _PAGE_SIZE.unpack_from(head, _PAGE_SIZE_AT)
    if page_bytes not in _PAGE_SIZES or 2 * page_bytes > size_bytes:  # LMDB would look beyond it
        return f"{file} is damaged (it says that its pages have {page_bytes} bytes)"
    try:
        with lmdb.open(
            os.fsencode(directory),
            readonly=True,
            lock=False,
            max_dbs=TABLES_MAX,
            map_size=META_BYTES_MAX,
        ) as env:
            if (env.info()["last_pgno"] + 1) * env.stat()["psize"] > size_bytes:
                return f"{file} is cut short"
            with env.begin() as txn:
                txn.stat()
                for table in fields(Tables):
                    env.open_db(table.name.encode(), txn=txn, create=False)
    except lmdb.NotFoundError:
        return None  # a table is missing: another version, about which `open` says more
    except lmdb.Error as error:
        if error.code in _NOT_OF_THE_FILE:
            raise OSError(error.code, os.strerror(error.code), str(file)) from error
        return f"{file} is damaged ({error})"
    return None


def _distrust(directory: Path, error: lmdb.Error) -> Corrupt:
    """Note, for the next start, that the database is damaged."""
    (directory / DISTRUST_MARK).touch()
    log.error("the metadata is damaged (%s); a restart rebuilds it from chunk files", error)
    return Corrupt(
        str(directory), f"a page of it is damaged ({error}); restart the node to rebuild it"
    )


def _failure(error: lmdb.Error, directory: Path) -> KvfsError:
    """What a transaction that could not be written means. Nothing of it was kept."""
    if isinstance(error, lmdb.MapFullError):
        return OutOfSpace("the metadata is full: remove files")
    # DiskError is py-lmdb's word for ENOSPC. A write that found room for its start is EIO to LMDB.
    disk = os.statvfs(directory)
    if isinstance(error, lmdb.DiskError) or disk.f_bavail * disk.f_frsize < _COMMIT_BYTES:
        return OutOfSpace(_NO_ROOM)
    return Unavailable(f"the metadata cannot be written: {error}; look at its disk, then restart")


def _check_version(env: lmdb.Environment, txn: "lmdb.Transaction[bytes]", directory: Path) -> bool:
    """Whether the database is new. Raises `InvalidInput` when another layout wrote it."""
    table = env.open_db(STATE_TABLE, txn=txn)
    raw = txn.get(_VERSION_KEY, db=table)
    if raw is None:
        return True
    version = int.from_bytes(raw, "little")
    if version != LAYOUT_VERSION:
        raise InvalidInput(
            str(directory),
            f"the metadata has layout {version}, this kvfs knows {LAYOUT_VERSION}; use the kvfs "
            "that wrote it, or move it away and rebuild it",
        )
    return False


def _identify(txn: "lmdb.Transaction[bytes]", tables: Tables) -> bytes:
    """What this database is told from others by; older ones get it when they are opened."""
    identity = txn.get(_IDENTITY_KEY, db=tables.state)
    if identity is None:
        identity = os.urandom(META_IDENTITY_BYTES)
        txn.put(_IDENTITY_KEY, identity, db=tables.state)
    return identity


def _lay_out(txn: "lmdb.Transaction[bytes]", tables: Tables, root: Inode) -> None:
    """Write what a new database holds: its version and an empty root."""
    txn.put(_VERSION_KEY, LAYOUT_VERSION.to_bytes(4, "little"), db=tables.state)
    txn.put(STATE_KEY, records.encode_state(State(next_ino=ROOT_INO + 1)), db=tables.state)
    batch = Batch(txn, tables, InodeCache())
    batch.store(root, None)
    txn.put(records.ROOT_DIRENT_KEY, records.encode_dirent(root), db=tables.dirent)
    batch.finish()
