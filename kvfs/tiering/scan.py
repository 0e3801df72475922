"""What lies in tiers, looked at in the background at a low rate: all of them once after they were
opened, and from time to time those that other nodes fill. What a tier has beyond what is known is
noted, up to as many files as a node may have; what it has not is found when it is asked for."""

import logging
from collections.abc import Iterator, Sequence

import trio

from kvfs.config import (
    FILES_MAX,
    TIER_LOOK_S,
    TIER_SCAN_AGAIN_S,
    TIER_SCAN_PAUSE_S,
    TIER_SCAN_RARE_S,
    TIER_SCAN_S,
)
from kvfs.errors import Unavailable
from kvfs.meta.contract import MetaEngine
from kvfs.meta.tier_contract import HoldingChange, TierLoad
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.opening import FILLED_BY_OTHERS, ConfiguredTier
from kvfs.tiering.reads import Reads
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.directory import DirectoryTier

log = logging.getLogger(__name__)
_NOTED_AT_ONCE = 250  # 2 ms


class Scan:
    """In the node's thread."""

    def __init__(
        self,
        engine: MetaEngine,
        holdings: Holdings,
        reads: Reads,
        tiers: Sequence[ConfiguredTier],
    ) -> None:
        self._meta = engine
        self._holdings = holdings
        self._reads = reads
        self._tiers = tiers
        self._limiter = trio.CapacityLimiter(
            max(1, 2 * len(tiers))
        )  # one that hangs keeps no other

    async def run(self) -> None:
        """Background task."""
        async with trio.open_nursery() as nursery:
            for one in self._tiers:
                nursery.start_soon(self._scan_always, one)
                nursery.start_soon(self._look_always, one)

    async def _scan_always(self, one: ConfiguredTier) -> None:
        while True:
            while not one.is_usable:
                await trio.sleep(TIER_LOOK_S)
            try:
                assert one.tier is not None
                await self._scan(one, one.tier)
            except Unavailable as error:
                log.info("tier %s cannot be looked through: %s", one.name, error)
                await trio.sleep(TIER_SCAN_AGAIN_S)
                continue
            if one.config.kind not in FILLED_BY_OTHERS:
                return
            # Who evicts must know what is there; to list all of a bucket costs.
            is_evicting = one.config.max_bytes is not None
            await trio.sleep(TIER_SCAN_S if is_evicting else TIER_SCAN_RARE_S)

    async def _scan(self, one: ConfiguredTier, tier: WritableTier) -> None:
        if isinstance(tier, DirectoryTier):
            await trio.to_thread.run_sync(tier.purge, limiter=self._limiter, abandon_on_cancel=True)
        batches = tier.scan()
        while batch := await self._next(batches):
            for begin in range(0, len(batch), _NOTED_AT_ONCE):
                if self._meta.tier_loads().get(one.number, TierLoad()).blobs >= FILES_MAX:
                    return
                self._note(one.number, batch[begin : begin + _NOTED_AT_ONCE])
                await trio.lowlevel.checkpoint()
            await trio.sleep(TIER_SCAN_PAUSE_S)
            await self._reads.wait_quiet(TIER_LOOK_S)

    async def _next(self, batches: Iterator[list[tuple[bytes, int]]]) -> list[tuple[bytes, int]]:
        """The next blobs; none at the end."""
        return await trio.to_thread.run_sync(
            lambda: next((batch for batch in batches if batch), []),
            limiter=self._limiter,
            abandon_on_cancel=True,
        )

    def _note(self, number: int, found: Sequence[tuple[bytes, int]]) -> None:
        masks = self._holdings.masks([digest for digest, _ in found])
        self._holdings.note(
            [
                HoldingChange(digest, size_bytes, gained=1 << number)
                for (digest, size_bytes), mask in zip(found, masks, strict=True)
                if not mask >> number & 1
            ]
        )

    async def _look_always(self, one: ConfiguredTier) -> None:
        """Know how much room a tier has."""
        while True:
            if one.is_usable and one.tier is not None:
                try:
                    one.capacity = await trio.to_thread.run_sync(
                        one.tier.capacity, limiter=self._limiter, abandon_on_cancel=True
                    )
                except Unavailable as error:
                    log.debug("tier %s does not say how much room it has: %s", one.name, error)
            await trio.sleep(TIER_LOOK_S)
