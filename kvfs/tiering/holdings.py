"""Which of the node's tiers hold what: the metadata's masks, as far as they are of tiers that the
configuration names now. They are corrected by what tiers say when they are asked."""

import logging
from collections.abc import Sequence

from kvfs.errors import KvfsError
from kvfs.meta.contract import MetaEngine
from kvfs.meta.tier_contract import HoldingChange
from kvfs.tiering.opening import ConfiguredTier

log = logging.getLogger(__name__)


class Holdings:
    """In the node's thread."""

    def __init__(self, engine: MetaEngine, tiers: Sequence[ConfiguredTier]) -> None:
        self._meta = engine
        self._tiers = {one.number: one for one in tiers}
        self.numbers = [one.number for one in tiers]  # in the order of the configuration
        self.all_mask = sum(1 << number for number in self.numbers)

    def tier(self, number: int) -> ConfiguredTier:
        """The tier with a number of a mask."""
        return self._tiers[number]

    def masks(self, digests: Sequence[bytes]) -> list[int]:
        """Bit n: the tier with number n has the blob, as far as is known, whether it is open or
        not."""
        return [mask & self.all_mask for mask in self._meta.tier_masks(digests)]

    def numbers_of(self, mask: int) -> tuple[int, ...]:
        """The tiers of a mask, in the order of the configuration."""
        return tuple(number for number in self.numbers if mask >> number & 1)

    def held(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those that some tier has, whether it answers now or not."""
        return {digest for digest, mask in zip(digests, self.masks(digests), strict=True) if mask}

    def note_held(self, digest: bytes, size_bytes: int, number: int) -> None:
        """A tier has a blob."""
        self.note([HoldingChange(digest, size_bytes, gained=1 << number)])

    def note_lost(self, digest: bytes, number: int) -> None:
        """A tier has not a blob."""
        self.note([HoldingChange(digest, 0, lost=1 << number)])

    def note(self, changes: Sequence[HoldingChange]) -> None:
        """Never raises: what is not known costs a question, or a copy more."""
        if not changes:
            return
        try:
            self._meta.note_holdings(changes)
        except KvfsError as error:
            log.warning("what tiers hold is not noted: %s", error)
