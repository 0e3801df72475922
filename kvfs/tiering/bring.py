"""Bringing bytes here that only tiers have: read from all of them at once into a new file's own
pages, checked, and kept as the copy here. Each blob is read once, however many want it; a read goes
on when nobody waits for it any more."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import or_

import trio

from kvfs.config import (
    SCHEDULE_PRIORITY_IDLE,
    TIER_ASKED_MAX,
    TIER_FETCH_S,
    TIER_FETCHES_MAX,
    TIER_SLOW_BYTES_S,
)
from kvfs.errors import Unavailable
from kvfs.file_io import map_file, write_from
from kvfs.meta.contract import Inode
from kvfs.meta.tier_contract import HoldingChange
from kvfs.node import Node
from kvfs.shared_fetches import SharedFetches, staged
from kvfs.stage import Stage
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.opening import FILLED_BY_OTHERS, ConfiguredTier
from kvfs.tiering.reads import Reads
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import JobEnd, WantedChunk

log = logging.getLogger(__name__)


class _Coming:
    """A blob that readers wait for."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._ended = trio.Event()
        self._on_end = on_end

    def end(self) -> None:
        self._ended.set()
        self._on_end()

    async def wait_ended(self) -> None:
        await self._ended.wait()


class Bringer:
    """In the node's thread. `nowhere` hears of digests that no tier turned out to have."""

    def __init__(
        self,
        node: Node,
        holdings: Holdings,
        reads: Reads,
        transfer: Transfer,
        nowhere: Callable[[bytes], None],
    ) -> None:
        self._node = node
        self._holdings = holdings
        self._reads = reads
        self._transfer = transfer
        self._nowhere = nowhere
        self._fetches: SharedFetches[_Coming] = SharedFetches("tiers", TIER_FETCHES_MAX)
        self._ahead: dict[bytes, trio.CancelScope] = {}  # that nobody waits for
        self._asking = trio.CapacityLimiter(TIER_ASKED_MAX)
        self._token = trio.lowlevel.current_trio_token()
        self.brought_files = 0
        self.brought_bytes = 0
        self._ungiven_files = 0  # that no tier gave

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Background task: read what is asked for, until it is cancelled."""
        await self._fetches.run(task_status)

    def stop(self) -> None:
        """The node ends: nobody waits for a tier any more."""
        self._fetches.stop()

    @property
    def under_way(self) -> int:
        """How many files are read now, or wait for that."""
        return len(self._fetches)

    @property
    def failed_files(self) -> int:
        """How many could not be read, though tiers were known to have them."""
        return self._ungiven_files + self._fetches.failed

    async def bring(self, inodes: Iterable[Inode], priority: int = 0) -> None:
        """Have the bytes of these files here, as far as tiers are known to have them."""
        wanted = self._missing(inodes)
        masks = self._holdings.masks(list(wanted)) if wanted else []
        if not any(masks):
            return
        with self._reads.under_way(reduce(or_, masks)):
            async with trio.open_nursery() as nursery:
                for inode, mask in zip(wanted.values(), masks, strict=True):
                    if mask:
                        nursery.start_soon(self._wait_for, inode, priority)

    def _missing(self, inodes: Iterable[Inode]) -> dict[bytes, Inode]:
        """Those whose bytes are not here, by their digests."""
        wanted = {inode.digest: inode for inode in inodes if inode.is_published}
        here = self._node.is_here(list(wanted))
        return {d: wanted[d] for d, is_here in zip(wanted, here, strict=True) if not is_here}

    async def _wait_for(self, inode: Inode, priority: int) -> None:
        one = self._fetches.find(inode.digest)
        if one is None:
            one = _Coming(partial(self._end_ahead, inode.digest))
            work = partial(self._read_into_stage, inode, priority)
            if not self._fetches.start(inode.digest, one, work):
                return
        with trio.move_on_after(_patience_s(inode.size_bytes)):
            await one.wait_ended()

    def _end_ahead(self, digest: bytes) -> None:
        if digest in self._ahead:
            self._ahead[digest].cancel()

    async def promote(self, inode: Inode, mask: int) -> None:
        """Have the bytes of a file here from these tiers, as idle work that nobody waits for; it
        ends when the call is cancelled. A reader who comes meanwhile reads for itself: it does not
        wait behind idle work, and who is done first ends the other. One call for a blob at a time.
        Raises `KvfsError` and OSError."""
        digest = inode.digest
        if self._fetches.find(digest) or self._node.is_here([digest])[0]:
            return
        assert digest not in self._ahead
        with trio.CancelScope() as self._ahead[digest]:
            try:
                await self._read_into_stage(inode, SCHEDULE_PRIORITY_IDLE, mask)
            finally:
                del self._ahead[digest]
        if self._fetches.find(digest) and self._node.is_here([digest])[0]:
            self._fetches.cancel(digest)

    async def _read_into_stage(self, inode: Inode, priority: int, mask: int = -1) -> None:
        digest, size_bytes = inode.digest, inode.size_bytes
        tiers = self._numbers(digest, mask)
        if not tiers:
            return
        async with staged(self._node, size_bytes) as stage:
            if size_bytes:
                memory = await trio.to_thread.run_sync(map_file, stage.fd, size_bytes)
                wanted = WantedChunk(digest, size_bytes, tiers, memory)
                landed = await self._read(wanted, priority)
                if landed is None:
                    self._ungiven_files += 1
                    log.info("blob %s: no tier gives it", digest.hex())
                    if not self._holdings.masks([digest])[0]:
                        self._nowhere(digest)
                    return
                with landed:
                    if not landed.is_in_place:
                        await self._adopt_elsewhere(inode, landed)
                        return
            await self._adopt(stage, inode)

    def _numbers(self, digest: bytes, among: int) -> tuple[int, ...]:
        mask = self._holdings.masks([digest])[0] & among
        numbers = self._holdings.numbers_of(mask)
        return tuple(n for n in numbers if self._holdings.tier(n).tier is not None)

    async def _read(self, wanted: WantedChunk, priority: int) -> Landed | None:
        """The chunk, once it is whole and right, for the caller to give back; None when no tier
        gives it in time."""
        ended = trio.Event()
        found: list[Landed] = []
        is_given_up = False

        def end() -> None:
            ended.set()
            if is_given_up:
                give_back()

        def give_back() -> None:
            for landed in found:
                landed.give_back()

        def tell_end(_: JobEnd) -> None:  # after the last chunk
            try:
                self._token.run_sync_soon(end)
            except trio.RunFinishedError:
                log.debug("a read outlived its node")

        job = self._transfer.start(
            [wanted],
            found.append,
            deadline_s=_patience_s(wanted.size_bytes),
            on_end=tell_end,
            priority=priority,
            in_place=False,  # who waits for the file should not wait for a late read's end
        )
        try:
            await ended.wait()
        except BaseException:
            is_given_up = True
            job.cancel()
            if ended.is_set():
                give_back()
            raise
        return found[0] if found else None

    async def _adopt_elsewhere(self, inode: Inode, landed: Landed) -> None:
        """A late read may still write to the first file's pages: the bytes go to another one."""
        async with staged(self._node, inode.size_bytes) as stage:
            await trio.to_thread.run_sync(write_from, stage.fd, landed.memory)
            await self._adopt(stage, inode)

    async def _adopt(self, stage: Stage, inode: Inode) -> None:
        node = self._node
        await node.publisher.adopt_copy(stage, inode.digest, inode.size_bytes, node.meta.add_copy)
        self.brought_files += 1
        self.brought_bytes += inode.size_bytes

    async def search(self, inodes: Iterable[Inode]) -> None:
        """Ask tiers that others fill for files of which nobody is known to have the bytes, and have
        them here."""
        wanted = self._missing(inodes)
        masks = self._holdings.masks(list(wanted))
        lost = [digest for digest, mask in zip(wanted, masks, strict=True) if not mask]
        if not lost:
            return
        async with trio.open_nursery() as nursery:
            for number in self._holdings.numbers:
                one = self._holdings.tier(number)
                if one.is_usable and one.config.kind in FILLED_BY_OTHERS:
                    nursery.start_soon(self._ask, one, lost)
        await self.bring(wanted[digest] for digest in lost)

    async def ask_again(self, one: ConfiguredTier, digests: Sequence[bytes]) -> None:
        """Somebody did not get these from a tier: what it says that it has not is noted."""
        if not one.is_usable:
            return
        masks = self._holdings.masks(digests)
        held = [d for d, mask in zip(digests, masks, strict=True) if mask >> one.number & 1]
        for digest in await self._ask(one, held):
            self._nowhere(digest)

    async def _ask(self, one: ConfiguredTier, digests: Sequence[bytes]) -> list[bytes]:
        """Note which of these a tier has; those that it has not. None where it does not answer."""
        tier = one.tier
        if tier is None or not digests:
            return []
        try:
            sizes = await trio.to_thread.run_sync(
                tier.has, digests, limiter=self._asking, abandon_on_cancel=True
            )
        except Unavailable as error:
            log.info("tier %s does not say what it has: %s", one.name, error)
            return []
        bit = 1 << one.number
        self._holdings.note(
            [
                HoldingChange(digest, size or 0, bit, 0)
                if size is not None
                else HoldingChange(digest, 0, 0, bit)
                for digest, size in zip(digests, sizes, strict=True)
            ]
        )
        return [digest for digest, size in zip(digests, sizes, strict=True) if size is None]


def _patience_s(size_bytes: int) -> float:
    return TIER_FETCH_S + size_bytes / TIER_SLOW_BYTES_S
