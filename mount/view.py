"""`.kvfs` in the root of the mount: what the store knows of itself, as files to read.

    .kvfs/status.json
    .kvfs/metrics                the same for Prometheus
    .kvfs/nodes                  in a cluster: the nodes that are there
    .kvfs/tiers                  of a node with [[tiers]]: how each is, and what it does
    .kvfs/prefixes/<model>@<fingerprint>/<key>/<key of a chunk that continues it>/...
    each chunk: info.json, tokens (when the chunk stores them), text (when there is a tokenizer too)

Nothing here is stored: a number stands for a `Place`, is made when a reply names it and goes when
the kernel forgets it. Each level is listed when it is opened, in pages, straight from the metadata.
Files are written when they are looked at, so that their sizes are right, and again when they are
opened; an open file keeps the bytes that it was opened with. Of chunk files only headers are read.
"""

import enum
import errno
import json
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import pyfuse3
import trio

from kvfs.config import VIEW_CONTENT_BYTES_MAX
from kvfs.errors import Corrupt, InvalidInput, NamespaceError
from kvfs.meta.contract import ROOT_INO, ChunkEntry, Entry, Inode
from kvfs.metrics import metrics_text
from kvfs.names import KV_DIRECTORY, RESERVED_NAME, chunk_path, split_namespace
from kvfs.node import Node
from kvfs.status import status_of
from kvfs.stored import read_header
from mount.attributes import attributes
from mount.directories import Listed, OpenDirectory
from mount.numbers import VIEW_BASE

VIEW_NAME = RESERVED_NAME

Decode = Callable[[Sequence[int]], str]


class Kind(enum.Enum):
    """What a place of the view is."""

    ROOT = enum.auto()
    STATUS = enum.auto()
    NODES = enum.auto()
    TIERS = enum.auto()
    METRICS = enum.auto()
    PREFIXES = enum.auto()
    MODEL = enum.auto()
    CHUNK = enum.auto()
    INFO = enum.auto()
    TOKENS = enum.auto()
    TEXT = enum.auto()


_FILES = {Kind.INFO: b"info.json", Kind.TOKENS: b"tokens", Kind.TEXT: b"text"}  # of a chunk
_FILE_KINDS = {name: kind for kind, name in _FILES.items()}
_IS_FILE = frozenset({Kind.STATUS, Kind.NODES, Kind.TIERS, Kind.METRICS, *_FILES})


@dataclass(frozen=True, slots=True)
class Place:
    """A directory or file of the view: `model` is the directory's name in kv/, `key` a chunk's."""

    kind: Kind
    model: bytes = b""
    key: bytes = b""


class View:
    """See the module's docstring. `decode` gives the text of token ids, if there is a tokenizer."""

    def __init__(self, node: Node, decode: Decode | None = None) -> None:
        self._node = node
        self._decode = decode
        self._numbers: dict[Place, int] = {}
        self._places: dict[int, Place] = {}
        self._lookups: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._last = VIEW_BASE
        self._open: dict[int, bytes] = {}
        self._written: OrderedDict[tuple[Place, bytes], bytes] = OrderedDict()
        self._written_bytes = 0
        self._number(Place(Kind.ROOT), ROOT_INO)

    # Names ----------------------------------------------------------------------------------------
    def root(self) -> pyfuse3.EntryAttributes:
        """`.kvfs` itself, as a look-up finds it."""
        return _shown(self._root_inode())

    def with_root(self, after: bytes, page: Sequence[Entry], limit: int) -> Sequence[Entry]:
        """A page of the root's names, with `.kvfs` at its place."""
        is_last = len(page) < limit
        if after >= VIEW_NAME or not (is_last or page[-1].name > VIEW_NAME):
            return page
        others = [entry for entry in page if entry.name != VIEW_NAME]
        return sorted([*others, Entry(VIEW_NAME, self._root_inode())], key=lambda e: e.name)

    async def lookup(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        directory = self._place(parent)
        if directory.kind is not Kind.ROOT:
            await self._node.settle()
        place = self._find(directory, name)
        if place is None:
            raise NamespaceError(errno.ENOENT)
        number = self._number(place, parent)
        # Counted before the wait: a FORGET in it would take the number away.
        self._lookups[number] = self._lookups.get(number, 0) + 1
        try:
            return _shown(await self._inode(place, number))
        except BaseException:
            self.forget(number, 1)
            raise

    async def getattr(self, number: int) -> pyfuse3.EntryAttributes:
        return _shown(await self._inode(self._place(number), number))

    def forget(self, number: int, lookups: int) -> None:
        """Take look-ups back; a number that has none left goes."""
        left = self._lookups.get(number, 0) - lookups
        if left > 0:
            self._lookups[number] = left
        elif number != VIEW_BASE + 1:
            self._lookups.pop(number, None)
            self._parents.pop(number, None)
            place = self._places.pop(number, None)
            if place is not None:
                del self._numbers[place]

    async def opendir(self, number: int) -> OpenDirectory:
        place = self._place(number)
        if place.kind is not Kind.ROOT:
            await self._node.settle()

        def list_after(cursor: bytes, limit: int) -> Sequence[Listed]:
            names = self._list(place, cursor, limit)
            return [Listed(after, Entry(name, self._root_inode())) for name, after in names]

        return OpenDirectory(number, self._parents.get(number, ROOT_INO), list_after)

    def reply(self, token: pyfuse3.ReaddirToken, parent: int, name: bytes, position: int) -> bool:
        """Give the kernel one listed name; False when its buffer is full. Sizes are found when
        they are asked for."""
        if parent == ROOT_INO:
            return bool(pyfuse3.readdir_reply(token, name, self.root(), position))
        place = self._find(self._place(parent), name)
        if place is None:  # went since it was listed
            return True
        number = self._number(place, parent)
        if not pyfuse3.readdir_reply(token, name, _shown(self._shape(place, number, 0)), position):
            self.forget(number, 0)
            return False
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return True

    # Files ----------------------------------------------------------------------------------------
    async def open(self, number: int, flags: int) -> pyfuse3.FileInfo:
        place = self._place(number)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            raise NamespaceError(errno.EACCES)
        content = await self._write(place)  # meanwhile others are numbered
        self._last += 1
        self._open[self._last] = content
        return pyfuse3.FileInfo(fh=self._last, direct_io=True, keep_cache=False)

    def read(self, fh: int, offset: int, size_bytes: int) -> memoryview:
        return memoryview(self._open[fh])[offset : offset + size_bytes]

    def release(self, fh: int) -> None:
        del self._open[fh]

    @property
    def has_open(self) -> bool:
        """Whether somebody has a file of the view open, or mapped."""
        return bool(self._open)

    # Places ---------------------------------------------------------------------------------------
    def _place(self, number: int) -> Place:
        place = self._places.get(number)
        if place is None:
            raise NamespaceError(errno.ESTALE)
        return place

    def _number(self, place: Place, parent: int) -> int:
        number = self._numbers.get(place)
        if number is None:
            self._last += 1
            number = self._numbers[place] = self._last
            self._places[number] = place
            self._parents[number] = parent
        return number

    def _find(self, parent: Place, name: bytes) -> Place | None:
        match parent.kind:
            case Kind.ROOT:
                kind = self._root_kinds().get(name)
                return None if kind is None else Place(kind)
            case Kind.PREFIXES:
                found = self._resolve(KV_DIRECTORY + b"/" + name)
                is_model = found is not None and found.is_directory
                return Place(Kind.MODEL, name) if is_model and _names_model(name) else None
            case Kind.MODEL | Kind.CHUNK:
                kind = _FILE_KINDS.get(name)
                if kind is not None:
                    return self._find_file(parent, kind)
                place = Place(Kind.CHUNK, parent.model, name)
                chunk = self._chunk(place)
                return place if chunk is not None and chunk.info.parent == parent.key else None
            case _:
                raise NamespaceError(errno.ENOTDIR)

    def _root_kinds(self) -> dict[bytes, Kind]:
        kinds = {
            b"metrics": Kind.METRICS,
            b"prefixes": Kind.PREFIXES,
            b"status.json": Kind.STATUS,
        }
        if self._node.neighbours is not None:
            kinds[b"nodes"] = Kind.NODES
        if self._node.tiering is not None:
            kinds[b"tiers"] = Kind.TIERS
        return kinds

    def _find_file(self, parent: Place, kind: Kind) -> Place | None:
        place = Place(kind, parent.model, parent.key)
        is_there = parent.kind is Kind.CHUNK and kind in self._kinds_of(place)
        return place if is_there else None

    def _kinds_of(self, place: Place) -> list[Kind]:
        """Which files a chunk's directory has."""
        chunk = self._chunk(place)
        if chunk is None:
            return []
        kinds = [Kind.INFO]
        if chunk.info.tokens_digest:
            kinds.append(Kind.TOKENS)
            if self._decode is not None:
                kinds.append(Kind.TEXT)
        return kinds

    def _resolve(self, path: bytes) -> Inode | None:
        return self._node.meta.resolve([path])[0]

    def _chunk(self, place: Place) -> ChunkEntry | None:
        try:
            path = chunk_path(KV_DIRECTORY + b"/" + place.model, place.key.decode())
        except (InvalidInput, UnicodeDecodeError):
            return None
        inode = self._resolve(path)
        info = self._node.meta.chunk(inode.ino) if inode is not None else None
        return ChunkEntry(info, inode) if info is not None and inode is not None else None

    # Listing: names, each with the cursor behind it -----------------------------------------------
    def _list(self, place: Place, cursor: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        match place.kind:
            case Kind.ROOT:
                return [(name, name) for name in sorted(self._root_kinds()) if name > cursor]
            case Kind.PREFIXES:
                return self._list_models(cursor, limit)
            case Kind.MODEL:
                return self._list_children(place, int(cursor or b"0"), limit)
            case Kind.CHUNK:
                if cursor.isdigit():
                    return self._list_children(place, int(cursor), limit)
                files = sorted(_FILES[kind] for kind in self._kinds_of(place))
                left = [(name, b"/" + name) for name in files if b"/" + name > cursor]
                return left + self._list_children(place, 0, limit)
            case _:
                raise NamespaceError(errno.ENOTDIR)

    def _list_models(self, cursor: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        directory = self._resolve(KV_DIRECTORY)
        if directory is None or not directory.is_directory:
            return []
        found: list[tuple[bytes, bytes]] = []
        while not found:
            page = self._node.meta.entries(directory.ino, cursor, limit)
            if not page:
                break
            cursor = page[-1].name
            found = [
                (entry.name, entry.name)
                for entry in page
                if entry.inode.is_directory and _names_model(entry.name)
            ]
        return found

    def _list_children(self, place: Place, after: int, limit: int) -> list[tuple[bytes, bytes]]:
        namespace = self._resolve(KV_DIRECTORY + b"/" + place.model)
        if namespace is None or not namespace.is_directory:
            return []
        children = self._node.meta.children(namespace.ino, place.key, after, limit)
        return [(child.info.key, b"%d" % child.inode.ino) for child in children]

    # Content --------------------------------------------------------------------------------------
    def _root_inode(self) -> Inode:
        return self._shape(Place(Kind.ROOT), VIEW_BASE + 1, 0)

    async def _inode(self, place: Place, number: int) -> Inode:
        is_file = place.kind in _IS_FILE
        return self._shape(place, number, len(await self._write(place)) if is_file else 0)

    def _shape(self, place: Place, number: int, size_bytes: int) -> Inode:
        is_file = place.kind in _IS_FILE
        chunk = self._chunk(place) if place.key else None
        time_ns = chunk.inode.mtime_ns if chunk is not None else self._node.started_ns
        return Inode(
            ino=number,
            mode=stat.S_IFREG | 0o444 if is_file else stat.S_IFDIR | 0o555,
            uid=os.geteuid(),
            gid=os.getegid(),
            nlink=1 if is_file else 2,
            size_bytes=size_bytes,
            atime_ns=time_ns,
            mtime_ns=time_ns,
            ctime_ns=time_ns,
        )

    async def _write(self, place: Place) -> bytes:
        """The bytes of a file, as they are now."""
        if place.kind is Kind.STATUS:
            return _json(status_of(self._node))
        if place.kind is Kind.METRICS:
            return metrics_text(status_of(self._node)).encode()
        if place.kind is Kind.NODES:
            neighbours = self._node.neighbours
            return _json({} if neighbours is None else neighbours.describe())
        if place.kind is Kind.TIERS:
            tiering, ahead = self._node.tiering, self._node.ahead
            tiers = {} if tiering is None else tiering.describe()
            return _json(tiers | ({} if ahead is None else {"prefetch": ahead.describe()}))
        if place.kind not in _FILES:
            raise NamespaceError(errno.EISDIR)
        chunk = self._chunk(place)
        if chunk is None:
            raise NamespaceError(errno.ESTALE)
        if place.kind is Kind.INFO:
            return self._write_info(chunk)
        name = (place, chunk.inode.digest)
        if name in self._written:
            self._written.move_to_end(name)
            return self._written[name]
        content = await self._write_tokens(place, chunk)
        self._keep(name, content)
        return content

    def _keep(self, name: tuple[Place, bytes], content: bytes) -> None:
        if name not in self._written:
            self._written[name] = content
            self._written_bytes += len(content)
        while self._written_bytes > VIEW_CONTENT_BYTES_MAX:
            self._written_bytes -= len(self._written.popitem(last=False)[1])

    def _write_info(self, chunk: ChunkEntry) -> bytes:
        inode = chunk.inode
        table = asdict(chunk.info)
        table.update(
            key=chunk.info.key.decode(),
            parent=chunk.info.parent.decode(),
            tokens_digest=chunk.info.tokens_digest.hex(),
            paths=[os.fsdecode(path) for path in self._node.meta.paths_of(inode.ino)],
            size_bytes=inode.size_bytes,
            digest=inode.digest.hex(),
            mtime_ns=inode.mtime_ns,
            used_ns=inode.used_ns,
            is_pinned=inode.pinned,
        )
        return _json(table)

    async def _write_tokens(self, place: Place, chunk: ChunkEntry) -> bytes:
        fd = self._node.contents.open_inode(chunk.inode)
        if fd is None:
            raise NamespaceError(errno.ESTALE)
        try:
            header = await trio.to_thread.run_sync(read_header, fd, chunk.inode.size_bytes)
        finally:
            self._node.reclaim.close(fd)
        if header.token_ids is None:
            raise Corrupt("chunk", "its header has lost its token ids")
        if place.kind is Kind.TOKENS:
            return " ".join(map(str, header.token_ids)).encode() + b"\n"
        assert self._decode is not None
        text = await trio.to_thread.run_sync(self._decode, header.token_ids)
        return text.encode("utf-8", "replace")


def _names_model(name: bytes) -> bool:
    return split_namespace(KV_DIRECTORY + b"/" + name) is not None


def _json(table: object) -> bytes:
    text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def _shown(inode: Inode) -> pyfuse3.EntryAttributes:
    """Nothing of the view is kept by the kernel: it changes without notice."""
    entry = attributes(inode, inode.ino, is_changing=True)
    entry.entry_timeout = 0.0
    return entry
