"""A client of the node: sync, thread-safe, for engine processes and the command line.

Control goes over the node's Unix socket in batches; data does not: `open` and `stage` give file
descriptors, and the caller reads and writes them itself. A node that is away costs `Unavailable`
(a miss to an engine), at once while it backs off, until the node is there again.

Paths are bytes from the root of the namespace. Every call may raise `Unavailable`, `InvalidInput`
and, where it says so, another of `kvfs.errors`.
"""

import array
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvfs.config import (
    BATCH_ITEMS_MAX,
    CLIENT_DEADLINE_S,
    DESCRIPTORS_PER_MESSAGE_MAX,
    STAGES_PER_CLIENT_MAX,
)
from kvfs.errors import KvfsError, NamespaceError, Unavailable
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys
from kvfs.start import start_node
from kvfs.wire import (
    PROTOCOL,
    FrameDecoder,
    Reply,
    Request,
    decode_reply,
    encode_request,
    pack_chunk_keys,
    pack_record,
    unpack_chunk_entry,
    unpack_entry,
    unpack_record,
)

Item = TypeVar("Item")

_RECEIVE_BYTES = 256 * 1024
_SEND_BUFFER_BYTES = 1024 * 1024
_BACKOFF_S = (0.05, 2.0)  # first, longest
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
        self._start = start
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._backoff_s = 0.0
        self._retry_at_s = 0.0

    def close(self) -> None:
        """End the connection; staged files that were not published go. A call that another thread
        has under way for too long fails."""
        if self._lock.acquire(timeout=self._deadline_s / 2):
            try:
                self._drop()
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
        for batch in _batches(paths, BATCH_ITEMS_MAX):
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
            for file in opened:
                if file is not None:
                    file.close()
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

    def report_corrupt(self, digest: bytes) -> bool:
        """Have the node check a blob again; True when it was bad and is quarantined."""
        return bool(self._call("report_corrupt", digest, deadline_s=_LONG_DEADLINE_S)[0])

    def touch(self, paths: Sequence[bytes]) -> None:
        """Note a use without opening."""
        for batch in _batches(paths, BATCH_ITEMS_MAX):
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
        paths: Sequence[bytes] = self._call("paths_of", digest)[0]
        return paths

    def pin(self, paths: Sequence[bytes]) -> int:
        """Protect files from eviction; how many there were."""
        return sum(self._call("set_pinned", b, True)[0] for b in _batches(paths, BATCH_ITEMS_MAX))

    def unpin(self, paths: Sequence[bytes]) -> int:
        return sum(self._call("set_pinned", b, False)[0] for b in _batches(paths, BATCH_ITEMS_MAX))

    def evict(self, paths: Sequence[bytes]) -> int:
        """Remove files that are not pinned; how many."""
        return sum(self._call("evict", b)[0] for b in _batches(paths, BATCH_ITEMS_MAX))

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
            for batch in _batches(paths, BATCH_ITEMS_MAX)
            for found in self._call("verify", batch, deadline_s=_LONG_DEADLINE_S)[0]
        ]

    def gc(self) -> dict[str, int]:
        """Remove what dead processes left; see `kvfs.upkeep.Collected`."""
        collected: dict[str, int] = self._call("gc", deadline_s=_LONG_DEADLINE_S)[0]
        return collected

    def rebuild(self) -> int:
        """Give chunk files whose metadata was lost their names again; how many."""
        return int(self._call("rebuild", deadline_s=_LONG_DEADLINE_S)[0])

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
        begin_s = time.monotonic()
        if not self._lock.acquire(timeout=turn_s):
            raise Unavailable(
                f"{self._store}: another thread's call takes longer than {turn_s:g} s"
            )
        try:
            left_s = 2 * turn_s - (time.monotonic() - begin_s)
            reply, descriptors = self._exchange(operation, arguments, left_s)
        finally:
            self._lock.release()
        if reply.error is not None:
            raise reply.error
        return reply.result, descriptors

    def _exchange(
        self, operation: str, arguments: Sequence[Any], deadline_s: float
    ) -> tuple[Reply, list[int]]:
        """One request and its reply, by who holds the lock."""
        connection = self._connect()
        try:
            return connection.call(operation, list(arguments), deadline_s)
        except (OSError, Unavailable) as error:
            self._drop()
            raise Unavailable(f"{self._store}: the node does not answer ({error})") from error
        except BaseException:
            self._drop()  # its reply would be taken for that to the next request
            raise

    def _connect(self) -> "_Connection":
        if self._connection is not None:
            return self._connection
        if time.monotonic() < self._retry_at_s:
            raise Unavailable(f"{self._store}: no node answers; trying again shortly")
        try:
            self._connection = self._dial()
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

    def _dial(self) -> "_Connection":
        try:
            return _Connection(self._store, self._deadline_s)
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._start:
                raise
        return start_node(self._store, lambda: _Connection(self._store, self._deadline_s))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _advice(error: OSError) -> str:
    """What to do about a node that cannot be spoken to."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "start one with kvfs mount or kvfs serve"
    if isinstance(error, PermissionError):
        return "run as its user, or let others in with socket_mode in kvfs.toml"
    return "there is one, which is stopped, stuck or has too many clients; see node.log"


class _Connection:
    """One connection: a request, its reply, and the descriptors that came with it."""

    def __init__(self, store: Path, deadline_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._decoder = FrameDecoder()
        self._number = 0
        try:
            self._socket.settimeout(deadline_s)
            # Room for a whole batch, so that it is sent in one go.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            directory = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # A socket's own path may not exceed 107 bytes.
                self._socket.connect(f"/proc/self/fd/{directory}/node.sock")
            finally:
                os.close(directory)
            reply, _ = self.call("hello", [PROTOCOL], deadline_s)
            if reply.error is not None:
                raise reply.error
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """Make a call that waits on another thread fail."""
        with contextlib.suppress(OSError):  # closed meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    def call(
        self, operation: str, arguments: Sequence[Any], deadline_s: float
    ) -> tuple[Reply, list[int]]:
        self._number += 1
        frame = encode_request(Request(self._number, operation, list(arguments)))
        end_s = time.monotonic() + deadline_s
        self._socket.settimeout(deadline_s)
        self._socket.sendall(frame)
        descriptors: list[int] = []
        try:
            reply = self._receive(end_s, descriptors)
            if reply.number != self._number or reply.descriptors != len(descriptors):
                raise Unavailable("its reply does not fit the request")
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return reply, descriptors

    def _receive(self, end_s: float, descriptors: list[int]) -> Reply:
        room = socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE_MAX * array.array("i").itemsize)
        while True:
            self._socket.settimeout(max(0.001, end_s - time.monotonic()))
            data, ancillary, _, _ = self._socket.recvmsg(
                _RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
                    descriptors += received
            if not data:
                raise Unavailable("it closed the connection")
            for value in self._decoder.feed(data):
                return decode_reply(value)


def _batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
