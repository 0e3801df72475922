"""Room in tiers. A tier with `max_bytes` holds no more, as far as this node knows what lies there,
with what is on its way to it; a local one that is full makes room as well. What leaves is the
coldest of a part of what lies there, the next part each time: no order of all is kept
(`policy.plan_removal`).

What leaves is first taken from the books, so that no local copy is given up for the sake of one
that goes. A last copy stays in them until another tier has it, or none takes it: then its names go.

A tier's lock is held while another one is asked to take a last copy, so that one's lock is only
taken when it is free: two that hand on to each other would wait for ever.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio

from kvfs.config import (
    DEMOTE_S,
    TIER_EVICTION_SHARE,
    TIER_EVICTION_WINDOW,
    TIER_FULL_S,
    TIER_MOVES_MAX,
    TIER_WINDOWS_MAX,
    TIER_WINDOWS_SPARING_MAX,
)
from kvfs.errors import Corrupt, OutOfSpace, Unavailable
from kvfs.meta.contract import MetaEngine
from kvfs.meta.tier_contract import Holding, TierLoad
from kvfs.settings.sizes import least_free_bytes
from kvfs.settings.words import TierKind
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.moving import move_blob
from kvfs.tiering.opening import FILLED_BY_OTHERS, ConfiguredTier
from kvfs.tiering.policy import Resident, plan_removal
from kvfs.tiering.rules import Rules

log = logging.getLogger(__name__)
_REMOVED_AT_ONCE = 4


class Room:
    """In the node's thread. `elsewhere` tells which digests other nodes have; `gone` hears of each
    digest that left a tier."""

    def __init__(
        self,
        engine: MetaEngine,
        holdings: Holdings,
        rules: Rules,
        elsewhere: Callable[[Sequence[bytes]], Container[bytes]],
        gone: Callable[[bytes], None],
    ) -> None:
        self._meta = engine
        self._holdings = holdings
        self._rules = rules
        self._elsewhere = elsewhere
        self._gone = gone
        self._after: dict[int, bytes] = {}  # of each tier: where the next window begins
        self._locks = {number: trio.Lock() for number in holdings.numbers}
        self._coming: Counter[int] = Counter()  # bytes that were granted and are not in the books
        self._leaving: Counter[bytes] = Counter()  # digests whose copy here is about to go
        self._removing = trio.CapacityLimiter(_REMOVED_AT_ONCE)
        self._moving = trio.CapacityLimiter(TIER_MOVES_MAX)
        self._said_untaken: set[int] = set()  # tiers whose last copies found no other tier
        self.evicted_blobs = 0
        self.evicted_bytes = 0
        self.moved_blobs = 0  # last copies, to another tier

    @asynccontextmanager
    async def granted(
        self, one: ConfiguredTier, size_bytes: int, spares_last: bool = False
    ) -> AsyncIterator[bool]:
        """Whether a tier may hold so many bytes more, after what is cold there has gone. They are
        the caller's for the length of the `with` block, in which it notes what came. `spares_last`:
        no last copy goes for them."""
        limit_bytes = one.config.max_bytes
        if limit_bytes is None:
            yield True
            return
        async with self._locks[one.number]:
            is_granted = await self._make(one, size_bytes, limit_bytes, spares_last)
            if is_granted:
                self._coming[one.number] += size_bytes
        try:
            yield is_granted
        finally:
            if is_granted:
                self._coming[one.number] -= size_bytes

    async def _make(
        self, one: ConfiguredTier, size_bytes: int, limit_bytes: int, spares_last: bool
    ) -> bool:
        if size_bytes > limit_bytes:
            return False
        return await self._remove(
            one,
            lambda: self._load(one) + self._coming[one.number] + size_bytes - limit_bytes,
            spares_last,
        )

    async def note_full(self, one: ConfiguredTier, size_bytes: int) -> bool:
        """A tier had no room for so many bytes. A local one gets some: True; others are let alone
        for a while, since others fill them."""
        if one.config.kind not in FILLED_BY_OTHERS:
            async with self._locks[one.number]:
                wanted_bytes = self._load(one) - size_bytes
                if await self._remove(one, lambda: self._load(one) - wanted_bytes):
                    return True
        one.full_until_s = trio.current_time() + TIER_FULL_S
        return False

    @contextmanager
    def leaving(self, digests: Sequence[bytes]) -> Iterator[None]:
        """The copies of these here are about to go: no tier gives one of them up meanwhile, unless
        another one has it."""
        self._leaving.update(digests)
        try:
            yield
        finally:
            self._leaving -= Counter(digests)

    def by_room(self, size_bytes: int) -> list[ConfiguredTier]:
        """All tiers, those first that are likely to keep a last copy of such a size: what is on a
        disk outlives the machine, and where there is room without a limit nothing is evicted. Of
        equal ones those first that come first in the configuration."""
        return sorted(
            map(self._holdings.tier, self._holdings.numbers),
            key=lambda one: self._rank(one, size_bytes),
        )

    def _rank(self, one: ConfiguredTier, size_bytes: int) -> tuple[bool, bool, int]:
        limit_bytes, capacity = one.config.max_bytes, one.capacity
        in_memory = one.config.kind is TierKind.MEMORY
        rooms = []
        if limit_bytes is not None:
            rooms.append(limit_bytes - self._load(one) - self._coming[one.number])
        if capacity is not None:
            least = least_free_bytes(one.config.min_free, capacity.total_bytes)
            rooms.append(capacity.free_bytes - least)
        room_bytes = min(rooms, default=size_bytes)
        if limit_bytes is None and room_bytes >= size_bytes:
            return in_memory, False, 0
        return in_memory, True, -room_bytes

    def _load(self, one: ConfiguredTier) -> int:
        return self._meta.tier_loads().get(one.number, TierLoad()).size_bytes

    async def _remove(
        self, one: ConfiguredTier, short_bytes: Callable[[], int], spares_last: bool = False
    ) -> bool:
        """Remove until nothing is short; False when that does not come to an end."""
        for _ in range(TIER_WINDOWS_SPARING_MAX if spares_last else TIER_WINDOWS_MAX):
            need_bytes = short_bytes()
            if need_bytes <= 0:
                return True
            if not one.is_usable:
                return False
            window = self._next_window(one.number)
            if not window and not self._after.get(one.number):
                return False  # nothing lies there
            residents = self._residents(one.number, window)
            if spares_last:
                residents = [r for r in residents if r.used_ns is None or not r.is_last]
            chosen = plan_removal(residents, need_bytes, TIER_EVICTION_SHARE)
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
                is_pinned=holding.digest in self._leaving or (use is not None and use.is_pinned),
            )
            for holding, use, blob in zip(window, self._meta.uses_of(digests), here, strict=True)
        ]

    async def _take_away(self, one: ConfiguredTier, chosen: Sequence[Resident]) -> None:
        wanted = {resident.digest for resident in chosen if self._is_wanted(resident)}
        for resident in chosen:
            if resident.digest not in wanted:
                self._holdings.note_lost(resident.digest, one.number)
        async with trio.open_nursery() as nursery:
            for resident in chosen:
                work = self._hand_on if resident.digest in wanted else self._take_one_away
                nursery.start_soon(work, one, resident)

    def _is_wanted(self, resident: Resident) -> bool:
        """Whether a last copy is to go to another tier."""
        is_last = resident.is_last and resident.used_ns is not None
        return is_last and self._rules.of(resident.digest).copies > 0

    async def _take_one_away(self, one: ConfiguredTier, resident: Resident) -> None:
        tier = one.tier
        try:
            if tier is not None:
                await trio.to_thread.run_sync(
                    tier.remove, resident.digest, limiter=self._removing, abandon_on_cancel=True
                )
        except Unavailable as error:
            log.info("blob %s stays in tier %s: %s", resident.digest.hex(), one.name, error)
            self._holdings.note_held(resident.digest, resident.size_bytes, one.number)
            return
        self.evicted_blobs += 1
        self.evicted_bytes += resident.size_bytes
        self._gone(resident.digest)

    # Last copies ----------------------------------------------------------------------------------
    async def _hand_on(self, one: ConfiguredTier, resident: Resident) -> None:
        """Take a last copy away once another tier has it, or none takes it."""
        is_settled = False
        with trio.move_on_after(DEMOTE_S):
            for other in self.by_room(resident.size_bytes):
                if other is not one and await self._move(one, other, resident):
                    is_settled = True
                    break
        if not is_settled:
            self._say_untaken(one, resident.digest)
        self._holdings.note_lost(resident.digest, one.number)
        await self._take_one_away(one, resident)

    async def _move(self, one: ConfiguredTier, other: ConfiguredTier, resident: Resident) -> bool:
        """Whether no other tier is to be asked: this one has it, or there is nothing worth it."""
        digest, size_bytes = resident.digest, resident.size_bytes
        if not other.is_usable or other.full_until_s > trio.current_time():
            return False
        if not await self._make_aside(other, size_bytes):
            return False
        try:
            source, target = one.tier, other.tier
            if source is None or target is None:
                return False
            is_there = await trio.to_thread.run_sync(
                move_blob, source, target, digest, size_bytes,
                limiter=self._moving, abandon_on_cancel=True,
            )  # fmt: skip
            if is_there:
                self._holdings.note_held(digest, size_bytes, other.number)
                self.moved_blobs += 1
            return True
        except Corrupt:  # its reader would find the same
            return True
        except (Unavailable, OutOfSpace, OSError) as error:
            log.info("blob %s is not moved to %s: %s", digest.hex(), other.name, error)
            return False
        finally:
            self._coming[other.number] -= size_bytes

    async def _make_aside(self, other: ConfiguredTier, size_bytes: int) -> bool:
        """Grant bytes of a tier for what leaves another one; who is told yes gives them back."""
        limit_bytes, lock = other.config.max_bytes, self._locks[other.number]
        if limit_bytes is not None and not lock.locked():
            async with lock:
                await self._make(other, size_bytes, limit_bytes, spares_last=True)
        load_bytes = self._load(other) + self._coming[other.number]
        is_granted = limit_bytes is None or load_bytes + size_bytes <= limit_bytes
        if is_granted:
            self._coming[other.number] += size_bytes
        return is_granted

    def _say_untaken(self, one: ConfiguredTier, digest: bytes) -> None:
        level = logging.DEBUG if one.number in self._said_untaken else logging.WARNING
        self._said_untaken.add(one.number)
        log.log(
            level,
            "tier %s is full, and no other one takes blob %s, its last copy: the names of such go; "
            "raise max_bytes or add a tier (said once)",
            one.name,
            digest.hex(),
        )
