"""Reading the embedded engine within one transaction: its tables, and what is kept in memory."""

import errno
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import lmdb

from kvfs.config import META_INODES_CACHED_MAX, NAME_BYTES_MAX
from kvfs.errors import NamespaceError
from kvfs.meta import records
from kvfs.meta.contract import (
    AWAY,
    DIGEST_BYTES,
    ROOT_INO,
    Blob,
    Candidate,
    Inode,
)
from kvfs.meta.records import ChunkRecord, State, pack_native, pack_ordered

if TYPE_CHECKING:
    from lmdb import _Database

STATE_TABLE = b"state"
STATE_KEY = b"totals"


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of the database. `n`: key is one native word, else bytes in order."""

    state: "_Database"  # the version of the layout and the totals
    inode: "_Database"  # n ino -> inode
    dirent: "_Database"  # parent, name -> ino, size of a published file
    name: "_Database"  # ino, parent, name -> nothing
    blob: "_Database"  # digest -> blob
    holder: "_Database"  # digest, ino -> nothing
    doomed: "_Database"  # digest -> nothing
    intent: "_Database"  # digest, directory -> nothing
    loose: "_Database"  # ino of an orphan or unpublished file -> nothing
    chunk: "_Database"  # n ino -> chunk record
    child: "_Database"  # namespace, parent key, ino -> nothing
    used: "_Database"  # directory, used_ns, ino -> nothing
    stamp: "_Database"  # n ino -> use, of a node in a cluster
    holding: "_Database"  # digest -> which tiers have it, size
    promise: "_Database"  # digest that is to be copied to tiers -> nothing

    @classmethod
    def open(cls, env: lmdb.Environment, txn: "lmdb.Transaction[bytes]") -> "Tables":
        """Open the tables, making those that are missing."""
        native = {"inode", "chunk", "stamp"}
        return cls(
            *(
                env.open_db(f.name.encode(), txn=txn, integerkey=f.name in native)
                for f in fields(cls)
            )
        )


TABLES_MAX = len(fields(Tables))


def check_name(name: bytes) -> None:
    """Refuse what no file can be called."""
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise NamespaceError(errno.EINVAL, name)
    if len(name) > NAME_BYTES_MAX:
        raise NamespaceError(errno.ENAMETOOLONG, name)


class InodeCache:
    """Committed inodes, unpacked; bounded. Unpacking costs more than finding."""

    def __init__(self) -> None:
        # The oldest go one by one: letting all go at once took 40 ms.
        self._inodes: OrderedDict[int, Inode] = OrderedDict()
        self.get = self._inodes.get

    def put(self, inode: Inode) -> None:
        """Remember an inode as committed."""
        self._inodes[inode.ino] = inode
        if len(self._inodes) > META_INODES_CACHED_MAX:
            self._inodes.popitem(last=False)

    def discard(self, ino: int) -> None:
        """Forget an inode."""
        self._inodes.pop(ino, None)

    def clear(self) -> None:
        """Forget all."""
        self._inodes.clear()


class View:
    """Reading within one transaction."""

    def __init__(self, txn: "lmdb.Transaction[bytes]", tables: Tables, cache: InodeCache) -> None:
        self.txn = txn
        self.tables = tables
        self.cache = cache

    def keys(self, table: "_Database", prefix: bytes, after: bytes = b"") -> Iterator[bytes]:
        """Keys that begin with `prefix`, those behind `prefix + after`. The table may change only
        between full lists."""
        start = prefix + after
        with self.txn.cursor(table) as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            if found and after and cursor.key() == start:
                found = cursor.next()
            while found and (key := cursor.key()).startswith(prefix):
                yield key
                found = cursor.next()

    def read_ahead(self, table: "_Database", keys: Sequence[bytes]) -> None:
        """These will be asked for: worth a word where each question is a round trip."""

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        """Packed directory entries by their keys; `NO_DIRENT` for none."""
        get, nothing = self.txn.get, records.NO_DIRENT
        return [get(key, nothing) for key in keys]

    def read_inodes_ahead(self, inos: Iterable[int]) -> None:
        """As `read_ahead`; 0 is none."""

    def find(self, ino: int) -> Inode | None:
        """An inode, or None."""
        inode = self.cache.get(ino)
        if inode is None:
            inode = self._read(ino)
            if inode is not None:
                self.cache.put(inode)
        return inode

    def _read(self, ino: int) -> Inode | None:
        raw = self.txn.get(pack_native(ino), db=self.tables.inode)
        return None if raw is None else records.decode_inode(ino, raw)

    def inode(self, ino: int) -> Inode:
        """An inode that must be there: ENOENT."""
        found = self.find(ino)
        if found is None:
            raise NamespaceError(errno.ENOENT)
        return found

    def directory(self, ino: int) -> Inode:
        """A directory that must be there: ENOENT, ENOTDIR."""
        found = self.inode(ino)
        if not found.is_directory:
            raise NamespaceError(errno.ENOTDIR)
        return found

    def entry(self, parent: int, name: bytes) -> Inode | None:
        """What a name in a directory stands for, or None."""
        ino = self.entry_ino(parent, name)
        return self.inode(ino) if ino else None

    def entry_ino(self, parent: int, name: bytes) -> int:
        """Its number, or 0."""
        raw = self.txn.get(pack_ordered(parent) + name, db=self.tables.dirent)
        return 0 if raw is None or not records.is_dirent(raw) else records.dirent_ino(raw)

    def is_empty(self, directory: int) -> bool:
        """Whether a directory has no entries."""
        return next(self.keys(self.tables.dirent, pack_ordered(directory)), None) is None

    def names(self, ino: int) -> list[tuple[int, bytes]]:
        """All (parent, name) of an inode."""
        prefix = pack_ordered(ino)
        return [records.split_name_key(key) for key in self.keys(self.tables.name, prefix)]

    def first_parent(self, ino: int) -> int | None:
        """The directory of an inode's first name; None without a name; the root's is the root."""
        if ino == ROOT_INO:
            return ROOT_INO
        key = next(self.keys(self.tables.name, pack_ordered(ino)), None)
        return None if key is None else records.split_name_key(key)[0]

    def blob(self, digest: bytes) -> Blob | None:
        """A blob, doomed or not."""
        raw = self.txn.get(digest, db=self.tables.blob) if len(digest) == DIGEST_BYTES else None
        return None if raw is None else records.decode_blob(digest, raw)

    def tier_mask(self, digest: bytes) -> int:
        """Which tiers have the bytes of a digest, as far as this node knows."""
        raw = self.txn.get(digest, db=self.tables.holding) if len(digest) == DIGEST_BYTES else None
        return 0 if raw is None else records.holding_mask(raw)

    def holders(self, digest: bytes) -> list[int]:
        """The inodes whose content a digest is."""
        if len(digest) != DIGEST_BYTES:
            return []
        keys = self.keys(self.tables.holder, digest)
        return [int.from_bytes(key[len(digest) :], "big") for key in keys]

    def held_names(
        self, digest: bytes, after: tuple[int, int, bytes]
    ) -> Iterator[tuple[int, int, bytes]]:
        """(ino, parent, name) of each name of the files whose content a digest is, in order, those
        greater than `after`."""
        if len(digest) != DIGEST_BYTES:
            return
        first_ino, first_parent, first_name = after
        seek = pack_ordered(first_ino - 1) if first_ino else b""
        for key in self.keys(self.tables.holder, digest, seek):
            ino = int.from_bytes(key[len(digest) :], "big")
            begin = pack_ordered(first_parent) + first_name if ino == first_ino else b""
            for name_key in self.keys(self.tables.name, pack_ordered(ino), begin):
                yield (ino, *records.split_name_key(name_key))

    def chunk(self, ino: int) -> ChunkRecord | None:
        """The chunk record of an inode."""
        raw = self.txn.get(pack_native(ino), db=self.tables.chunk)
        return None if raw is None else records.decode_chunk(raw)

    def child_inos(self, namespace: int, parent: bytes, after: int) -> Iterator[int]:
        """Inodes of the chunks that continue a chunk, in order, those greater than `after`."""
        if len(parent) > records.CHUNK_KEY_BYTES_MAX:
            return
        prefix = records.child_prefix(namespace, parent)
        for key in self.keys(self.tables.child, prefix, pack_ordered(after)):
            yield int.from_bytes(key[len(prefix) :], "big")

    def ranked(self, directory: int, after: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """(used_ns, ino) in the eviction order of one store directory, greater than `after`."""
        used_ns, ino = after
        prefix = records.used_prefix(directory)
        behind = records.used_key(directory, used_ns, ino)[len(prefix) :]
        for key in self.keys(self.tables.used, prefix, behind):
            yield records.split_used_key(key)

    def newest_used_ns(self, directory: int) -> int:
        """The last stamp in the eviction order of one store directory, 0 when it is empty."""
        with self.txn.cursor(self.tables.used) as cursor:
            end = records.used_key(directory + 1, 0, 0)
            found = cursor.prev() if cursor.set_range(end) else cursor.last()
            if not found or not cursor.key().startswith(records.used_prefix(directory)):
                return 0
            return records.split_used_key(cursor.key())[0]

    def candidate(self, ino: int) -> Candidate | None:
        """A published file as eviction sees it; None where its bytes are not here."""
        raw = self.txn.get(pack_native(ino), db=self.tables.inode)
        use = None if raw is None else records.use_of(raw)
        blob = None if use is None else self.blob(use.digest)
        if use is None or blob is None or blob.directory == AWAY:
            return None
        return Candidate(
            ino,
            use.used_ns,
            use.digest,
            blob.directory,
            blob.allocated_bytes,
            blob.references,
            use.is_pinned,
        )

    def state(self) -> State:
        """The totals."""
        return records.decode_state(self.packed_state())

    def packed_state(self) -> bytes:
        """The totals as they are on record."""
        raw = self.txn.get(STATE_KEY, db=self.tables.state)
        assert raw is not None
        return raw
