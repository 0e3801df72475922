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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvfs.calls import Calls
from kvfs.client_files import OpenFile, Staged, StagedFile, close_all
from kvfs.config import (
    BATCH_ITEMS_MAX,
    BRING_WAIT_S,
    CLIENT_DEADLINE_S,
    COPIES_ASKED_MAX,
    DESCRIPTORS_PER_MESSAGE_MAX,
    FRAME_BYTES_MAX,
    STAGES_PER_CLIENT_MAX,
    WARM_WINDOW_FILES,
)
from kvfs.errors import KvfsError, NamespaceError
from kvfs.located import (
    COMING,
    Located,
    ToldTiers,
    unpack_located,
    unpack_sizes,
    unpack_tickets,
    unpack_tiers,
)
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import ChunkKeys
from kvfs.replicate import Holder
from kvfs.warm import Warmth
from kvfs.wire import (
    pack_chunk_keys,
    pack_record,
    unpack_chunk_entry,
    unpack_entry,
    unpack_holder,
    unpack_record,
)

Item = TypeVar("Item")

_BATCH_BYTES_MAX = FRAME_BYTES_MAX // 2  # of paths in one request; the rest of it has room beside
_PAGE_PATHS = 1000  # of one digest, in one answer
_LONG_DEADLINE_S = 600.0  # for work over a whole file or store


class Client:
    """See the module's docstring. Connects at the first call, and again after a failure."""

    def __init__(
        self, store: Path, *, start: bool = False, deadline_s: float = CLIENT_DEADLINE_S
    ) -> None:
        self._calls = Calls(store, start=start, deadline_s=deadline_s)
        self._call = self._calls.call
        self._deadline_s = deadline_s

    def close(self) -> None:
        """End the connection; staged files that were not published go. A call that another thread
        has under way for too long fails."""
        self._calls.close()

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
        unless one only looks. What the node brings for that is waited for until the client's
        deadline, and None then. The bytes are not checked: compare the digest after reading."""
        end_s = time.monotonic() + self._deadline_s
        opened, coming = self.bring(paths, self._deadline_s, is_use=is_use)
        try:
            while coming and (left_s := end_s - time.monotonic()) > 0:
                found, places = self.bring([paths[n] for n in coming], left_s, is_use=is_use)
                for number, file in zip(coming, found, strict=True):
                    opened[number] = file
                coming = [coming[place] for place in places]
        except BaseException:
            close_all(opened)
            raise
        return opened

    def bring(
        self, paths: Sequence[bytes], wait_s: float, *, is_use: bool = True
    ) -> tuple[list[OpenFile | None], list[int]]:
        """As `open`, but the node waits so long at most for what comes, and no longer than
        `BRING_WAIT_S` or a quarter of the client's deadline. Also the places in the list of those
        that are None while they are on their way: who asks again goes on to wait for them."""
        wait_s = float(min(wait_s, BRING_WAIT_S, self._deadline_s / 4))
        opened: list[OpenFile | None] = []
        coming: list[int] = []
        try:
            for batch in _batches(paths, DESCRIPTORS_PER_MESSAGE_MAX):
                found, descriptors = self._call("open", batch, is_use, wait_s)
                rest = iter(descriptors)
                for item in found:
                    if item == COMING:
                        coming.append(len(opened))
                    is_here = item is not None and item != COMING
                    opened.append(OpenFile(next(rest), *item) if is_here else None)
        except BaseException:
            close_all(opened)
            raise
        return opened, coming

    def locate(self, paths: Sequence[bytes]) -> Located:
        """Every place that has the bytes of published files, and a descriptor of a copy here, which
        counts as a use; None for what is nowhere. What only tiers or other nodes have is not
        brought here; what nobody is known to have, or clients can't get, comes, and has no place
        when that takes long: `bring` waits for it. The bytes are not checked: compare the digest
        after reading."""
        located = Located(0, [])
        try:
            for batch in _batches(paths, DESCRIPTORS_PER_MESSAGE_MAX):
                answer, descriptors = self._call("locate", batch)
                try:
                    found = unpack_located(answer, descriptors, len(batch))
                except BaseException:
                    for fd in descriptors:
                        os.close(fd)
                    raise
                located = Located(found.revision, located.files + found.files)
        except BaseException:
            close_all(located.files)
            raise
        return located

    def tiers(self) -> ToldTiers:
        """The tiers of the node, for who reads from them itself; see `kvfs.tiers.opening`."""
        return unpack_tiers(self._call("tiers")[0])

    def expect(self, paths: Sequence[bytes]) -> bool:
        """Tell that somebody will read files soon, in this order; False when the node never brings
        anything near by itself."""
        return all(self._call("expect", batch)[0] for batch in _path_batches(paths))

    def note_gone(self, gone: Sequence[tuple[int, bytes]]) -> None:
        """Tell that tiers (their numbers) have blobs (their digests) no more, as they said when
        they were read."""
        for batch in _batches(gone, BATCH_ITEMS_MAX):
            self._call("note_gone", list(map(list, batch)))

    def peer_tickets(
        self, node_id: bytes, ranges: Sequence[tuple[bytes, int, int]]
    ) -> tuple[str, list[bytes | None]]:
        """Tickets of another node for ranges (digest, offset, length) of what it has, at most
        `PEER_TICKETS_ASKED_MAX`, and the address at which `kvfs.remote.RemoteReader` uses them;
        None for what it has not. Raises `Unavailable` also when that node does not give any."""
        answer = self._call("peer_tickets", node_id, list(map(list, ranges)))[0]
        return unpack_tickets(answer, len(ranges))

    def peer_sizes(self, node_id: bytes, digests: Sequence[bytes]) -> list[int | None]:
        """The sizes of blobs that another node has. Raises `Unavailable` as `peer_tickets`."""
        return [
            size
            for batch in _batches(digests, BATCH_ITEMS_MAX)
            for size in unpack_sizes(self._call("peer_sizes", node_id, batch)[0], len(batch))
        ]

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
            if staged and self._calls.is_connected:  # else they went with it
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

    def is_here(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether this node can open each blob: not what lies on a directory that is missing."""
        return [
            bool(value)
            for batch in _batches(digests, BATCH_ITEMS_MAX)
            for value in self._call("is_here", batch)[0]
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
        """Remove files that are not pinned; how many. In a cluster this node's copy only, where
        other nodes have one."""
        return sum(self._call("evict", b)[0] for b in _path_batches(paths))

    def evict_copies(self, paths: Sequence[bytes]) -> tuple[int, int]:
        """As `evict`; and how many of these stay, since tiers or other nodes have them."""
        answers = [self._call("evict_copies", b)[0] for b in _path_batches(paths)]
        return sum(answer[0] for answer in answers), sum(answer[1] for answer in answers)

    def warm(self, paths: Sequence[bytes]) -> list[Warmth]:
        """Have the bytes of files come to this node, and say how near each is after a moment: ask
        again for those that are coming. At most `WARM_WINDOW_FILES` at the same time."""
        return [
            Warmth(answer)
            for batch in _path_batches(paths, WARM_WINDOW_FILES)
            for answer in self._call("warm", batch)[0]
        ]

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

    def tiers_of(self, digests: Sequence[bytes]) -> list[list[str]] | None:
        """The names of the tiers that have the bytes of each digest, as far as the node knows; None
        when it has no tiers."""
        names: list[list[str]] = []
        for batch in _batches(digests, BATCH_ITEMS_MAX):
            answer = self._call("tiers_of", batch)[0]
            if answer is None:
                return None
            names += answer
        return names

    def leave(self, *, begin: bool = True) -> dict[str, Any]:
        """Have the node leave its cluster, or only ask how far it is; see
        `kvfs.cluster.drain.Drain.describe`. Raises `InvalidInput` when it is in none."""
        leaving: dict[str, Any] = self._call("leave", begin)[0]
        return leaving

    def status(self) -> dict[str, Any]:
        """See `kvfs.status.status_of`."""
        status: dict[str, Any] = self._call("status")[0]
        return status


def _batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _path_batches(
    paths: Sequence[bytes], files_max: int = BATCH_ITEMS_MAX
) -> Iterator[list[bytes]]:
    """As many paths as one request takes, by number and by bytes. One alone always goes: the node
    says what is wrong with it."""
    for batch in _batches(paths, files_max):
        if len(batch) == 1 or sum(map(len, batch)) <= _BATCH_BYTES_MAX:
            yield batch
        else:
            middle = len(batch) // 2
            yield from _path_batches(batch[:middle])
            yield from _path_batches(batch[middle:])
