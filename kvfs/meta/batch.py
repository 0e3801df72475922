"""Writing the embedded engine within one transaction, so that every index stays true.

`Batch.store` is the one place where an inode changes. It derives from the inode before and after
what the other tables must say: the eviction order, the set of loose inodes, the blob's references,
sizes in directory entries, the chunk record. So rules above it need not remember any of them.
"""

import errno
from dataclasses import replace

import lmdb

from kvfs.errors import Corrupt, NamespaceError
from kvfs.meta import records
from kvfs.meta.contract import AWAY, Blob, ChunkInfo, Inode, Publication
from kvfs.meta.records import ChunkRecord, pack_native, pack_ordered
from kvfs.meta.unreadable import UNREADABLE
from kvfs.meta.view import STATE_KEY, InodeCache, Tables, View
from kvfs.names import CHUNK_SUFFIX


def is_ranked(inode: Inode) -> bool:
    """Whether eviction may see a file."""
    return bool(inode.digest) and inode.nlink > 0 and not inode.pinned


def _place_in_order(inode: Inode | None) -> tuple[int, bytes] | None:
    """What an inode says of its place in the order of eviction; None for none. The rest, where its
    blob lies, is the same for all that hold that."""
    return (inode.used_ns, inode.digest) if inode is not None and is_ranked(inode) else None


def is_loose(inode: Inode) -> bool:
    """Whether a restart drops an inode: an orphan, or a file without content."""
    return inode.nlink == 0 or (inode.is_regular and not inode.digest)


class Batch(View):
    """Reading and writing within one write transaction; `finish` before it commits."""

    def __init__(
        self,
        txn: "lmdb.Transaction[bytes]",
        tables: Tables,
        cache: InodeCache,
        packed_totals: bytes | None = None,
    ) -> None:
        """`packed_totals`: as they are on record, where that is known."""
        super().__init__(txn, tables, cache)
        self._packed_totals = packed_totals or self.packed_state()
        self.totals = records.decode_state(self._packed_totals)
        self._changed: dict[int, Inode | None] = {}  # as stored here; None: dropped
        self.moves_directories = False  # so that paths lead elsewhere
        self.chunk_files: dict[
            bytes, int
        ] = {}  # key of a changed entry that may be one -> size field
        self._stamped: set[int] = set()  # newer in the table than anywhere else

    def find(self, ino: int) -> Inode | None:
        """An inode as this transaction sees it, or None."""
        if ino in self._changed:
            return self._changed[ino]
        cached = None if ino in self._stamped else self.cache.get(ino)
        return cached or self._read(ino)

    def finish(self) -> bytes:
        """Write the totals, if they changed; as they are on record then."""
        packed = records.encode_state(self.totals)
        if packed != self._packed_totals:
            self.txn.put(STATE_KEY, packed, db=self.tables.state)
        return packed

    def committed(self) -> None:
        """The transaction is through: the cache may know."""
        for ino in self._stamped:
            self.cache.discard(ino)
        for ino, inode in self._changed.items():
            if inode is None:
                self.cache.discard(ino)
            else:
                self.cache.put(inode)

    def take_ino(self) -> int:
        """A number that no inode ever had."""
        ino = self.totals.next_ino
        self.totals.next_ino += 1
        return ino

    # Inodes --------------------------------------------------------------------------------------
    def store(self, new: Inode, old: Inode | None) -> Inode:
        """Write an inode, which was `old` (None: it is new). A digest's blob must be there."""
        tables = self.tables
        self._changed[new.ino] = new
        self.txn.put(pack_native(new.ino), records.encode_inode(new), db=tables.inode)
        is_moved = _place_in_order(old) != _place_in_order(new)
        before = self._rank(old) if is_moved else None
        if old is None:
            self.totals.inodes += 1
        was_loose = old is not None and is_loose(old)
        if is_loose(new) != was_loose:
            if was_loose:
                self.txn.delete(pack_ordered(new.ino), db=tables.loose)
            else:
                self.txn.put(pack_ordered(new.ino), b"", db=tables.loose)
        old_digest = b"" if old is None else old.digest
        if new.digest != old_digest:
            self._move_reference(old_digest, new.digest, new.ino)
        if old_digest and (new.digest != old_digest or new.nlink == 0):
            self.drop_chunk(new.ino)
        if old is not None and new.digest != old_digest:
            for parent, name in self.names(new.ino):
                self._put_dirent(parent, name, new)
        after = self._rank(new) if is_moved else None
        if before != after:
            if before is not None:
                self.txn.delete(before, db=tables.used)
            if after is not None:
                self.txn.put(after, b"", db=tables.used)
        return new

    def drop(self, old: Inode) -> None:
        """Remove an inode that has no name."""
        self._changed[old.ino] = None
        self.txn.delete(pack_native(old.ino), db=self.tables.inode)
        self.totals.inodes -= 1
        if is_loose(old):
            self.txn.delete(pack_ordered(old.ino), db=self.tables.loose)
        if old.digest:
            self._move_reference(old.digest, b"", old.ino)

    def stamp(self, ino: int, used_ns: int) -> None:
        """Set the place of a named, published file in the eviction order; others are left alone.

        Patches the packed record, since a batch of look-ups stamps a thousand."""
        key = pack_native(ino)
        raw = self.txn.get(key, db=self.tables.inode)
        use = None if raw is None else records.use_of(raw)
        used_ns = records.clamp_used(used_ns)
        if raw is None or use is None or not use.digest or use.used_ns == used_ns:
            return
        packed_blob = self.txn.get(use.digest, db=self.tables.blob)
        assert packed_blob is not None
        directory = records.blob_directory(packed_blob)
        used = self.tables.used
        # Pinned files and orphans are not in the order; only an orphan's stamp is beyond a change.
        was_ranked = self.txn.delete(records.used_key(directory, use.used_ns, ino), db=used)
        if was_ranked:
            self.txn.put(records.used_key(directory, used_ns, ino), b"", db=used)
        elif not use.is_pinned or self.first_parent(ino) is None:
            return
        self._changed.pop(ino, None)
        self._stamped.add(ino)
        self.txn.put(key, records.with_used(raw, used_ns), db=self.tables.inode)

    def _rank(self, inode: Inode | None) -> bytes | None:
        if inode is None or not is_ranked(inode):
            return None
        blob = self.blob(inode.digest)
        assert blob is not None
        return records.used_key(blob.directory, inode.used_ns, inode.ino)

    # Names ---------------------------------------------------------------------------------------
    def add_name(self, parent: int, name: bytes, inode: Inode) -> None:
        """Write a name, both ways; link counts are the caller's."""
        self._put_dirent(parent, name, inode)
        self.txn.put(records.name_key(inode.ino, parent, name), b"", db=self.tables.name)

    def remove_name(self, parent: int, name: bytes, ino: int) -> None:
        """Take a name away, both ways; link counts are the caller's."""
        self.moves_directories |= self.inode(ino).is_directory
        key = pack_ordered(parent) + name
        self.txn.delete(key, db=self.tables.dirent)
        if name.endswith(CHUNK_SUFFIX):
            self.chunk_files[key] = 0
        self.txn.delete(records.name_key(ino, parent, name), db=self.tables.name)

    def _put_dirent(self, parent: int, name: bytes, inode: Inode) -> None:
        key = pack_ordered(parent) + name
        raw = records.encode_dirent(inode)
        self.txn.put(key, raw, db=self.tables.dirent)
        if name.endswith(CHUNK_SUFFIX):
            self.chunk_files[key] = records.dirent_size_field(raw)

    # Blobs ---------------------------------------------------------------------------------------
    def ensure_blob(self, publication: Publication) -> None:
        """Have a record of the blob that a publication brings, ready to be referenced."""
        blob = Blob(
            publication.digest,
            publication.size_bytes,
            publication.allocated_bytes,
            publication.directory,
        )
        known = self.blob(blob.digest)
        if known is not None and known.references:
            if known.size_bytes != blob.size_bytes:
                raise NamespaceError(errno.EINVAL, publication.path)
            if known.directory == AWAY != blob.directory:
                self.move_blob(known, blob.directory, blob.allocated_bytes)
            return
        if known is not None:
            # Doomed: its file may be gone already, but the publisher has just put one in place.
            self.totals.weigh(known, -1)
            self.txn.delete(blob.digest, db=self.tables.doomed)
        self.totals.weigh(blob, 1)
        self._put_blob(blob)

    def move_blob(self, old: Blob, directory: int, allocated_bytes: int) -> None:
        """Have a blob lie elsewhere, and its files in the eviction order of that directory."""
        found = map(self.find, self.holders(old.digest))
        holders = [inode for inode in found if inode is not None and is_ranked(inode)]
        keys = [key for inode in holders if (key := self._rank(inode)) is not None]
        for key in keys:
            self.txn.delete(key, db=self.tables.used)
        new = replace(old, directory=directory, allocated_bytes=allocated_bytes)
        self.totals.weigh(old, -1)
        self.totals.weigh(new, 1)
        self._put_blob(new)
        for inode in holders:
            key = records.used_key(directory, inode.used_ns, inode.ino)
            self.txn.put(key, b"", db=self.tables.used)

    def bury(self, digest: bytes) -> bool:
        """Drop a doomed blob and its weight; False when it is not doomed. A doom of what files
        hold, or nobody knows, is wrong, and goes alone."""
        if not self.txn.delete(digest, db=self.tables.doomed):
            return False
        blob = self.blob(digest)
        if blob is None or blob.references:
            return False
        self.txn.delete(digest, db=self.tables.blob)
        self.totals.weigh(blob, -1)
        return True

    def clear_intents(self, digest: bytes) -> None:
        """Forget that a digest's file was about to be put in place."""
        for key in list(self.keys(self.tables.intent, digest)):
            self.txn.delete(key, db=self.tables.intent)

    def keep_intent(self, digest: bytes, directory: int) -> None:
        """Leave one intent of a blob on record, that of this directory."""
        kept = records.intent_key(digest, directory)
        found = list(self.keys(self.tables.intent, digest))
        for key in found:
            if key != kept:
                self.txn.delete(key, db=self.tables.intent)
        if kept not in found:
            self.txn.put(kept, b"", db=self.tables.intent)

    def drop_holder(self, digest: bytes, ino: int) -> None:
        """A file that is said to hold a digest is not there, or holds another one."""
        self._move_reference(digest, b"", ino)

    def _move_reference(self, old: bytes, new: bytes, ino: int) -> None:
        if new:
            blob = self.blob(new)
            assert blob is not None
            self._put_blob(replace(blob, references=blob.references + 1))
            self.txn.put(records.holder_key(new, ino), b"", db=self.tables.holder)
        if old:
            blob = self.blob(old)
            assert blob is not None and blob.references > 0
            self._put_blob(replace(blob, references=blob.references - 1))
            self.txn.delete(records.holder_key(old, ino), db=self.tables.holder)
            if blob.references == 1 and blob.directory == AWAY:
                self.txn.delete(old, db=self.tables.blob)
            elif blob.references == 1:
                self.txn.put(old, b"", db=self.tables.doomed)

    def _put_blob(self, blob: Blob) -> None:
        self.txn.put(blob.digest, records.encode_blob(blob), db=self.tables.blob)

    # Chunks --------------------------------------------------------------------------------------
    def put_chunk(self, ino: int, info: ChunkInfo) -> None:
        """Write the chunk record of a named file, in the namespace where its first name lies."""
        if not records.is_chunk_storable(info):
            raise NamespaceError(errno.EINVAL)
        namespace = self._namespace(ino)
        self.drop_chunk(ino)
        if namespace is None:  # a cluster's server has lost where it lies: no prefix has it
            return
        raw = records.encode_chunk(ChunkRecord(namespace, info))
        self.txn.put(pack_native(ino), raw, db=self.tables.chunk)
        key = records.child_prefix(namespace, info.parent) + pack_ordered(ino)
        self.txn.put(key, b"", db=self.tables.child)

    def _namespace(self, ino: int) -> int | None:
        parent = self.first_parent(ino)
        return None if parent is None else self.first_parent(parent)

    def drop_chunk(self, ino: int) -> None:
        """Remove the chunk record of an inode, if it has one."""
        raw = self.txn.pop(pack_native(ino), db=self.tables.chunk)
        if raw is not None:
            try:
                record = records.decode_chunk(raw)
            except Corrupt as error:  # then its place in the index leads to nothing
                UNREADABLE.note(error)
                return
            prefix = records.child_prefix(record.namespace, record.info.parent)
            self.txn.delete(prefix + pack_ordered(ino), db=self.tables.child)
