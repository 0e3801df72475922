"""Dropping what nodes left unfinished that are gone for good: done by one node of all, the first of
those that are there, in small steps."""

import logging

import trio

from kvfs.cluster.membership import Membership
from kvfs.config import ABANDONED_AFTER_S, ABANDONED_CHECK_S, ABANDONED_PAUSE_S
from kvfs.errors import KvfsError
from kvfs.meta.redis import RedisEngine
from kvfs.node import Node

log = logging.getLogger(__name__)


class Abandoned:
    """In the node's thread."""

    def __init__(
        self,
        node: Node,
        engine: RedisEngine,
        membership: Membership,
        after_s: float = ABANDONED_AFTER_S,
    ) -> None:
        """`after_s`: how long a node may be away and still find what it left."""
        self._node = node
        self._engine = engine
        self._membership = membership
        self._after_s = after_s

    async def run(self) -> None:
        """Background task."""
        while True:
            await trio.sleep(ABANDONED_CHECK_S)
            if not self.is_in_charge():
                continue
            try:
                await self.see_to()
            except KvfsError as error:  # the next time it may do
                log.info("what nodes left that are gone stays for now: %s", error)

    def is_in_charge(self) -> bool:
        """Whether this node is the first of those that are there. Where two think so, the server
        compares what they do as ever."""
        me = self._membership.me.node_id
        return all(me < node_id for node_id in self._membership.others())

    async def see_to(self) -> None:
        """Drop what those left that have been gone for long. Raises `Unavailable`."""
        for node_id in self._engine.gone_nodes(self._after_s):
            dropped = 0
            while (names := self._engine.drop_loose(node_id)) is not None:
                dropped += len(names)
                for parent, name, ino in names:
                    self._node.notify(parent, name, ino)
                await trio.sleep(ABANDONED_PAUSE_S)
            self._engine.gone_nodes(self._after_s, settled=node_id)
            if dropped:
                log.info("dropped %d files that node %s never closed", dropped, node_id.hex())
