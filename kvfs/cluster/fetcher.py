"""Bringing bytes here that only other nodes have: in the background, and read meanwhile."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from kvfs.cluster.arrival import Arrival, Ways
from kvfs.cluster.location import Location
from kvfs.config import (
    CLUSTER_DOUBTS_MAX,
    CLUSTER_FETCH_S,
    CLUSTER_FETCHES_MAX,
    CLUSTER_PULLS_MAX,
    CLUSTER_READ_S,
    CLUSTER_SLOW_BYTES_S,
    FETCH_WHOLE_BYTES,
)
from kvfs.meta.contract import Inode
from kvfs.meta.redis import RedisEngine
from kvfs.node import Node
from kvfs.peers.client import PeerClient
from kvfs.shared_fetches import SharedFetches, staged
from kvfs.stage import Stage

_HASHERS = 2
log = logging.getLogger(__name__)


class Fetcher:
    """Fetches blobs from the nodes that hold them, each once however many want it. A fetch goes on
    when nobody waits for it any more, until `run` is cancelled."""

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
        self._ways = Ways(
            location.whom_to_ask,
            ask_again,
            trio.CapacityLimiter(CLUSTER_PULLS_MAX),
            trio.CapacityLimiter(_HASHERS),
        )
        self._fetches: SharedFetches[Arrival] = SharedFetches("other nodes", CLUSTER_FETCHES_MAX)
        self._doubts: OrderedDict[bytes, set[PeerClient]] = OrderedDict()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Fetch what is asked for, until `stop`; before and after, no node gives anything."""
        await self._fetches.run(task_status)

    def stop(self) -> None:
        """The node ends: whoever waits for a file is told that it does not come."""
        self._fetches.stop()

    @property
    def under_way(self) -> int:
        """How many files are being fetched now, or wait for that."""
        return len(self._fetches)

    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, as far as any node that is there has them."""
        wanted = {inode.digest: inode for inode in inodes if inode.is_published}
        known = self._engine.blobs(list(wanted))
        missing = [d for d, blob in zip(wanted, known, strict=True) if blob is None]
        async with trio.open_nursery() as nursery:
            for digest in missing:
                nursery.start_soon(self._bring_one, wanted[digest])

    async def _bring_one(self, inode: Inode) -> None:
        arrival = self._join(inode)
        with trio.move_on_after(CLUSTER_FETCH_S + inode.size_bytes / CLUSTER_SLOW_BYTES_S):
            await arrival.wait_ended()

    async def begin(self, inode: Inode) -> Arrival | None:
        """A published file whose first bytes are here while others are on their way; None when all
        are, or no node gives them. A small one is waited for."""
        if inode.size_bytes <= FETCH_WHOLE_BYTES:
            await self.bring([inode])
            return None
        if self._engine.blobs([inode.digest])[0] is not None:
            return None
        arrival = self._join(inode)
        with trio.move_on_after(CLUSTER_READ_S):
            await arrival.wait_begun()
            return None if arrival.has_ended else arrival
        return None  # so many others are fetched

    def _join(self, inode: Inode) -> Arrival:
        """The fetch of a file's bytes, which is begun if there is none."""
        arrival = self._fetches.find(inode.digest)
        if arrival is not None:
            return arrival
        doubted = self._doubts.get(inode.digest)
        arrival = Arrival(inode.digest, inode.size_bytes, self._ways, doubted)
        if not self._fetches.start(inode.digest, arrival, partial(self._fetch, arrival)):
            arrival.end()
        return arrival

    async def _fetch(self, arrival: Arrival) -> None:
        digest, size_bytes = arrival.digest, arrival.size_bytes
        if not await self._is_anywhere(digest):  # for which nothing is evicted here
            log.info("blob %s: no node has it", digest.hex())
            return
        async with staged(self._node, size_bytes) as stage:
            try:
                if not await arrival.fill(stage.fd):
                    log.info("blob %s: no node gives it", digest.hex())
                else:
                    await self._adopt(stage, arrival)
                self._note_doubts(arrival)
            finally:
                arrival.end()  # its bytes are the stage's

    async def _is_anywhere(self, digest: bytes) -> bool:
        """Whether another node that is there has a blob."""
        if self._ways.whom_to_ask(digest):
            return True
        await self._ways.ask_again()
        return bool(self._ways.whom_to_ask(digest))

    async def _adopt(self, stage: Stage, arrival: Arrival) -> None:
        await self._node.publisher.adopt_copy(
            stage, arrival.digest, arrival.size_bytes, self._engine.add_copy
        )
        self._node.counters.fetched_bytes += arrival.size_bytes

    def _note_doubts(self, arrival: Arrival) -> None:
        """Remember who gave wrong bytes, until nobody else is left to ask."""
        self._doubts.pop(arrival.digest, None)
        if arrival.was_wrong or (arrival.is_whole and arrival.doubted):
            self._doubts[arrival.digest] = arrival.doubted
            if len(self._doubts) > CLUSTER_DOUBTS_MAX:
                self._doubts.popitem(last=False)
