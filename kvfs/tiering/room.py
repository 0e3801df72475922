"""Room in tiers. A tier with `max_bytes` holds no more, as far as this node knows what lies there;
a local one that is full makes room as well. What leaves is the coldest of a part of what lies
there, the next part each time: no order of all is kept (`policy.plan_removal`).

What leaves is first taken from the books, so that no local copy is given up for the sake of one
that goes. A last copy goes to another tier with room before that, where there is one.
"""

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import trio

from kvfs.config import (
    DEMOTE_S,
    TIER_EVICTION_SHARE,
    TIER_EVICTION_WINDOW,
    TIER_FULL_S,
)
from kvfs.errors import Corrupt, KvfsError, Unavailable
from kvfs.file_io import allocate
from kvfs.meta.contract import MetaEngine
from kvfs.meta.tier_contract import Holding, TierLoad
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.opening import FILLED_BY_OTHERS, ConfiguredTier
from kvfs.tiering.policy import Resident, plan_removal
from kvfs.tiers.contract import WritableTier

log = logging.getLogger(__name__)
_REMOVED_AT_ONCE = 4
_WINDOWS_MAX = 64  # looked at for one blob


class Room:
    """In the node's thread. `elsewhere` tells which digests other nodes have; `gone` hears of each
    digest that left a tier."""

    def __init__(
        self,
        engine: MetaEngine,
        holdings: Holdings,
        elsewhere: Callable[[Sequence[bytes]], Container[bytes]],
        gone: Callable[[bytes], None],
    ) -> None:
        self._meta = engine
        self._holdings = holdings
        self._elsewhere = elsewhere
        self._gone = gone
        self._after: dict[int, bytes] = {}  # of each tier: where the next window begins
        self._locks: dict[int, trio.Lock] = {}
        self._leaving: Counter[bytes] = Counter()  # digests whose copies here are about to go
        self._limiter = trio.CapacityLimiter(_REMOVED_AT_ONCE)
        self.evicted_blobs = 0
        self.moved_blobs = 0  # last copies, to another tier
        self.evicted_bytes = 0

    @contextmanager
    def leaving(self, digests: Sequence[bytes]) -> Iterator[None]:
        """For the length of a `with` block the copies here of these do not count: what a tier has
        got of them would else make room for the next of them."""
        self._leaving.update(digests)
        try:
            yield
        finally:
            self._leaving -= Counter(digests)

    async def make(self, one: ConfiguredTier, size_bytes: int) -> bool:
        """Whether a tier may hold so many bytes more, after what is cold there has gone."""
        limit_bytes = one.config.max_bytes
        if limit_bytes is None:
            return True
        if size_bytes > limit_bytes:
            return False
        async with self._locks.setdefault(one.number, trio.Lock()):
            return await self._remove(one, lambda: self._load(one) + size_bytes - limit_bytes)

    async def note_full(self, one: ConfiguredTier, size_bytes: int) -> bool:
        """A tier had no room for so many bytes. A local one gets some: True; others are let alone
        for a while, since others fill them."""
        if one.config.kind not in FILLED_BY_OTHERS:
            async with self._locks.setdefault(one.number, trio.Lock()):
                wanted_bytes = self._load(one) - size_bytes
                if await self._remove(one, lambda: self._load(one) - wanted_bytes):
                    return True
        one.full_until_s = trio.current_time() + TIER_FULL_S
        return False

    def _load(self, one: ConfiguredTier) -> int:
        return self._meta.tier_loads().get(one.number, TierLoad()).size_bytes

    async def _remove(self, one: ConfiguredTier, short_bytes: Callable[[], int]) -> bool:
        """Remove until nothing is short; False when that does not come to an end."""
        for _ in range(_WINDOWS_MAX):
            need_bytes = short_bytes()
            if need_bytes <= 0:
                return True
            if not one.is_usable:
                return False
            window = self._next_window(one.number)
            if not window and not self._after.get(one.number):
                return False  # nothing lies there
            chosen = plan_removal(
                self._residents(one.number, window), need_bytes, TIER_EVICTION_SHARE
            )
            await self._take_away(one, chosen)
            await trio.lowlevel.checkpoint()
        return short_bytes() <= 0

    def _next_window(self, number: int) -> list[Holding]:
        after = self._after.get(number, b"")
        page = self._meta.holdings(after, TIER_EVICTION_WINDOW)
        self._after[number] = page[-1].digest if len(page) == TIER_EVICTION_WINDOW else b""
        return [holding for holding in page if holding.mask >> number & 1]

    def _residents(self, number: int, window: Sequence[Holding]) -> list[Resident]:
        digests = [holding.digest for holding in window]
        here = self._meta.blobs(digests)
        elsewhere = self._elsewhere(digests)
        others = self._holdings.all_mask & ~(1 << number)
        return [
            Resident(
                holding.digest,
                holding.size_bytes,
                None if use is None else use.used_ns,
                is_last=(blob is None or holding.digest in self._leaving)
                and not holding.mask & others
                and holding.digest not in elsewhere,
                is_pinned=use is not None and use.is_pinned,
            )
            for holding, use, blob in zip(window, self._meta.uses_of(digests), here, strict=True)
        ]

    async def _take_away(self, one: ConfiguredTier, chosen: Sequence[Resident]) -> None:
        with trio.move_on_after(DEMOTE_S):
            async with trio.open_nursery() as nursery:
                for resident in chosen:
                    if resident.is_last and resident.used_ns is not None:
                        nursery.start_soon(self._move, one, resident)
        going = self._still_going(one, chosen)
        for resident in going:
            self._holdings.note_lost(resident.digest, one.number)
        async with trio.open_nursery() as nursery:
            for resident in going:
                nursery.start_soon(self._take_one_away, one, resident)

    def _still_going(self, one: ConfiguredTier, chosen: Sequence[Resident]) -> list[Resident]:
        """Those that may leave now. While others were moved, the only other copy may have gone for
        the sake of this one."""
        known = {resident.digest: resident.is_last for resident in chosen}
        masks = self._holdings.masks(list(known))
        window = [
            Holding(resident.digest, resident.size_bytes, mask)
            for resident, mask in zip(chosen, masks, strict=True)
            if mask >> one.number & 1
        ]
        return [
            resident
            for resident in self._residents(one.number, window)
            if not resident.is_last or (known[resident.digest] and not resident.is_pinned)
        ]

    async def _move(self, one: ConfiguredTier, resident: Resident) -> None:
        """Have a last copy in the first other tier that takes it, without anything leaving that."""
        digest, size_bytes = resident.digest, resident.size_bytes
        for number in self._holdings.numbers:
            other = self._holdings.tier(number)
            if other is one or not other.is_usable or other.full_until_s > trio.current_time():
                continue
            limit_bytes = other.config.max_bytes
            if limit_bytes is not None and self._load(other) + size_bytes > limit_bytes:
                continue
            source, target = one.tier, other.tier
            if source is None or target is None:
                continue
            try:
                is_moved = await trio.to_thread.run_sync(
                    _copy_blob, source, target, digest, size_bytes,
                    limiter=self._limiter, abandon_on_cancel=True,
                )  # fmt: skip
            except Corrupt:
                return  # its reader would find the same
            except KvfsError as error:
                log.info("blob %s is not moved to %s: %s", digest.hex(), other.name, error)
                continue
            if is_moved:
                self._holdings.note_held(digest, size_bytes, number)
                self.moved_blobs += 1
            return

    async def _take_one_away(self, one: ConfiguredTier, resident: Resident) -> None:
        tier = one.tier
        try:
            if tier is not None:
                await trio.to_thread.run_sync(
                    tier.remove, resident.digest, limiter=self._limiter, abandon_on_cancel=True
                )
        except Unavailable as error:
            log.info("blob %s stays in tier %s: %s", resident.digest.hex(), one.name, error)
            self._holdings.note_held(resident.digest, resident.size_bytes, one.number)
            return
        self.evicted_blobs += 1
        self.evicted_bytes += resident.size_bytes
        self._gone(resident.digest)


def _copy_blob(source: WritableTier, target: WritableTier, digest: bytes, size_bytes: int) -> bool:
    """In a worker thread: one blob from tier to tier; False when the first has it not."""
    data = allocate(size_bytes)[:size_bytes]
    if size_bytes and not source.read_into(digest, 0, data, DEMOTE_S):
        return False
    target.put(digest, data, size_bytes, DEMOTE_S)
    return True
