"""The namespace over tables: every method of the metadata contract as one transaction.

The rules lie beside it: `tree` (names), `content` (blobs and chunks), `lookups` (many paths at
once), `view` and `batch` (reading and writing in one transaction), `records` (bytes). A subclass
says where the tables are and how a transaction is run.
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from heapq import merge
from itertools import islice
from typing import TypeVar

from kvfs.config import PATH_BYTES_MAX
from kvfs.errors import NamespaceError
from kvfs.meta import content, tree
from kvfs.meta.batch import Batch
from kvfs.meta.contract import (
    AWAY,
    ROOT_INO,
    Blob,
    Candidate,
    Changes,
    ChunkEntry,
    ChunkInfo,
    Entry,
    HeldPath,
    Inode,
    Publication,
    Published,
    Recovery,
    Renamed,
    RenameMode,
)
from kvfs.meta.lookups import Lookups
from kvfs.meta.records import pack_ordered
from kvfs.meta.tier_tables import TierTables
from kvfs.meta.view import InodeCache, View, check_name
from kvfs.names import ChunkKeys

_Result = TypeVar("_Result")


class TableEngine(TierTables, ABC):
    """What the engines have in common; see `MetaEngine` for what each method promises."""

    _cache: InodeCache
    _lookups: Lookups

    @abstractmethod
    def _reading(self) -> AbstractContextManager[View]:
        """A transaction that only reads."""

    @abstractmethod
    def _write(self, change: Callable[[Batch], _Result]) -> _Result:
        """Run `change` in a transaction, again from its start where another one came between; what
        it raises ends it without a trace."""

    # Reading -------------------------------------------------------------------------------------
    def inode(self, ino: int) -> Inode | None:
        cached = self._cache.get(ino)
        if cached is not None:
            return cached
        with self._reading() as view:
            return view.find(ino)

    def lookup(self, parent: int, name: bytes) -> Inode | None:
        check_name(name)
        with self._reading() as view:
            view.directory(parent)
            return view.entry(parent, name)

    def resolve(self, paths: Sequence[bytes]) -> list[Inode | None]:
        cached = self._cache.get
        with self._reading() as view:
            find = view.find
            inos = self._lookups.dirents(view, paths)[::2]
            view.read_inodes_ahead(ino for ino in inos if cached(ino) is None)
            return [cached(ino) or find(ino) for ino in inos]

    def sizes(self, paths: Sequence[bytes]) -> list[int | None]:
        with self._reading() as view:
            fields = self._lookups.dirents(view, paths)[1::2]
        return [size - 1 if size else None for size in fields]

    def chunk_sizes(self, namespace: bytes, keys: ChunkKeys) -> list[int | None]:
        with self._reading() as view:
            return self._lookups.chunk_sizes(view, namespace, keys)

    def index_more(self) -> bool:
        with self._reading() as view:
            return self._lookups.index_more(view)

    def entries(self, parent: int, after: bytes, limit: int) -> list[Entry]:
        found: list[Entry] = []
        while (missing := limit - len(found)) > 0:
            names = self._entries(parent, after, missing, found)
            if len(names) < missing:
                break
            after = names[-1]  # some may have gone since they were listed
        return found

    def _entries(self, parent: int, after: bytes, limit: int, found: list[Entry]) -> list[bytes]:
        """The next names of a directory; those that lead to something are put with `found`."""
        prefix = pack_ordered(parent)
        with self._reading() as view:
            view.directory(parent)
            keys = list(islice(view.keys(view.tables.dirent, prefix, after), limit))
            view.read_ahead(view.tables.dirent, keys)
            names = [key[len(prefix) :] for key in keys]
            view.read_inodes_ahead(view.entry_ino(parent, name) for name in names)
            for name in names:
                inode = view.find(view.entry_ino(parent, name))
                if inode is not None:
                    found.append(Entry(name, inode))
        return names

    def parent_of(self, ino: int) -> int:
        with self._reading() as view:
            view.directory(ino)
            parent = view.first_parent(ino)
            if parent is None:
                raise NamespaceError(errno.ENOENT)
            return parent

    def paths_of(self, ino: int) -> list[bytes]:
        with self._reading() as view:
            if ino == ROOT_INO:
                return [b""]
            return [_path(view, parent, name) for parent, name in view.names(ino)]

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        with self._reading() as view:
            return view.names(ino)

    # Names ---------------------------------------------------------------------------------------
    def make(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, now_ns: int, *,
        rdev: int = 0, target: bytes = b"",
    ) -> Inode:  # fmt: skip
        return self._write(
            lambda batch: tree.make(batch, parent, name, mode, uid, gid, now_ns, rdev, target)
        )

    def make_directories(self, path: bytes, mode: int, uid: int, gid: int, now_ns: int) -> Inode:
        names = tree.split_path(path)
        return self._write(
            lambda batch: tree.make_directories(batch, names, mode, uid, gid, now_ns)
        )

    def link(self, ino: int, parent: int, name: bytes, now_ns: int) -> Inode:
        return self._write(lambda batch: tree.link(batch, ino, parent, name, now_ns))

    def unlink(self, parent: int, name: bytes, now_ns: int) -> Inode:
        return self._write(lambda batch: tree.unlink(batch, parent, name, now_ns))

    def unlink_all(self, inos: Sequence[int], now_ns: int) -> list[tuple[int, bytes, Inode]]:
        return self._write(lambda batch: tree.unlink_files(batch, inos, now_ns))

    def rmdir(self, parent: int, name: bytes, now_ns: int) -> Inode:
        return self._write(lambda batch: tree.rmdir(batch, parent, name, now_ns))

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, now_ns: int,
        mode: RenameMode = RenameMode.REPLACE,
    ) -> Renamed:  # fmt: skip
        return self._write(
            lambda batch: tree.rename(batch, parent, name, new_parent, new_name, now_ns, mode)
        )

    def set_attributes(self, ino: int, changes: Changes, now_ns: int) -> Inode:
        return self._write(lambda batch: tree.set_attributes(batch, ino, changes, now_ns))

    # Content -------------------------------------------------------------------------------------
    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        with self._reading() as view:
            found = [view.blob(digest) for digest in digests]
        return [
            blob if blob is not None and blob.references and blob.directory != AWAY else None
            for blob in found
        ]

    def held_paths(
        self, digest: bytes, after: tuple[int, int, bytes], limit: int
    ) -> list[HeldPath]:
        with self._reading() as view:
            return [
                HeldPath(ino, parent, name, _path(view, parent, name))
                for ino, parent, name in islice(view.held_names(digest, after), limit)
            ]

    def intend(self, blobs: Sequence[tuple[bytes, int]]) -> None:
        self._write(lambda batch: content.intend(batch, blobs))

    def publish(self, publications: Sequence[Publication], now_ns: int) -> list[Published]:
        return self._write(lambda batch: content.publish(batch, publications, now_ns))

    def relocate(self, digest: bytes, directory: int, allocated_bytes: int) -> None:
        self._write(lambda batch: content.relocate(batch, digest, directory, allocated_bytes))

    def add_copy(self, publication: Publication) -> bool:
        return self._write(lambda batch: content.add_copy(batch, publication))

    def forget(self, inos: Sequence[int]) -> None:
        self._write(lambda batch: content.forget(batch, inos))

    def doomed(self, limit: int) -> list[Blob]:
        with self._reading() as view:
            return content.doomed(view, limit)

    def bury(self, digests: Sequence[bytes]) -> None:
        self._write(lambda batch: content.bury(batch, digests))

    def lose(self, digest: bytes, now_ns: int) -> list[tuple[int, bytes, Inode]]:
        return self._write(lambda batch: content.lose(batch, digest, now_ns))

    def recover(self) -> Recovery:
        return self._write(content.recover)

    # Chunks --------------------------------------------------------------------------------------
    def set_chunk(self, ino: int, info: ChunkInfo) -> None:
        self._write(lambda batch: content.set_chunk(batch, ino, info))

    def drop_chunk(self, ino: int) -> None:
        self._write(lambda batch: batch.drop_chunk(ino))

    def chunk(self, ino: int) -> ChunkInfo | None:
        with self._reading() as view:
            record = view.chunk(ino)
        return None if record is None else record.info

    def children(self, namespace: int, parent: bytes, after: int, limit: int) -> list[ChunkEntry]:
        with self._reading() as view:
            found = []
            for ino in islice(view.child_inos(namespace, parent, after), limit):
                record, inode = view.chunk(ino), view.find(ino)
                if record is not None and inode is not None:
                    found.append(ChunkEntry(record.info, inode))
            return found

    # Use and eviction ----------------------------------------------------------------------------
    def restamp(self, stamps: Sequence[tuple[int, int]]) -> None:
        self._write(lambda batch: content.restamp(batch, stamps))

    def set_pinned(self, ino: int, pinned: bool) -> Inode:
        return self._write(lambda batch: content.set_pinned(batch, ino, pinned))

    def coldest(
        self, limit: int, after: tuple[int, int] = (0, 0), directory: int | None = None
    ) -> list[Candidate]:
        with self._reading() as view:
            directories = (
                range(len(view.state().allocated_bytes)) if directory is None else (directory,)
            )
            order = merge(*(view.ranked(index, after) for index in directories))
            found = (view.candidate(ino) for _, ino in order)
            return list(islice((one for one in found if one is not None), limit))

    def continuations(self, ino: int, after: int, limit: int) -> list[Candidate]:
        with self._reading() as view:
            record = view.chunk(ino)
            if record is None:
                return []
            found: list[Candidate] = []
            for child in view.child_inos(record.namespace, record.info.key, after):
                if len(found) >= limit:
                    break
                child_record, candidate = view.chunk(child), view.candidate(child)
                if (
                    candidate
                    and child_record
                    and child_record.info.token_start > record.info.token_start
                ):
                    found.append(candidate)
            return found

    def newest_used_ns(self) -> int:
        with self._reading() as view:
            directories = range(len(view.state().allocated_bytes))
            return max((view.newest_used_ns(index) for index in directories), default=0)


def _path(view: View, parent: int, name: bytes) -> bytes:
    """The path of a name from the root."""
    parts = [name]
    while parent != ROOT_INO:
        names = view.names(parent)
        if not names:
            raise NamespaceError(errno.ENOENT)
        parent, name = names[0]
        parts.append(name)
        if len(parts) > PATH_BYTES_MAX:
            raise NamespaceError(errno.ELOOP)
    return b"/".join(reversed(parts))
