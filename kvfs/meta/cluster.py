"""A cluster as the rules see it: tables that all nodes share, and those of this node's own files.

`view.View` and `batch.Batch` hold here as they are: what they ask of LMDB, `ClusterTransaction`
answers from either. What differs is what a node knows of files whose bytes lie elsewhere: it has no
blob of theirs, and no place for them in its order of use, which is its own (`stamp`).
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvfs.errors import Corrupt
from kvfs.meta import records
from kvfs.meta.batch import Batch, is_loose
from kvfs.meta.cluster_transaction import ClusterTransaction
from kvfs.meta.contract import AWAY, Blob, Candidate, Inode, Publication
from kvfs.meta.numbers import Numbers
from kvfs.meta.records import ChunkRecord, pack_native, pack_ordered
from kvfs.meta.shared import Record, SharedTable
from kvfs.meta.told import Move
from kvfs.meta.unreadable import UNREADABLE
from kvfs.meta.view import InodeCache, Tables, View

if TYPE_CHECKING:
    from lmdb import _Database


class ClusterView(View):
    """Reading within one transaction."""

    txn: ClusterTransaction  # type: ignore[assignment]  # what is used of LMDB's, it has

    def _read(self, ino: int) -> Inode | None:
        try:
            inode = super()._read(ino)
        except Corrupt as error:
            UNREADABLE.note(error)
            return None
        stamp = None if inode is None else self.stamp_of(ino)
        return inode if inode is None or stamp is None else replace(inode, used_ns=stamp.used_ns)

    def stamp_of(self, ino: int) -> "records.Stamp | None":
        """This node's own use of a file whose bytes it has."""
        raw = self.txn.get(pack_native(ino), db=self.tables.stamp)
        return None if raw is None else records.decode_stamp(raw)

    def chunk(self, ino: int) -> ChunkRecord | None:
        try:
            return super().chunk(ino)
        except Corrupt as error:
            UNREADABLE.note(error)
            return None

    def candidate(self, ino: int) -> Candidate | None:
        stamp = self.stamp_of(ino)
        try:
            found = super().candidate(ino)
        except Corrupt as error:
            UNREADABLE.note(error)
            return None
        if found is None or stamp is None:
            return found
        return replace(found, used_ns=stamp.used_ns)

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        return self.txn.shared.dirents(keys)

    def read_ahead(self, table: "_Database", keys: Sequence[bytes]) -> None:
        self.txn.read_ahead(table, keys)

    def read_inodes_ahead(self, inos: Iterable[int]) -> None:
        self.read_ahead(self.tables.inode, [pack_native(ino) for ino in inos if ino])

    def copies(self, digest: bytes) -> list[bytes]:
        """The nodes that have the bytes of a digest."""
        return list(self.txn.shared.members(SharedTable.COPY, digest, b""))

    def has_copy_among(self, digest: bytes, nodes: Container[bytes]) -> bool:
        """Whether one of those nodes has the bytes. Sees no more of the others than it must, so
        that nodes which come to hold them, or cease to, do not get into each other's way."""
        return any(n in nodes for n in self.txn.shared.members(SharedTable.COPY, digest, b""))


class ClusterBatch(ClusterView, Batch):
    """Reading and writing within one transaction of a cluster."""

    def __init__(
        self,
        txn: ClusterTransaction,
        tables: Tables,
        cache: InodeCache,
        node_id: bytes,
        numbers: Numbers,
        absent: Container[int] = (),
    ) -> None:
        """`absent`: directories that are missing, so that what lies there is nowhere."""
        Batch.__init__(self, txn, tables, cache)  # type: ignore[arg-type]  # as above
        self._node_id = node_id
        self._numbers = numbers
        self._absent = absent
        self._number_written = self.totals.next_ino
        self.moves: list[Move] = []
        self.arrived: list[int] = []  # files whose bytes have come here
        self.inodes_before = self.totals.inodes

    def find(self, ino: int) -> Inode | None:
        """As this transaction sees it; not from the cache, so that what was seen is compared."""
        return self._changed[ino] if ino in self._changed else self._read(ino)

    def entry(self, parent: int, name: bytes) -> Inode | None:
        """A name whose file the server has lost is free."""
        ino = self.entry_ino(parent, name)
        return self.find(ino) if ino else None

    def is_empty(self, directory: int) -> bool:
        """Names whose files the server has lost are none, and go."""
        prefix = pack_ordered(directory)
        for key in self.keys(self.tables.dirent, prefix):
            if self.entry(directory, key[len(prefix) :]) is not None:
                return False
            self.txn.delete(key, db=self.tables.dirent)
        return True

    def take_ino(self) -> int:
        number = self._numbers.take(self._number_written)
        self.totals.next_ino = self._numbers.following
        for table in (SharedTable.INODE, SharedTable.CHUNK):
            self.txn.shared.begin_new(table, pack_native(number))
        for table in (SharedTable.NAME, SharedTable.DIRENT):
            self.txn.shared.begin_new(table, records.pack_ordered(number))
        return number

    def store(self, new: Inode, old: Inode | None) -> Inode:
        stored = super().store(new, old)
        if is_loose(new) != (old is not None and is_loose(old)):
            self.txn.shared.write(self._loose(new.ino), b"" if is_loose(new) else None)
        self._note_move(old, new)
        self._rank_anew(new)
        return stored

    def drop(self, old: Inode) -> None:
        super().drop(old)
        if is_loose(old):
            self.txn.shared.write(self._loose(old.ino), None)
        self._note_move(old, None)
        self._rank_anew(replace(old, digest=b""))

    def _note_move(self, old: Inode | None, new: Inode | None) -> None:
        sides = [
            (i.digest, i.nlink > 0, i.pinned) if i else (b"", False, False) for i in (old, new)
        ]
        inode = new or old
        assert inode is not None
        if sides[0] != sides[1] and (sides[0][0] or sides[1][0]):
            (old_digest, _, _), (new_digest, is_named, is_pinned) = sides
            self.moves.append(
                Move(inode.ino, old_digest, new_digest, is_named, is_pinned, inode.used_ns)
            )

    def follow(self, move: Move) -> None:
        """Another node did this. What this node's tables say is derived from how things are now,
        since more may have happened already."""
        for digest in {move.old, move.new} - {b""}:
            self.recount(digest)
        inode = self.find(move.ino)
        if inode is None:
            self.recheck_stamp(move.ino)
            return
        if move.old != move.new:
            inode = replace(inode, used_ns=max(inode.used_ns, move.used_ns))
        self._rank_anew(inode)
        if not is_loose(inode):
            self.txn.delete(records.pack_ordered(move.ino), db=self.tables.loose)

    def recount(self, digest: bytes) -> None:
        """Have the record of a blob here say how many files hold it now. One that is doomed stays
        so: whoever gave its bytes a name since has them as well."""
        blob = self.blob(digest)
        if blob is None or not blob.references:
            return
        holders = self.holders(digest)
        self._put_blob(replace(blob, references=len(holders)))
        if not holders:
            self.txn.put(digest, b"", db=self.tables.doomed)

    def recheck_copy(self, digest: bytes) -> None:
        """As `recount`, with all that is known of the files that hold a blob here, and of it as a
        copy. Where all is well the server is told nothing, since every node would hear it."""
        self.recount(digest)
        blob = self.blob(digest)
        if blob is not None and blob.references:
            is_said = self.has_copy_among(digest, (self._node_id,))
            self.begin_copy(digest)
            if is_said == (blob.directory not in self._absent):
                self.txn.shared.leave(self._copy(digest))

    def recheck_stamp(self, ino: int) -> None:
        """Take a file out of the order of use that has no name or no bytes here any more."""
        stamp = self.stamp_of(ino)
        inode = self.find(ino)
        if stamp is None or (inode is not None and inode.nlink and self.blob(inode.digest)):
            return
        self.txn.delete(records.used_key(stamp.directory, stamp.used_ns, ino), db=self.tables.used)
        self.txn.delete(pack_native(ino), db=self.tables.stamp)

    def _rank_all(self, inos: Iterable[int]) -> None:
        for ino in inos:
            inode = self.find(ino)
            if inode is not None:  # else the server has lost it
                self._rank_anew(inode)

    def _rank_anew(self, inode: Inode) -> None:
        """Have this node's order of use show a file as it is, whatever it showed before."""
        stamp = self.stamp_of(inode.ino)
        if stamp is not None and stamp.is_ranked:
            key = records.used_key(stamp.directory, stamp.used_ns, inode.ino)
            self.txn.delete(key, db=self.tables.used)
        rank = self._rank(inode)
        if rank is not None:
            self.txn.put(rank, b"", db=self.tables.used)
        blob = self.blob(inode.digest)
        if blob is None or not blob.references or inode.nlink == 0:
            self.txn.delete(pack_native(inode.ino), db=self.tables.stamp)
        else:
            now = records.Stamp(inode.used_ns, blob.directory, rank is not None)
            self.txn.put(pack_native(inode.ino), records.encode_stamp(now), db=self.tables.stamp)

    def stamp(self, ino: int, used_ns: int) -> None:
        """Only here: each node has its own order of use."""
        stamp = self.stamp_of(ino)
        used_ns = records.clamp_used(used_ns)
        if stamp is None or stamp.used_ns == used_ns:
            return
        if stamp.is_ranked:
            used, directory = self.tables.used, stamp.directory
            self.txn.delete(records.used_key(directory, stamp.used_ns, ino), db=used)
            self.txn.put(records.used_key(directory, used_ns, ino), b"", db=used)
        raw = records.encode_stamp(replace(stamp, used_ns=used_ns))
        self.txn.put(pack_native(ino), raw, db=self.tables.stamp)
        self._changed.pop(ino, None)
        self._stamped.add(ino)

    def _rank(self, inode: Inode | None) -> bytes | None:
        blob = None if inode is None else self.blob(inode.digest)
        return super()._rank(inode) if blob is not None and blob.references else None

    # Blobs ---------------------------------------------------------------------------------------
    def ensure_blob(self, publication: Publication) -> None:
        if publication.directory == AWAY:
            return  # others may have it as well: this node has no record of it
        known = self.blob(publication.digest)
        super().ensure_blob(publication)
        if known is None or not known.references:
            self.begin_copy(publication.digest)
        elif known.directory in self._absent:
            self.move_blob(known, publication.directory, publication.allocated_bytes)

    def begin_copy(self, digest: bytes) -> None:
        """The bytes of a digest have come here: so have those of all files that hold it. In a
        directory that is missing they are no copy for anybody."""
        blob = self.blob(digest)
        assert blob is not None
        holders = self.holders(digest)
        self.arrived += holders
        self._put_blob(replace(blob, references=len(holders)))
        self._rank_all(holders)
        self.txn.shared.write(self._copy(digest), None if blob.directory in self._absent else b"")

    def settle_copy(self, digest: bytes) -> None:
        """Have the server say of a digest whether its bytes are here."""
        blob = self.blob(digest)
        if blob is None or not blob.references:
            self.txn.shared.write(self._copy(digest), None)
        elif self.holders(digest):
            self.begin_copy(digest)

    def add_copy(self, publication: Publication) -> bool:
        """The bytes of a digest have come from another node; False where no file holds it now."""
        blob = self.blob(publication.digest)
        if not self.holders(publication.digest):
            return False
        if blob is None or not blob.references or blob.directory in self._absent:
            self.ensure_blob(publication)
        self.clear_intents(publication.digest)
        return True

    def add_found(self, publication: Publication, former_ids: Sequence[bytes]) -> bool:
        """As `add_copy`, of a file that lay here before the database did; the ids that this node
        had then have it no more."""
        found = [self.find(ino) for ino in self.holders(publication.digest)]
        sizes = [inode.size_bytes for inode in found if inode is not None]
        if not sizes or sizes[0] != publication.size_bytes:
            return False
        self.end_copies_of(publication.digest, former_ids)
        return self.add_copy(publication)

    def end_copies_of(self, digest: bytes, node_ids: Sequence[bytes]) -> None:
        """Those nodes do not have the bytes of a digest."""
        for node_id in node_ids:
            self.txn.shared.write(Record(SharedTable.COPY, digest + node_id), None)

    def end_copy(self, digest: bytes) -> None:
        """This node gives its bytes of a digest up, which others have: its blob is doomed."""
        blob = self.blob(digest)
        if blob is None or not blob.references:
            return
        self._put_blob(replace(blob, references=0))
        self._rank_all(self.holders(digest))
        self.txn.put(digest, b"", db=self.tables.doomed)
        self.txn.shared.write(self._copy(digest), None)  # so that not all give theirs up

    def move_blob(self, old: Blob, directory: int, allocated_bytes: int) -> None:
        super().move_blob(old, directory, allocated_bytes)
        self.txn.shared.write(self._copy(old.digest), b"")  # it may have lain on a missing disk
        self._rank_all(self.holders(old.digest))

    def bury(self, digest: bytes) -> bool:
        was_doomed = super().bury(digest)
        if was_doomed:
            self.txn.shared.write(self._copy(digest), None)
        return was_doomed

    def _put_blob(self, blob: Blob) -> None:
        super()._put_blob(blob)
        if blob.references:  # whatever was said of it before
            self.txn.delete(blob.digest, db=self.tables.doomed)

    def _loose(self, ino: int) -> Record:
        return loose_record(self._node_id, ino)

    def _copy(self, digest: bytes) -> Record:
        return Record(SharedTable.COPY, digest + self._node_id)

    def add_holder(self, digest: bytes, ino: int) -> None:
        """A file holds a digest, and the server does not say so any more."""
        self._move_reference(b"", digest, ino)

    def _move_reference(self, old: bytes, new: bytes, ino: int) -> None:
        if new:
            self.txn.put(records.holder_key(new, ino), b"", db=self.tables.holder)
            blob = self.blob(new)
            if blob is not None:
                self._put_blob(replace(blob, references=len(self.holders(new))))
        if old:
            self.txn.delete(records.holder_key(old, ino), db=self.tables.holder)
            self.recount(old)


def loose_record(node_id: bytes, ino: int) -> Record:
    """Where it is said that a node has not finished a file."""
    return Record(SharedTable.LOOSE, node_id + records.pack_ordered(ino))
