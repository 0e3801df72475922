"""As many copies of each file as the rules want: `kvfs.replicate` decides, this asks and tells.

Two ways lead to a copy. What was stored here just now is told to those who are to have it as well,
in the background. And a slow walk over all that lies here finds what has too few copies: since a
hint was lost, a node went for good, evicted its copy, or a rule is new. Nothing takes copies away
but eviction.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import trio

from kvfs.cluster.membership import Membership
from kvfs.cluster.takers import Takers
from kvfs.config import (
    COPIES_ASKED_PER_S,
    COPIES_PATHS_MAX,
    COPIES_SETTLE_S,
    COPIES_STEP,
    COPIES_STEP_S,
    COPIES_SWEEP_S,
    COPIES_WAITING_MAX,
)
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode
from kvfs.meta.redis import RedisEngine
from kvfs.replicate import find_shortage, is_in_charge, wanted_copies
from kvfs.settings.words import CopyRule

log = logging.getLogger(__name__)


class Copies:
    """In the node's thread."""

    def __init__(
        self,
        engine: RedisEngine,
        membership: Membership,
        takers: Takers,
        rules: Sequence[CopyRule],
    ) -> None:
        self._engine = engine
        self._membership = membership
        self._takers = takers
        self._rules = rules
        self._most = max((rule.copies for rule in rules), default=1)
        self._fresh: OrderedDict[bytes, int] = OrderedDict()  # digest -> size
        self._wake = trio.Event()

    def published(self, inode: Inode) -> None:
        """A file has got its bytes here. Of too many at once the oldest are left to the walk."""
        if self._most == 1:
            return
        self._fresh[inode.digest] = inode.size_bytes
        if len(self._fresh) > COPIES_WAITING_MAX:
            self._fresh.popitem(last=False)
        self._wake.set()

    async def run(self) -> None:
        """Background task; it has nothing to do where no rule wants more than one copy."""
        if self._most == 1:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_always)
            nursery.start_soon(self._walk_always)

    async def _tell_always(self) -> None:
        while True:
            await self._wake.wait()
            await trio.sleep(COPIES_SETTLE_S)
            self._wake = trio.Event()
            try:
                while self._fresh:
                    count = min(COPIES_STEP, len(self._fresh))
                    fresh = dict(self._fresh.popitem(last=False) for _ in range(count))
                    await self._see_to(fresh, is_fresh=True)
            except KvfsError as error:  # the walk will find them
                log.info("new files have no copies yet: %s", error)

    async def _walk_always(self) -> None:
        while True:
            await trio.sleep(COPIES_SWEEP_S)
            try:
                await self._walk()
            except KvfsError as error:
                log.info("copies are not looked at now: %s", error)

    async def _walk(self) -> None:
        after = b""
        while blobs := self._engine.own_blobs(after, COPIES_STEP):
            after = blobs[-1].digest
            sizes = {blob.digest: blob.size_bytes for blob in blobs if blob.references}
            await self._see_to(sizes, is_fresh=False)
            nodes = len(self._membership.present)
            await trio.sleep(max(COPIES_STEP_S, COPIES_STEP * nodes / COPIES_ASKED_PER_S))

    async def _see_to(self, sizes: Mapping[bytes, int], *, is_fresh: bool) -> None:
        """Tell other nodes which of these blobs they are to have. Those that are full hear of fresh
        ones only, for which they may make room."""
        await self._takers.hint(await self._find_takers(sizes, is_fresh))

    async def _find_takers(
        self, sizes: Mapping[bytes, int], is_fresh: bool
    ) -> dict[bytes, list[bytes]]:
        hints: dict[bytes, list[bytes]] = {}
        standing = self._membership.standing()
        found = self._engine.ask_copies(list(sizes))
        for digest, holders in zip(sizes, found, strict=True):
            counted = len(standing.counted.intersection(holders))
            if counted >= self._most or not is_in_charge(digest, holders, standing):
                continue
            await trio.lowlevel.checkpoint()
            shortage = find_shortage(digest, self._wanted(digest), holders, standing)
            if shortage is None:
                continue
            roomy = await self._takers.with_room(shortage.targets, shortage.missing, sizes[digest])
            full = [node for node in shortage.targets if node not in roomy] if is_fresh else []
            for node_id in [*roomy, *full][: shortage.missing]:
                hints.setdefault(node_id, []).append(digest)
        return hints

    def _wanted(self, digest: bytes) -> int:
        held = self._engine.held_paths(digest, (0, 0, b""), COPIES_PATHS_MAX)
        return max((wanted_copies(self._rules, one.path) for one in held), default=1)
