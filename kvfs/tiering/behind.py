"""Copies to tiers behind every store: what was published here is promised in the metadata in the
same step, and copied when nobody reads, also after a restart.

The queue is bounded: what finds no room is not copied, which is counted; a last copy is copied all
the same before it is evicted (`demote`). Equal digests are one entry. An entry whose tiers are away
or full stays, and is tried again, but makes room for what is new.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from kvfs.config import (
    BEHIND_AGAIN_S,
    BEHIND_LOAD_STEP,
    BEHIND_PUTS_MAX,
    BEHIND_SETTLE_S,
    BEHIND_WAITING_MAX,
    BEHIND_YIELD_S,
    DEMOTE_S,
    TIER_USES_MAX,
)
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.tiering.copying import Copier
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.reads import Reads
from kvfs.tiering.rules import Rules

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    order: int
    due_s: float
    digest: bytes


class WriteBehind:
    """In the node's thread."""

    def __init__(
        self, node: Node, holdings: Holdings, reads: Reads, copier: Copier, rules: Rules
    ) -> None:
        self._node = node
        self._holdings = holdings
        self._reads = reads
        self._copier = copier
        self._rules = rules
        self._has_second_use = any(rule.second_use for rule in rules.all)
        self._new: deque[_Entry] = deque()  # both in the order in which they are due
        self._put_off: deque[_Entry] = deque()
        self._queued: set[bytes] = set()  # digests of both
        self._order = 0
        self._hurried = 0  # what was put off before this order is due
        self._fresh: list[bytes] = []  # of the publication that is under way
        self._read: OrderedDict[bytes, None] = OrderedDict()  # digests that were read since stored
        self._wake = trio.Event()
        self.dropped_files = 0  # for which the queue had no room
        self.demoted_files = 0
        self._has_said_untaken = False

    @property
    def waiting(self) -> int:
        """How many blobs are to be copied."""
        return len(self._queued) + self._copier.under_way

    # What is to be copied -------------------------------------------------------------------------
    def published(self, inode: Inode) -> None:
        """A file has got its bytes here; `settle` follows in the same step."""
        self._fresh.append(inode.digest)

    def settle(self) -> None:
        """Note what was published, in one transaction. Never raises: what was published is."""
        fresh, self._fresh = self._fresh, []
        self._enqueue(fresh)

    def read(self, inos: Sequence[int]) -> None:
        """Files were read after they were stored: rules may have waited for that."""
        if not self._has_second_use:
            return
        inodes = map(self._node.meta.inode, inos)
        digests = [i.digest for i in inodes if i is not None and i.is_published]
        fresh = [digest for digest in digests if digest not in self._read]
        self._read.update(dict.fromkeys(fresh))
        while len(self._read) > TIER_USES_MAX:
            self._read.popitem(last=False)
        self._enqueue(
            [d for d, mask in zip(fresh, self._holdings.masks(fresh), strict=True) if not mask]
        )

    def _enqueue(self, digests: Sequence[bytes]) -> None:
        new = [digest for digest in dict.fromkeys(digests) if digest not in self._queued]
        room = self._make_room(len(new))
        self.dropped_files += len(new) - room
        new = new[:room]
        if not new:
            return
        try:
            self._node.meta.promise(new)
        except KvfsError as error:  # it is copied all the same, if this node lives that long
            log.warning("copies to tiers are not noted: %s", error)
        for digest in new:
            self._push(self._new, digest, BEHIND_SETTLE_S)

    def _make_room(self, wanted: int) -> int:
        """For how many of so many entries there is room, after others that could not be copied
        before have gone for them."""
        given_up: list[bytes] = []
        while BEHIND_WAITING_MAX - self.waiting < wanted and self._put_off:
            given_up.append(self._put_off.popleft().digest)
            self._queued.discard(given_up[-1])
        if given_up:
            self.dropped_files += len(given_up)
            self._fulfil(given_up)
        return max(0, min(wanted, BEHIND_WAITING_MAX - self.waiting))

    def _fulfil(self, digests: Sequence[bytes]) -> None:
        try:
            self._node.meta.fulfil(digests)
        except KvfsError as error:  # the next start looks at them once more
            log.warning("copies to tiers are not noted: %s", error)

    def _push(self, queue: deque[_Entry], digest: bytes, delay_s: float) -> None:
        self._order += 1
        queue.append(_Entry(self._order, trio.current_time() + delay_s, digest))
        self._queued.add(digest)
        self._wake.set()

    def hurry(self) -> None:
        """A tier has come: what was put off may be copied now."""
        self._hurried = self._order
        self._wake.set()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Background task: copy what was promised, by this run and by those before."""
        task_status.started()
        await self._load()
        async with trio.open_nursery() as nursery:
            for _ in range(BEHIND_PUTS_MAX):
                nursery.start_soon(self._work_always)

    async def _load(self) -> None:
        after = b""
        while promised := self._node.meta.promised(after, BEHIND_LOAD_STEP):
            after = promised[-1]
            for digest in promised:
                if digest not in self._queued and self.waiting < BEHIND_WAITING_MAX:
                    self._read[digest] = None  # or it would not have been promised
                    self._push(self._new, digest, 0.0)
            await trio.sleep(0)
        while len(self._read) > TIER_USES_MAX:
            self._read.popitem(last=False)

    # Copying --------------------------------------------------------------------------------------
    async def _work_always(self) -> None:
        while True:
            due_s = self._next_due_s()
            if due_s > trio.current_time():
                if self._wake.is_set():  # else others wait for it already
                    self._wake = trio.Event()
                with trio.move_on_at(due_s):
                    await self._wake.wait()
                continue
            await self._reads.wait_quiet(BEHIND_YIELD_S)
            if (digest := self._take_due()) is not None:
                await self._keep_promise(digest)

    def _next_due_s(self) -> float:
        return min(self._due_s(self._new), self._due_s(self._put_off))

    def _due_s(self, queue: deque[_Entry]) -> float:
        if not queue:
            return float("inf")
        return queue[0].due_s if queue[0].order > self._hurried else float("-inf")

    def _take_due(self) -> bytes | None:
        queue = min(self._new, self._put_off, key=self._due_s)
        if self._due_s(queue) > trio.current_time():
            return None
        digest = queue.popleft().digest
        self._queued.discard(digest)
        return digest

    async def _keep_promise(self, digest: bytes) -> None:
        try:
            is_kept = await self.copy(digest)
        except KvfsError as error:
            log.info("blob %s is not copied to tiers yet: %s", digest.hex(), error)
            is_kept = False
        except Exception:  # one copy must not end the node
            log.exception("the copy of blob %s to tiers met a bug", digest.hex())
            is_kept = True
        if digest in self._queued:
            return  # it was stored once more meanwhile
        if is_kept:
            self._fulfil([digest])
        elif self.waiting < BEHIND_WAITING_MAX:
            self._push(self._put_off, digest, BEHIND_AGAIN_S)
        else:
            self.dropped_files += 1
            self._fulfil([digest])

    async def copy(self, digest: bytes) -> bool:
        """Have a blob on as many tiers as the rules say. False when it is not, and may be later."""
        rule = self._rules.of(digest)
        if rule.second_use and digest not in self._read:
            return True
        return await self._copier.copy(digest, rule.copies)

    async def demote(self, digests: Sequence[bytes]) -> None:
        """Have each of these in some tier, but those that no rule lets be copied: they are the last
        copies, and about to go."""
        with trio.move_on_after(DEMOTE_S):
            async with trio.open_nursery() as nursery:
                for digest in digests:
                    if self._rules.of(digest).copies:
                        nursery.start_soon(self._demote_one, digest)

    async def _demote_one(self, digest: bytes) -> None:
        try:
            is_settled = await self._copier.keep(digest, DEMOTE_S)
        except KvfsError as error:
            log.info("blob %s cannot be put to a tier: %s", digest.hex(), error)
            is_settled = False
        if self._holdings.held([digest]):
            self.demoted_files += 1
        elif not is_settled:
            self._say_untaken(digest)

    def _say_untaken(self, digest: bytes) -> None:
        level = logging.DEBUG if self._has_said_untaken else logging.WARNING
        self._has_said_untaken = True
        log.log(
            level,
            "no tier takes blob %s, which is about to leave this node: the names of such go; see "
            "`kvfs doctor`, and make room in a tier or add one (said once)",
            digest.hex(),
        )
