"""What leaves a node to make room, and what of it stays: a file whose bytes tiers or other nodes
have as well keeps its names, and a last copy is offered to tiers before it goes.
"""

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from kvfs.config import EVICTION_BATCH
from kvfs.evict import Decision, plan
from kvfs.meta.contract import Inode
from kvfs.reclaim import Evicted

if TYPE_CHECKING:
    from kvfs.node import Node  # which has one of these


class Leaving:
    """In the node's thread. `forget_checked` hears of each blob whose copy here was given up."""

    def __init__(
        self, node: "Node", held: Container[int], forget_checked: Callable[[bytes], None]
    ) -> None:
        self._node = node
        self._held = held
        self._forget_checked = forget_checked
        self._demoted: set[bytes] = set()  # what tiers were offered for the eviction that follows

    async def demote(self, index: int, short_bytes: int, until_ns: int) -> None:
        """Before files are taken away: have those that are in no other place put to a tier. What
        follows at once relies on it, and takes no others."""
        tiering = self._node.tiering
        if tiering is None:
            return
        inodes = self._inodes(self._plan(index, short_bytes, until_ns).evict)
        digests = [inode.digest for inode in inodes]
        await tiering.demote(digests, self._elsewhere(digests))
        self._demoted = set(digests)

    def evict(self, index: int, short_bytes: int, until_ns: int) -> Evicted:
        """Take away the coldest files of a directory."""
        decision = self._plan(index, short_bytes, until_ns)
        self._node.meta.restamp(decision.restamp)
        going, freed_bytes = decision.evict, decision.freed_bytes
        if self._node.tiering is not None:
            inodes = self._ready_to_go(going)
            going = tuple(inode.ino for inode in inodes)
            freed_bytes = sum(inode.size_bytes for inode in inodes)
        self._node.drop_files(going)
        self._node.counters.evicted_files += len(going)
        self._node.counters.evicted_bytes += freed_bytes
        return Evicted(len(going), not decision.evict and not decision.restamp)

    def keep_named(self, inos: Sequence[int]) -> list[int]:
        """Give up this node's copies of what is elsewhere too; the files that are left."""
        if self._is_alone:
            return list(inos)
        tiering, neighbours = self._node.tiering, self._node.neighbours
        inodes = self._inodes(inos)
        digests = [inode.digest for inode in inodes if inode.is_published]
        given_up = set() if tiering is None else set(tiering.give_up(digests))
        if neighbours is not None:
            given_up.update(neighbours.give_up([d for d in digests if d not in given_up]))
        for digest in given_up:
            self._forget_checked(digest)
        return [inode.ino for inode in inodes if inode.digest not in given_up]

    @property
    def _is_alone(self) -> bool:
        return self._node.neighbours is None and self._node.tiering is None

    def _plan(self, index: int, short_bytes: int, until_ns: int) -> Decision:
        self._node.uses.write()
        return plan(
            self._node.meta,
            short_bytes,
            EVICTION_BATCH,
            directory=index,
            kept=self._held,
            until_ns=until_ns,
            elsewhere=None if self._is_alone else self._elsewhere,
        )

    def _ready_to_go(self, inos: Sequence[int]) -> list[Inode]:
        """Those whose bytes are elsewhere, or were offered to tiers. Others came in the place of
        files that were used while tiers were busy, and are offered next."""
        inodes = self._inodes(inos)
        elsewhere = self._elsewhere([inode.digest for inode in inodes])
        return [i for i in inodes if i.digest in self._demoted or i.digest in elsewhere]

    def _elsewhere(self, digests: Sequence[bytes]) -> Container[bytes]:
        """Those of the digests that tiers or other nodes have as well, as far as it is known."""
        tiering, neighbours = self._node.tiering, self._node.neighbours
        held = set() if tiering is None else tiering.holdings.held(digests)
        if neighbours is not None:
            rest = [digest for digest in digests if digest not in held]
            others = neighbours.held_elsewhere(rest)
            held.update(digest for digest in rest if digest in others)
        return held

    def _inodes(self, inos: Sequence[int]) -> list[Inode]:
        return [inode for ino in inos if (inode := self._node.meta.inode(ino)) is not None]
