"""Bringing the bytes of files to a node, from its tiers and from the other nodes of its cluster:
tiers first, and both at once when tiers take long, so that one that hangs costs a second.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from kvfs.arriving import Arriving
from kvfs.config import TIER_LEAD_S
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode

if TYPE_CHECKING:
    from kvfs.node import Node  # which has one of these

Given = TypeVar("Given")

log = logging.getLogger(__name__)


class Fetching:
    """In the node's thread. What to fetch from is `node.tiering` and `node.neighbours`, as they are
    at each call."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def fetch(self, inodes: Sequence[Inode]) -> None:
        """Have the bytes of these files here, as far as any tier or node has them. In a cluster,
        what nobody is known to have is looked for in tiers that others fill."""
        neighbours = self._node.neighbours
        is_soon = await self._bring_soon(inodes)
        if neighbours is None:
            return
        if is_soon:
            await neighbours.bring(inodes)
        else:
            async with trio.open_nursery() as nursery:
                for one in (inode for inode in inodes if inode.is_published):
                    from_peers = partial(neighbours.bring, [one])
                    nursery.start_soon(self._bring_from_either, one, from_peers)
        await self._search(inodes)

    async def begin(self, inode: Inode) -> Arriving | None:
        """As `fetch`, for one file, which may still be on its way from another node then; None when
        it is not."""
        neighbours = self._node.neighbours
        is_soon = await self._bring_soon([inode])
        if neighbours is None:
            return None
        begin = partial(neighbours.begin, inode)
        arriving = await (begin() if is_soon else self._bring_from_either(inode, begin))
        if arriving is None:
            await self._search([inode])
        return arriving

    async def _bring_soon(self, inodes: Sequence[Inode]) -> bool:
        """Have tiers give what they have; in a cluster False when they take long. It comes all the
        same."""
        patience_s = math.inf if self._node.neighbours is None else TIER_LEAD_S
        with trio.move_on_after(patience_s) as lead:
            if self._node.tiering is not None:
                await self._node.tiering.bringer.bring(inodes)
        return not lead.cancelled_caught

    async def _bring_from_either(
        self, inode: Inode, from_peers: Callable[[], Awaitable[Given]]
    ) -> Given | None:
        """Wait until tiers, which take long, or peers have given a file, or neither does; what
        `from_peers` returned."""
        given: Given | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._bring_late, inode, nursery.cancel_scope)
            try:
                given = await from_peers()
            except KvfsError as error:  # which says nothing of the tiers
                log.warning("blob %s does not come from other nodes: %s", inode.digest.hex(), error)
            if given is not None or self._is_here(inode):
                nursery.cancel_scope.cancel()
        return given

    async def _bring_late(self, inode: Inode, others: trio.CancelScope) -> None:
        tiering = self._node.tiering
        assert tiering is not None
        try:
            await tiering.bringer.bring([inode])
        except KvfsError as error:  # nor that of the other nodes
            log.warning("blob %s does not come from tiers: %s", inode.digest.hex(), error)
        if self._is_here(inode):
            others.cancel()

    async def _search(self, inodes: Sequence[Inode]) -> None:
        """Ask tiers that others fill for what nobody is known to have."""
        directory_of, tiering = self._node.contents.directory_of, self._node.tiering
        missing = [one for one in inodes if directory_of(one.digest) is None]
        if missing and tiering is not None:
            await tiering.bringer.search(missing)

    def _is_here(self, inode: Inode) -> bool:
        return self._node.is_here([inode.digest])[0]
