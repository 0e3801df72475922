"""The tiers of a node's configuration, as the node uses them. `Node.tiering` while it runs; None
for a node without `[[tiers]]`.

Everything here runs in the node's thread. What touches a tier runs in worker threads with
deadlines; one that hangs keeps its own thread, and nobody else.

What must not interleave: a local copy is given up in one piece of sync code with the look at who
else has it (`give_up`), and what leaves a tier is taken from the books before it goes
(`kvfs.tiering.room`), so that two do not each rely on the copy that the other removes.
"""

import logging
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from kvfs.config import TIER_CLOSE_S
from kvfs.errors import KvfsError, Unavailable
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.tiering.behind import WriteBehind
from kvfs.tiering.bring import Bringer
from kvfs.tiering.copying import Copier
from kvfs.tiering.describe import Meter, describe_tiers
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.opening import ConfiguredTier, Opening, place_of
from kvfs.tiering.reads import Reads
from kvfs.tiering.rebuild import rebuild_from_tier
from kvfs.tiering.room import Room
from kvfs.tiering.rules import Rules
from kvfs.tiering.scan import Scan
from kvfs.tiering.trouble import tell_troubles
from kvfs.tiers.contract import WritableTier
from kvfs.transfer.runner import Transfer

log = logging.getLogger(__name__)


class Tiering:
    """`holdings`: which tiers have what. `bringer`: what comes from them. `behind`: what goes to
    them. `room`, `reads`, `transfer`: what those share. Here is what takes several of them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        configs = node.config.tiers
        numbers = node.meta.tier_numbers([place_of(config) for config in configs])
        self.tiers: Sequence[ConfiguredTier] = [
            ConfiguredTier(number, config) for number, config in zip(numbers, configs, strict=True)
        ]
        self.reads = Reads()
        self.holdings = Holdings(node.meta, self.tiers)
        self._token = trio.lowlevel.current_trio_token()
        self.transfer = Transfer(on_gone=self._hear_gone)
        rules = Rules(node)
        self.room = Room(
            node.meta, self.holdings, rules, self._held_by_nodes, self._drop_if_nowhere
        )
        self.copier = Copier(node, self.holdings, self.room)
        self.behind = WriteBehind(node, self.holdings, self.reads, self.copier, rules)
        self.bringer = Bringer(
            node, self.holdings, self.reads, self.transfer, self._drop_if_nowhere
        )
        self._scan = Scan(node.meta, self.holdings, self.reads, self.tiers)
        self._meter = Meter(self.tiers)
        self._opening = Opening(self.tiers, node.store_id, self._add)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Use the tiers for the length of a `with` block."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.bringer.run)
                await nursery.start(self._opening.run)
                self._node.tiering = self
                await nursery.start(self.behind.run)
                nursery.start_soon(self._scan.run)
                nursery.start_soon(self._meter.run)
                nursery.start_soon(tell_troubles, self.tiers)
                if self._node.has_lost_names:
                    nursery.start_soon(self._rebuild_lost)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self._node.tiering = None
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._close)

    def _add(self, one: ConfiguredTier, tier: WritableTier) -> None:
        self.transfer.add_tier(one.number, tier)
        self.behind.hurry()

    def _close(self) -> None:
        if not self.transfer.close(TIER_CLOSE_S):
            log.info("a tier still holds threads")
        self._opening.close()

    # Which tiers have what ------------------------------------------------------------------------
    def is_away(self, inode: Inode) -> bool:
        """Whether a file's bytes are in tiers, and not here."""
        is_here = self._node.contents.directory_of(inode.digest) is not None
        return not is_here and bool(self.holdings.held([inode.digest]))

    async def ask_again(self, gone: Iterable[tuple[int, bytes]]) -> None:
        """Clients did not get these blobs from tiers (their numbers): what a tier says that it has
        not is noted."""
        asked: dict[int, list[bytes]] = {}
        for number, digest in gone:
            asked.setdefault(number, []).append(digest)
        async with trio.open_nursery() as nursery:
            for one in self.tiers:
                if digests := asked.get(one.number):
                    nursery.start_soon(self.bringer.ask_again, one, digests)

    def _hear_gone(self, number: int, digest: bytes) -> None:
        try:
            self._token.run_sync_soon(self._note_lost, digest, number)
        except trio.RunFinishedError:
            log.debug("tier %d lost a blob when its node had ended", number)

    def _note_lost(self, digest: bytes, number: int) -> None:
        self.holdings.note_lost(digest, number)
        self._drop_if_nowhere(digest)

    def _held_by_nodes(self, digests: Sequence[bytes]) -> Container[bytes]:
        neighbours = self._node.neighbours
        return () if neighbours is None else neighbours.held_elsewhere(digests)

    def _drop_if_nowhere(self, digest: bytes) -> None:
        """Names of what no place has any more go: a miss from then on. In a cluster others may know
        a place that this node does not, so that they stay. Never raises."""
        meta = self._node.meta
        try:
            is_somewhere = bool(meta.tier_masks([digest])[0]) or meta.blobs([digest])[0] is not None
            if not is_somewhere and self._node.neighbours is None:
                self._node.drop_lost(meta.lose(digest, self._node.now_ns()))
        except KvfsError as error:
            log.warning("blob %s is nowhere, and keeps its names: %s", digest.hex(), error)

    # Reading --------------------------------------------------------------------------------------
    def used(self, inos: Sequence[int]) -> None:
        """These files are read, or are about to be, by whoever got their descriptors."""
        self.reads.note_use()
        self.behind.read(inos)

    # Writing --------------------------------------------------------------------------------------
    async def demote(self, digests: Sequence[bytes], elsewhere: Container[bytes]) -> None:
        """These are about to leave this node: have a copy of each that is nowhere else in some
        tier, where rules let it and one has room."""
        last = [digest for digest in digests if digest not in elsewhere]
        if last:
            with self.room.leaving(digests):
                await self.behind.demote(last)

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up the copies here of those that tiers have, and say which; their names stay."""
        held = self.holdings.held(digests)
        given = self._node.meta.give_up([digest for digest in digests if digest in held])
        for one in given:
            if one.directory is not None:
                self._node.publisher.take_away(one.digest, one.directory)
        self._node.meta.bury([one.digest for one in given if one.directory is not None])
        return [one.digest for one in given]

    # Names ----------------------------------------------------------------------------------------
    async def rebuild_locked(self) -> int:
        """Give chunk files that lie in tiers the names again that were lost with the metadata; how
        many. For who holds `Node.upkeep_lock`. In a cluster names are not lost with a node."""
        if self._node.neighbours is not None:
            return 0
        named = 0
        for one in self.tiers:
            if one.tier is None:
                continue
            try:
                named += await rebuild_from_tier(self._node, one)
            except Unavailable as error:
                log.warning("not all names can be found again: %s", error)
        return named

    async def _rebuild_lost(self) -> None:
        """After a start that had to rebuild names, from what lay here."""
        async with self._node.upkeep_lock:
            named = await self.rebuild_locked()
        if named:
            self._node.notices.append(f"{named} chunk files in tiers have their names back")
            log.info("%s", self._node.notices[-1])

    # What people see ------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """For `kvfs status` and `.kvfs/tiers`."""
        behind, bringer, room = self.behind, self.bringer, self.room
        return {
            "tiers": describe_tiers(self.tiers, self._node.meta, self.transfer, self._meter),
            "behind": {
                "waiting": behind.waiting,
                "copied_files": self.copier.copied_files,
                "copied_bytes": self.copier.copied_bytes,
                "dropped_files": behind.dropped_files,
                "demoted_files": behind.demoted_files,
            },
            "reading": {
                "under_way": bringer.under_way,
                "brought_files": bringer.brought_files,
                "brought_bytes": bringer.brought_bytes,
                "failed_files": bringer.failed_files,
            },
            "evicted": {
                "blobs": room.evicted_blobs,
                "bytes": room.evicted_bytes,
                "moved_blobs": room.moved_blobs,
            },
        }
