"""Bringing files here ahead of their readers: `kvfs.prefetch.machine` decides, this hears and does.

Everything runs in the node's thread. What readers do is noted and looked at later, so that it costs
them nothing; a node that nobody reads from does nothing here.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import trio

from kvfs.config import (
    PREFETCH_ELSEWHERE_S_MAX,
    PREFETCH_FETCH_S,
    PREFETCH_LOOK_S,
    PREFETCH_ORDERS_MAX,
    PREFETCH_READER_BYTES_S,
    PREFETCH_READS_MAX,
    PREFETCH_SETTLE_S,
    PREFETCH_STEP,
    PREFETCH_SWEEP_S,
    TIER_SLOW_BYTES_S,
)
from kvfs.errors import KvfsError, first_of
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.prefetch.known import ANYBODY, PEERS, TIERS, Known
from kvfs.prefetch.machine import Prefetch
from kvfs.prefetch.words import (
    Asked,
    Cancel,
    Cause,
    Ended,
    Event,
    Look,
    Promote,
    Read,
    Sweep,
    Used,
)
from kvfs.settings.words import PrefetchConfig

log = logging.getLogger(__name__)


class Prefetcher:
    """See the module's docstring. `Node.ahead` while it runs."""

    def __init__(self, node: Node, config: PrefetchConfig) -> None:
        self._node = node
        self._full_at = config.full_at
        self._known = Known(node)
        self._machine = Prefetch(self._known, _causes(config))
        self._reads: deque[tuple[int, int | None, float]] = deque(maxlen=PREFETCH_READS_MAX)
        self._expected: deque[Inode] = deque()
        self._scopes: dict[bytes, trio.CancelScope] = {}
        self._from_peers: set[bytes] = set()  # of those that come now
        self._wake = trio.Event()
        self._settled = trio.Event()
        self._read_s = float("-inf")  # when somebody began to read
        self._elsewhere = 0  # sources that readers use by themselves
        self._elsewhere_until_s = float("-inf")
        self._swept_s = float("-inf")
        self._nursery: trio.Nursery | None = None  # None: nothing is brought (any more)
        node.watch_uses(self._note_use)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Background task."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._node.ahead = self
            task_status.started()
            try:
                while True:
                    await self._wait()
                    self._look()
                    await self._take_expected()
                    await self._take_reads()
                    self._look()
                    await trio.sleep(PREFETCH_LOOK_S)  # however often it is woken
            finally:
                self._node.ahead = None
                self._nursery = None

    # What it hears --------------------------------------------------------------------------------
    def _note_use(self, inos: Sequence[int], reader: int | None) -> None:
        self._tell(Used(inos))
        self._read_s = trio.current_time()
        self._reads.extend((ino, reader, self._read_s) for ino in inos)
        self._wake.set()

    def expect(self, inodes: Iterable[Inode]) -> None:
        """Requests that wait in an engine will read these files, in this order. Takes no time;
        what is here already costs nothing. Of too many the last are forgotten."""
        for inode in inodes:
            if len(self._expected) >= PREFETCH_ORDERS_MAX:
                break
            self._expected.append(inode)
        self._wake.set()

    def note_awaited(self, inodes: Iterable[Inode]) -> None:
        """Readers are about to wait for the bytes of these files, which need not be here. Takes no
        time."""
        self._tell(Used([inode.ino for inode in inodes]))

    def note_elsewhere(self, size_bytes: int, tiers: int, *, is_at_peers: bool) -> None:
        """A client reads so many bytes by itself, from the tiers of this mask or other nodes: they
        are busy for as long as that may take, which it does not say; engines are many, and faster
        than is assumed, so not for long after the last of them."""
        now_s = trio.current_time()
        if now_s >= self._elsewhere_until_s:
            self._elsewhere, self._elsewhere_until_s = 0, now_s
        self._elsewhere |= tiers | (PEERS if is_at_peers else 0)
        until_s = self._elsewhere_until_s + size_bytes / PREFETCH_READER_BYTES_S
        self._elsewhere_until_s = min(until_s, now_s + PREFETCH_ELSEWHERE_S_MAX)

    async def warm(self, inodes: Sequence[Inode], patience_s: float) -> set[bytes]:
        """Bring these files here, for so long; the digests of those that are still on their way,
        and go on coming. What is neither among them nor here nobody gives."""
        digests = {inode.digest for inode in inodes}
        fresh = [inode for inode in inodes if not self._machine.is_pending(inode.digest)]
        await self._ask(Cause.WARM, fresh)
        with trio.move_on_after(patience_s):
            while any(map(self._machine.is_pending, digests)):
                await self._settled.wait()
        return {digest for digest in digests if self._machine.is_pending(digest)}

    async def _wait(self) -> None:
        """Return when there is something to look at."""
        timeout_s = float("inf")
        if self._reads or self._machine.under_way_count or self._machine.waiting_count:
            timeout_s = PREFETCH_LOOK_S
        elif self._machine.unread_count:
            timeout_s = PREFETCH_SWEEP_S
        with trio.move_on_after(timeout_s):
            await self._wake.wait()
        self._wake = trio.Event()

    @property
    def _is_quiet(self) -> bool:
        """Whether nobody has begun to read for a moment."""
        return trio.current_time() >= self._read_s + PREFETCH_SETTLE_S

    async def _take_reads(self) -> None:
        """Guess what comes next: 0.2 ms for a chunk, so not while there is something to do."""
        while self._reads and self._is_quiet:
            ino, reader, at_s = self._reads.popleft()
            for inode in self._known.files([ino]):
                self._tell(Read(ino, inode.digest, int(at_s * 1e9), reader))
            await trio.lowlevel.checkpoint()  # in a cluster each may ask the server some times

    async def _take_expected(self) -> None:
        while self._expected:
            count = min(len(self._expected), PREFETCH_STEP)
            await self._ask(Cause.EXPECTED, [self._expected.popleft() for _ in range(count)])

    async def _ask(self, cause: Cause, inodes: Sequence[Inode]) -> None:
        for start in range(0, len(inodes), PREFETCH_STEP):
            if start:
                await trio.lowlevel.checkpoint()
            step = [inode for inode in inodes[start : start + PREFETCH_STEP] if inode.is_published]
            blobs = self._known.wanted(step)
            if cause is Cause.WARM:
                blobs = [replace(blob, sources=blob.sources | ANYBODY) for blob in blobs]
            self._tell(Asked(cause, tuple(blob for blob in blobs if blob.sources)))

    # What it sees ---------------------------------------------------------------------------------
    def _look(self) -> None:
        tiering, neighbours = self._node.tiering, self._node.neighbours
        taken = self._elsewhere if trio.current_time() < self._elsewhere_until_s else 0
        if tiering is not None:
            taken |= tiering.reads.busy & TIERS
        if neighbours is not None and neighbours.fetching > len(self._from_peers):
            taken |= PEERS
        self._tell(Look(taken, self._spare_bytes()))
        if trio.current_time() >= self._swept_s + PREFETCH_SWEEP_S:
            self._swept_s = trio.current_time()
            self._tell(Sweep())

    def _spare_bytes(self) -> int:
        """What may come here before the store is as full as guesses may make it."""
        space, spare_bytes = self._node.space, 0
        for index in range(len(self._node.directories)):
            used_bytes, room_bytes = space.used_bytes(index), space.room_bytes(index)
            full_bytes = self._full_at * (used_bytes + max(0, room_bytes))
            spare_bytes += max(0, int(full_bytes) - used_bytes)
        return spare_bytes

    # What it does ---------------------------------------------------------------------------------
    def _tell(self, event: Event) -> None:
        if self._nursery is None:
            return
        for action in self._machine.handle(event, int(trio.current_time() * 1e9)):
            match action:
                case Promote():
                    scope = self._scopes[action.blob.digest] = trio.CancelScope()
                    self._nursery.start_soon(self._promote, action, scope)
                case Cancel():
                    self._scopes[action.digest].cancel()

    async def _promote(self, action: Promote, scope: trio.CancelScope) -> None:
        digest, size_bytes = action.blob.digest, action.blob.size_bytes
        patience_s = PREFETCH_FETCH_S + size_bytes / TIER_SLOW_BYTES_S
        scope.deadline = min(scope.deadline, trio.current_time() + patience_s)
        try:
            with scope:
                await self._bring(action)
        except* (KvfsError, OSError) as group:
            log.info("%s is not brought here: %s", digest.hex(), first_of(group))
        except* Exception:  # what is brought ahead must not end the node
            log.exception("bringing %s here met a bug", digest.hex())
        finally:
            del self._scopes[digest]
        self._tell(Ended(digest, self._known.is_here(digest)))
        self._settled.set()
        self._settled = trio.Event()

    async def _bring(self, action: Promote) -> None:
        """Have a file's bytes here, from where it was decided."""
        digest = action.blob.digest
        files = [f for f in self._known.files([action.blob.ino]) if f.digest == digest]
        tiering, neighbours = self._node.tiering, self._node.neighbours
        if tiering is not None and action.sources & TIERS:
            for file in files:
                await tiering.bringer.promote(file, action.sources & TIERS)
        if neighbours is not None and action.sources & PEERS:
            self._from_peers.add(digest)
            try:
                await neighbours.bring(files)
            finally:
                self._from_peers.discard(digest)
        if action.sources & ANYBODY and not self._known.is_here(digest):
            await self._node.fetching.fetch(files)

    def describe(self) -> dict[str, object]:
        """For `kvfs status`."""
        machine = self._machine
        return {
            "waiting": machine.waiting_count,
            "under_way": machine.under_way_count,
            "under_way_bytes": machine.under_way_bytes,
            "unread": machine.unread_count,
            "causes": {cause.name.lower(): asdict(machine.tallies[cause]) for cause in Cause},
        }


def _causes(config: PrefetchConfig) -> frozenset[Cause]:
    """What is not switched off."""
    switches = {
        Cause.EXPECTED: config.expected,
        Cause.WARM: True,
        Cause.CHILD: config.children,
        Cause.SUCCESSOR: config.successors,
    }
    return frozenset(cause for cause, is_on in switches.items() if is_on)
