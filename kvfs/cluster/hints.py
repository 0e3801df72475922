"""Copies that other nodes want to be here: taken when there is room, or when they are newer than
what lies here.

So a full node takes new files as it takes writes, at the cost of its coldest, and no old ones: what
one node evicts others do not bring back to it. Digests that no file has, or that are here, cost
their sender's message.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from kvfs.config import HINTED_FETCHES_MAX, HINTS_WAITING_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode
from kvfs.node import Node

_MARGIN = 32  # a part of what is stored: more than eviction frees beyond its need
log = logging.getLogger(__name__)
Bring = Callable[[Iterable[Inode]], Awaitable[None]]


class Hints:
    """In the node's thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: set[bytes] = set()
        self._spare_only: set[bytes] = set()  # of those that wait
        self._coming_bytes = 0  # of those that are fetched for room to spare
        self._send, self._receive = trio.open_memory_channel[bytes](HINTS_WAITING_MAX)
        self._is_refusing = False

    def take(self, digests: Sequence[bytes], *, spare_only: bool = False) -> None:
        """A peer thinks that these should be here, with `spare_only` at the cost of nothing that
        is. Those beyond the limit are dropped: it will ask again."""
        if self._is_refusing:
            return
        for digest in digests:
            if digest in self._waiting:
                continue
            try:
                self._send.send_nowait(digest)
            except trio.WouldBlock:
                return
            self._waiting.add(digest)
            if spare_only:
                self._spare_only.add(digest)

    def refuse(self) -> None:
        """Take nothing any more, and have no room: the node is leaving."""
        self._is_refusing = True

    def spare_bytes(self) -> int:
        """What others may put here without costing anything that is here; of what they want to put
        here already the size is guessed."""
        if self._is_refusing:
            return 0
        usage = self._node.meta.usage()
        waiting_bytes = len(self._waiting) * usage.size_bytes // max(1, usage.blobs)
        spare = sum(self._spare_bytes(index) for index in range(len(self._node.directories)))
        return max(0, spare - waiting_bytes)

    def _spare_bytes(self, index: int) -> int:
        space = self._node.space
        return max(0, space.room_bytes(index) - space.used_bytes(index) // _MARGIN)

    async def work_always(self, bring: Bring) -> None:
        """Background task: fetch what is worth it; `bring` has the bytes of files here."""
        async with trio.open_nursery() as nursery:
            for _ in range(HINTED_FETCHES_MAX):
                nursery.start_soon(self._work, bring)

    async def _work(self, bring: Bring) -> None:
        async for digest in self._receive:
            coming_bytes = 0
            try:
                inode = None if self._is_refusing else self._file_worth_having(digest)
                if inode is not None:
                    if digest in self._spare_only:  # no other one is to count on the same room
                        coming_bytes = inode.size_bytes
                        self._coming_bytes += coming_bytes
                    await bring([inode])
                    self._count(digest)
            except KvfsError as error:
                log.info("no copy of %s: %s", digest.hex(), error)
            finally:
                self._coming_bytes -= coming_bytes
                self._waiting.discard(digest)
                self._spare_only.discard(digest)
            await trio.lowlevel.checkpoint()

    def _count(self, digest: bytes) -> None:
        if self._node.meta.blobs([digest])[0] is not None:
            self._node.counters.hinted_files += 1

    def _file_worth_having(self, digest: bytes) -> Inode | None:
        meta = self._node.meta
        if meta.blobs([digest])[0] is not None:
            return None
        held = meta.held_paths(digest, (0, 0, b""), 1)
        inode = meta.inode(held[0].ino) if held else None
        if inode is None or inode.digest != digest:
            return None
        return inode if self._has_room(inode) else None

    def _has_room(self, inode: Inode) -> bool:
        node, size_bytes = self._node, inode.size_bytes
        indices = range(len(node.directories))
        needed_bytes = size_bytes + self._coming_bytes
        if any(self._spare_bytes(index) >= needed_bytes for index in indices):
            return True
        if inode.digest in self._spare_only:
            return False
        if not any(node.space.fits_ever(index, size_bytes) for index in indices):
            return False
        coldest = node.meta.coldest(1)
        return bool(coldest) and coldest[0].used_ns < inode.used_ns
