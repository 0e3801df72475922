"""Bringing bytes here that only other nodes have."""

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from kvfs.cluster.fetch import fetch_blob
from kvfs.cluster.location import Location
from kvfs.config import (
    CLUSTER_FETCH_S,
    CLUSTER_FETCHES_MAX,
    CLUSTER_HOLDER_WAIT_S,
    CLUSTER_RENEW_S,
    MIB,
)
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode
from kvfs.meta.redis import RedisEngine
from kvfs.node import Node
from kvfs.stage import Stage

_SLOW_BYTES_S = 10 * MIB  # a transfer that is slower is given up
log = logging.getLogger(__name__)


class Fetcher:
    """Fetches blobs from the nodes that hold them, each once however many want it."""

    def __init__(
        self,
        node: Node,
        engine: RedisEngine,
        location: Location,
        ask_again: Callable[[], Awaitable[None]],
    ) -> None:
        """`ask_again`: know anew who has what, and who is there."""
        self._node = node
        self._engine = engine
        self._location = location
        self._ask_again = ask_again
        self._fetching: dict[bytes, trio.Event] = {}
        self._limiter = trio.CapacityLimiter(CLUSTER_FETCHES_MAX)

    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, as far as any node that is there has them."""
        wanted = {i.digest: i.size_bytes for i in inodes if i.is_published}
        known = self._engine.blobs(list(wanted))
        missing = [d for d, blob in zip(wanted, known, strict=True) if blob is None]
        async with trio.open_nursery() as nursery:
            for digest in missing:
                nursery.start_soon(self._bring_one, digest, wanted[digest])

    async def _bring_one(self, digest: bytes, size_bytes: int) -> None:
        running = self._fetching.get(digest)
        if running is not None:
            await running.wait()
            return
        self._fetching[digest] = trio.Event()
        try:
            await self._fetch(digest, size_bytes)
        except (KvfsError, OSError) as error:
            log.warning("blob %s cannot be fetched: %s", digest.hex(), error)
        finally:
            self._fetching.pop(digest).set()

    async def _fetch(self, digest: bytes, size_bytes: int) -> None:
        stage = self._node.stage(size_bytes)
        try:
            await self._node.reserve(stage, size_bytes)
            end_s = trio.current_time() + CLUSTER_HOLDER_WAIT_S
            while not await self._fetch_into(stage, digest, size_bytes):
                # Who has joined just now may not be known yet, here or to who has the bytes.
                await self._ask_again()
                if not self._location.holders(digest) or trio.current_time() > end_s:
                    log.info("blob %s: no node gives it", digest.hex())
                    return
                await trio.sleep(CLUSTER_RENEW_S / 2)
            await self._node.publisher.adopt_copy(stage, digest, size_bytes, self._engine.add_copy)
            self._node.counters.fetched_bytes += size_bytes
        finally:
            if stage.is_open:
                self._node.discard(stage)
            else:
                self._node.reclaim.close(stage.fd)

    async def _fetch_into(self, stage: Stage, digest: bytes, size_bytes: int) -> bool:
        deadline_s = CLUSTER_FETCH_S + size_bytes / _SLOW_BYTES_S
        clients = self._location.whom_to_ask(digest)
        return await trio.to_thread.run_sync(
            fetch_blob, clients, digest, size_bytes, stage.fd, deadline_s, limiter=self._limiter
        )
