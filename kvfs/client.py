"""A client of the node: sync, thread-safe, for engine processes and the command line.

Control goes over the node's Unix socket in batches; data does not: `open` and `stage` give file
descriptors, and the caller reads and writes them itself. A node that is away costs `Unavailable`
(a miss to an engine), at once while it backs off, until the node is there again.

Paths are bytes from the root of the namespace. Every call may raise `Unavailable`, `InvalidInput`
and, where it says so, another of `kvfs.errors`.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvfs.config import (
    BATCH_ITEMS_MAX,
    CLIENT_DEADLINE_S,
    COPIES_ASKED_MAX,
    DESCRIPTORS_PER_MESSAGE_MAX,
    FRAME_BYTES_MAX,
    STAGES_PER_CLIENT_MAX,
)
from kvfs.connection import Connection
from kvfs.errors import InvalidInput, KvfsError, NamespaceError, Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys
from kvfs.replicate import Holder
from kvfs.start import NodeStarter
from kvfs.wire import (
    Reply,
    pack_chunk_keys,
    pack_record,
    unpack_chunk_entry,
    unpack_entry,
    unpack_holder,
    unpack_record,
)

Item = TypeVar("Item")

_BATCH_BYTES_MAX = FRAME_BYTES_MAX // 2  # of paths in one request; the rest of it has room beside
_BACKOFF_S = (0.05, 2.0)  # first, longest
_PAGE_PATHS = 1000  # of one digest, in one answer
_LONG_DEADLINE_S = 600.0  # for work over a whole file or store


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A published file, open for reading. The descriptor is the holder's to close."""

    fd: int
    size_bytes: int
    digest: bytes

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A published file whose bytes another node has. The ticket opens all of them once, for a short
    time, to `kvfs.remote.RemoteReader`."""

    size_bytes: int
    digest: bytes
    address: str  # `host:port`
    ticket: bytes

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A private file to fill. The descriptor is the holder's to close, published or not."""

    token: int
    fd: int


@dataclass(frozen=True, slots=True)
class StagedFile:
    """What a filled staged file is to become."""

    token: int
    path: bytes
    digest: bytes  # xxh3_128 of the whole file
    size_bytes: int
    chunk: ChunkInfo | None = None


class Client:
    """See the module's docstring. Connects at the first call, and again after a failure."""

    def __init__(
        self, store: Path, *, start: bool = False, deadline_s: float = CLIENT_DEADLINE_S
    ) -> None:
        self._store = store
        self._starter = NodeStarter(store) if start else None
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._backoff_s = 0.0
        self._retry_at_s = 0.0

    def close(self) -> None:
        """End the connection; staged files that were not published go. A call that another thread
        has under way for too long fails."""
        if self._lock.acquire(timeout=self._deadline_s / 2):
            try:
                self._drop()
                if self._starter is not None:
                    self._starter.close()
            finally:
                self._lock.release()
        elif (connection := self._connection) is not None:
            connection.abort()  # whose call it is drops it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # What an engine needs ------------------------------------------------------------------------
    def lookup(self, paths: Sequence[bytes]) -> list[int | None]:
        """The size in bytes of each published file; None is a miss."""
        sizes: list[int | None] = []
        for batch in _path_batches(paths):
            sizes += self._call("sizes", batch)[0]
        return sizes

    def lookup_chunks(self, namespace: bytes, keys: ChunkKeys) -> list[int | None]:
        """As `lookup`, for chunks of `kv/<model>@<fingerprint>`: in half the time."""
        return [
            size
            for batch in keys.batches(BATCH_ITEMS_MAX)
            for size in self._call("chunk_sizes", namespace, *pack_chunk_keys(batch))[0]
        ]

    def open(self, paths: Sequence[bytes], *, is_use: bool = True) -> list[OpenFile | None]:
        """Open published files for reading, which counts as a use (the first as the most recent)
        unless one only looks. The bytes are not checked: compare the digest after reading."""
        opened: list[OpenFile | None] = []
        try:
            for batch in _batches(paths, DESCRIPTORS_PER_MESSAGE_MAX):
                found, descriptors = self._call("open", batch, is_use)
                rest = iter(descriptors)
                opened += [
                    None if item is None else OpenFile(next(rest), item[0], item[1])
                    for item in found
                ]
        except BaseException:
            close_all(opened)
            raise
        return opened

    def open_nearest(self, paths: Sequence[bytes]) -> list[OpenFile | RemoteFile | None]:
        """As `open`, but what only another node has is not brought here first."""
        opened: list[OpenFile | RemoteFile | None] = []
        try:
            for batch in _batches(paths, DESCRIPTORS_PER_MESSAGE_MAX):
                found, descriptors = self._call("open_nearest", batch)
                rest = iter(descriptors)
                opened += [_opened(item, rest) for item in found]
        except BaseException:
            close_all(opened)
            raise
        return opened

    def stage(self, sizes_bytes: Sequence[int]) -> list[Staged]:
        """Private files with room reserved for these sizes. Raises `OutOfSpace`. They live as long
        as this client's connection."""
        staged: list[Staged] = []
        try:
            for batch in _batches(sizes_bytes, DESCRIPTORS_PER_MESSAGE_MAX):
                tokens, descriptors = self._call("stage", batch)
                staged += map(Staged, tokens, descriptors)
        except BaseException:
            for item in staged:
                os.close(item.fd)
            if staged and self._connection is not None:  # else they went with it
                with contextlib.suppress(KvfsError):
                    self.discard([item.token for item in staged])
            raise
        return staged

    def publish(self, files: Sequence[StagedFile]) -> None:
        """Give staged files their names, each batch in one transaction. The tokens are used up,
        also when it fails."""
        for batch in _batches(files, STAGES_PER_CLIENT_MAX):
            self._call("publish", [
                [
                    file.token,
                    file.path,
                    file.digest,
                    file.size_bytes,
                    None if file.chunk is None else pack_record(file.chunk),
                ]
                for file in batch
            ])  # fmt: skip

    def discard(self, tokens: Sequence[int]) -> None:
        """Drop staged files that will not be published."""
        for batch in _batches(tokens, STAGES_PER_CLIENT_MAX):
            self._call("discard", batch)

    def report_corrupt(self, digest: bytes, deadline_s: float = _LONG_DEADLINE_S) -> bool:
        """Have the node check a blob again; True when it was bad and is quarantined. The node reads
        all of it, which from a disk that fails takes long: no other thread should wait behind."""
        return bool(self._call("report_corrupt", digest, deadline_s=deadline_s)[0])

    def touch(self, paths: Sequence[bytes]) -> None:
        """Note a use without opening."""
        for batch in _path_batches(paths):
            self._call("touch", batch)

    # What a shell needs --------------------------------------------------------------------------
    def stat(self, path: bytes) -> Inode | None:
        value = self._call("stat", path)[0]
        return None if value is None else unpack_record(Inode, value)

    def entries(self, path: bytes, after: bytes = b"", limit: int = 1000) -> list[Entry]:
        """Names greater than `after`, in byte order. Raises `NamespaceError`."""
        return [unpack_entry(value) for value in self._call("list", path, after, limit)[0]]

    def children(
        self, namespace: bytes, parent_key: bytes, after: int = 0, limit: int = 1000
    ) -> list[ChunkEntry]:
        """Chunks of `kv/<model>@<fingerprint>` that continue the chunk `parent_key` (b"": those
        that start a prompt), by inode greater than `after`. Raises `NamespaceError`."""
        found = self._call("children", namespace, parent_key, after, limit)[0]
        return [unpack_chunk_entry(value) for value in found]

    def children_of(
        self, namespace: bytes, parent_keys: Sequence[bytes], limit: int
    ) -> list[list[ChunkEntry]]:
        """The first `limit` children of each of many chunks at once; see `children`, which goes on
        from there."""
        return [
            [unpack_chunk_entry(value) for value in found]
            for batch in _batches(parent_keys, max(1, BATCH_ITEMS_MAX // limit))
            for found in self._call("children_of", namespace, batch, limit)[0]
        ]

    def chunk(self, path: bytes) -> ChunkInfo | None:
        value = self._call("chunk", path)[0]
        return None if value is None else unpack_record(ChunkInfo, value)

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        """Where the bytes of each digest lie; None when no file has it."""
        return [
            None if value is None else unpack_record(Blob, value)
            for batch in _batches(digests, BATCH_ITEMS_MAX)
            for value in self._call("blobs", batch)[0]
        ]

    def paths_of(self, digest: bytes) -> Sequence[bytes]:
        """Every path whose file has this digest."""
        paths: list[bytes] = []
        after: list[Any] = [0, 0, b""]
        while page := self._call("paths_of", digest, *after, _PAGE_PATHS)[0]:
            paths += [path for *_, path in page]
            after = page[-1][:3]
        return paths

    def pin(self, paths: Sequence[bytes]) -> int:
        """Protect files from eviction; how many there were."""
        return sum(self._call("set_pinned", b, True)[0] for b in _path_batches(paths))

    def unpin(self, paths: Sequence[bytes]) -> int:
        return sum(self._call("set_pinned", b, False)[0] for b in _path_batches(paths))

    def evict(self, paths: Sequence[bytes]) -> int:
        """Remove files that are not pinned; how many."""
        return sum(self._call("evict", b)[0] for b in _path_batches(paths))

    def verify(self, path: bytes) -> bool:
        """As `verify_all` for one file. Raises `NamespaceError`: ENOENT when there is none, EIO
        when it cannot be read."""
        (found,) = self.verify_all([path])
        if not isinstance(found, bool):
            raise NamespaceError(errno.ENOENT if found is None else errno.EIO, path)
        return found

    def verify_all(self, paths: Sequence[bytes]) -> list[bool | str | None]:
        """Have the node read files whole and compare their digests: False for a bad one (it is
        quarantined then), None where there is none, and why for one that cannot be read."""
        return [
            found
            for batch in _path_batches(paths)
            for found in self._call("verify", batch, deadline_s=_LONG_DEADLINE_S)[0]
        ]

    def gc(self) -> dict[str, Any]:
        """Remove what dead processes left; see `kvfs.upkeep.Collected`."""
        collected: dict[str, Any] = self._call("gc", deadline_s=_LONG_DEADLINE_S)[0]
        return collected

    def rebuild(self) -> int:
        """Give chunk files whose metadata was lost their names again; how many."""
        return int(self._call("rebuild", deadline_s=_LONG_DEADLINE_S)[0])

    def copies(self, digests: Sequence[bytes]) -> list[list[Holder]] | None:
        """The nodes that have the bytes of each digest; None when the node is in no cluster."""
        copies: list[list[Holder]] = []
        for batch in _batches(digests, COPIES_ASKED_MAX):
            answer = self._call("copies", batch)[0]
            if answer is None:
                return None
            holders = [unpack_holder(value) for value in answer[1]]
            copies += [[holders[number] for number in numbers] for numbers in answer[0]]
        return copies

    def leave(self, *, begin: bool = True) -> dict[str, Any]:
        """Have the node leave its cluster, or only ask how far it is; see
        `kvfs.cluster.drain.Drain.describe`. Raises `InvalidInput` when it is in none."""
        leaving: dict[str, Any] = self._call("leave", begin)[0]
        return leaving

    def status(self) -> dict[str, Any]:
        """See `kvfs.status.status_of`."""
        status: dict[str, Any] = self._call("status")[0]
        return status

    # The connection ------------------------------------------------------------------------------
    def _call(
        self, operation: str, *arguments: Any, deadline_s: float | None = None
    ) -> tuple[Any, Sequence[int]]:
        # Half for the turn, so that a request never goes out with too little time for its answer: a
        # connection that fails to answer is dropped, with the stages of other threads.
        turn_s = (deadline_s or self._deadline_s) / 2
        end_s = time.monotonic() + 2 * turn_s
        if not self._lock.acquire(timeout=turn_s):
            raise Unavailable(
                f"{self._store}: another thread's call takes longer than {turn_s:g} s"
            )
        try:
            reply, descriptors = self._exchange(operation, arguments, end_s)
        finally:
            self._lock.release()
        if reply.error is not None:
            raise reply.error
        return reply.result, descriptors

    def _exchange(
        self, operation: str, arguments: Sequence[Any], end_s: float
    ) -> tuple[Reply, list[int]]:
        """One request and its reply, by who holds the lock."""
        connection = self._connect(end_s)
        frame = connection.encode(operation, arguments)  # one that is refused costs only its caller
        try:
            return connection.exchange(frame, end_s)
        except (OSError, Unavailable) as error:
            self._drop()
            raise Unavailable(f"{self._store}: the node does not answer ({error})") from error
        except BaseException:
            self._drop()  # its reply would be taken for that to the next request
            raise

    def _connect(self, end_s: float) -> Connection:
        if self._connection is not None:
            return self._connection
        if time.monotonic() < self._retry_at_s:
            raise Unavailable(f"{self._store}: no node answers; trying again shortly")
        try:
            self._connection = self._dial(end_s)
        except Unavailable:
            self._back_off()
            raise
        except OSError as error:
            self._back_off()
            raise Unavailable(
                f"{self._store}: no node answers ({error.strerror or error}); {_advice(error)}"
            ) from error
        self._backoff_s = 0.0
        return self._connection

    def _back_off(self) -> None:
        first_s, longest_s = _BACKOFF_S
        self._backoff_s = min(max(first_s, self._backoff_s * 2), longest_s)
        self._retry_at_s = time.monotonic() + self._backoff_s

    def _dial(self, end_s: float) -> Connection:
        """Connect, and start a node where none is. Takes no longer than the call that needs it:
        those of other threads wait behind it."""
        try:
            return self._greet(end_s)
        except (FileNotFoundError, ConnectionRefusedError):
            if self._starter is None:
                raise
        return self._starter.connect(lambda: self._greet(end_s), end_s)

    def _greet(self, end_s: float) -> Connection:
        """However long the call may take, a node greets at once or hangs."""
        return Connection(self._store, min(end_s, time.monotonic() + self._deadline_s))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def close_all(files: Sequence[OpenFile | RemoteFile | None]) -> None:
    """Close those that are there."""
    for file in files:
        if file is not None:
            file.close()


def _opened(item: list[Any] | None, descriptors: Iterator[int]) -> OpenFile | RemoteFile | None:
    """One answer to `open_nearest`."""
    match item:
        case None:
            return None
        case [int(size_bytes), bytes(digest)]:
            return OpenFile(next(descriptors), size_bytes, digest)
        case [int(size_bytes), bytes(digest), str(address), bytes(ticket)]:
            return RemoteFile(size_bytes, digest, address, ticket)
    raise InvalidInput("open_nearest", "the node's answer is none; client and node differ")


def _advice(error: OSError) -> str:
    """What to do about a node that cannot be spoken to."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "start one with kvfs mount or kvfs serve"
    if isinstance(error, PermissionError):
        return "run as its user, or let others in with socket_mode in kvfs.toml"
    return "there is one, which is stopped, stuck or has too many clients; see node.log"


def _batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _path_batches(paths: Sequence[bytes]) -> Iterator[list[bytes]]:
    """As many paths as one request takes, by number and by bytes. One alone always goes: the node
    says what is wrong with it."""
    for batch in _batches(paths, BATCH_ITEMS_MAX):
        if len(batch) == 1 or sum(map(len, batch)) <= _BATCH_BYTES_MAX:
            yield batch
        else:
            middle = len(batch) // 2
            yield from _path_batches(batch[:middle])
            yield from _path_batches(batch[middle:])
