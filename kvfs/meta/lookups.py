"""Finding many paths at once in the embedded engine: what engines wait for before each request."""

from collections.abc import Iterable, Sequence
from operator import add

from kvfs.config import (
    CHUNK_INDEX_STEP,
    CHUNK_INDEX_WAITING_MAX,
    META_DIRECTORIES_CACHED_MAX,
    META_MODELS_CACHED_MAX,
)
from kvfs.meta import records
from kvfs.meta.batch import Batch
from kvfs.meta.chunk_index import ChunkIndex
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.records import pack_ordered
from kvfs.meta.view import View
from kvfs.names import CHUNK_SUFFIX, ChunkKeys

_BYTES = range(256)


class Lookups:
    """What is remembered of committed directories and chunk files between look-ups.

    Chunk files are found in the database until `index_more` has read all directory entries once;
    from then on in an index in memory, which learns of every change (`note`).
    """

    def __init__(self, files: int) -> None:
        """`files`: about how many there are."""
        # Path of a directory -> where its entries begin; emptied when a directory moves or goes.
        self._directories: dict[bytes, bytes] = {b"": pack_ordered(ROOT_INO)}
        # Of models, by theirs: the same for the directories of their chunks, by first byte.
        self._leaves: dict[bytes, dict[int, bytes]] = {}
        self._files = files
        self._index: ChunkIndex | None = None  # made by the first `index_more`
        self._indexed_to: bytes | None = b""  # key of the last entry read; None: all were
        self._waiting: dict[bytes, int] = {}  # key of an entry -> size field: not in the index yet

    def note(self, batch: Batch) -> None:
        """A transaction is through."""
        if batch.moves_directories:
            self.forget_directories()
        end = self._indexed_to
        for key, size_field in batch.chunk_files.items():
            if end is None or key <= end:
                self._waiting[key] = size_field
        if len(self._waiting) > CHUNK_INDEX_WAITING_MAX:
            self._take_waiting()

    def forget_directories(self) -> None:
        """Paths may lead elsewhere."""
        self._directories = {b"": pack_ordered(ROOT_INO)}
        self._leaves = {}

    def index_more(self, view: View) -> bool:
        """Read the next directory entries into the index; False once all are."""
        if self._indexed_to is None:
            return False
        if self._index is None:
            self._index = ChunkIndex(self._files)
        with view.txn.cursor(view.tables.dirent) as cursor:
            found = (
                cursor.set_range(self._indexed_to + b"\0") if self._indexed_to else cursor.first()
            )
            for _ in range(CHUNK_INDEX_STEP):
                if not found:
                    break
                self._indexed_to = cursor.key()
                if self._indexed_to.endswith(CHUNK_SUFFIX):
                    self._waiting[self._indexed_to] = records.dirent_size_field(cursor.value())
                found = cursor.next()
        self._take_waiting()
        if not found:
            self._indexed_to = None
        return found

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        assert self._index is not None
        self._index.change(
            (int.from_bytes(key[:8], "big"), key[8:], size) for key, size in waiting.items()
        )

    def chunk_sizes(self, view: View, namespace: bytes, keys: ChunkKeys) -> list[int | None]:
        """As `MetaEngine.chunk_sizes`."""
        root = namespace.strip(b"/") + b"/"
        firsts = keys.hashes[:: keys.hash_bytes]
        leaves = self._find_leaves(view, root, set(firsts))
        if self._index is not None and self._indexed_to is None:
            self._take_waiting()
            numbers = [
                int.from_bytes(leaves.get(byte, records.NO_DIRECTORY), "big") for byte in _BYTES
            ]
            return self._index.sizes(numbers, keys)
        parts = len(keys.parts)
        if parts != 1:
            firsts = bytes(byte for byte in firsts for _ in range(parts))
        entries = list(map(add, map(leaves.__getitem__, firsts), keys.file_names()))
        fields = records.unpack_dirents(view.dirents(entries))[1::2]
        return [size - 1 if size else None for size in fields]

    def dirents(self, view: View, paths: Sequence[bytes]) -> tuple[int, ...]:
        """The directory entries of paths from the root: number and size field of each in turn.

        Slashes at either end count for nothing. Plain loops, since an engine waits for this.
        """
        known = self._directories.get
        found: dict[bytes, bytes] = {}  # also what is missing: a new model's, a thousand times
        keys = []
        for path in paths:
            head, _, name = path.rpartition(b"/")
            if not name:
                head, _, name = path.rstrip(b"/").rpartition(b"/")
            prefix = known(head) or found.get(head)
            if prefix is None:
                prefix = found[head] = self._find_directory(view, head)
            keys.append(prefix + name if name else records.ROOT_DIRENT_KEY)
        return records.unpack_dirents(view.dirents(keys))

    def _find_leaves(self, view: View, root: bytes, firsts: Iterable[int]) -> dict[int, bytes]:
        """Where the entries begin of the directories of a model's chunks, by their keys' first
        byte."""
        known = self._leaves.get(root)
        if known is None:
            if len(self._leaves) >= META_MODELS_CACHED_MAX:
                self._leaves.clear()
            known = self._leaves[root] = {}
        missing = [byte for byte in firsts if byte not in known]
        if not missing:
            return known
        paths = {byte: b"%b%02x" % (root, byte) for byte in missing}
        unread = [path for path in paths.values() if path not in self._directories]
        if unread:
            above = self._find_directory(view, root[:-1])
            dirents = view.dirents([above + path[-2:] for path in unread])
            view.read_inodes_ahead(records.unpack_dirents(dirents)[::2])
        found = {byte: self._find_directory(view, path) for byte, path in paths.items()}
        known.update(
            (byte, prefix) for byte, prefix in found.items() if prefix != records.NO_DIRECTORY
        )
        return known | found

    def _find_directory(self, view: View, path: bytes) -> bytes:
        """Where the entries of a directory begin; from what is known already, if it can be."""
        directories = self._directories
        if len(directories) >= META_DIRECTORIES_CACHED_MAX:
            directories = self._directories = {b"": pack_ordered(ROOT_INO)}
        missing = []
        while path not in directories:
            missing.append(path)
            path = path.rpartition(b"/")[0].rstrip(b"/")  # a run of slashes is one step
        prefix = directories[path]
        for path in reversed(missing):
            name = path.rpartition(b"/")[2]
            if name:
                raw = view.txn.get(prefix + name)
                if raw is None or not records.is_dirent(raw):
                    return records.NO_DIRECTORY
                inode = view.find(records.dirent_ino(raw))
                if inode is None or not inode.is_directory:
                    return records.NO_DIRECTORY  # not remembered: a directory may take the name
                prefix = records.entries_prefix(raw)
            directories[path] = prefix
        return prefix
