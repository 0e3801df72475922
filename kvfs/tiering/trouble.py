"""Says in the log, once, when a tier that is open does nothing but fail, and when that is over: a
bucket that is not there, credentials that are wrong, a file system that hangs or is not mounted."""

import logging
from collections.abc import Sequence

import trio

from kvfs.config import TIER_TROUBLE_S
from kvfs.tiering.opening import ConfiguredTier

log = logging.getLogger(__name__)


async def tell_troubles(tiers: Sequence[ConfiguredTier]) -> None:
    """Background task."""
    told: set[int] = set()
    while True:
        for one in tiers:
            if one.tier is not None:
                _tell(one, one.tier.trouble, told)
        await trio.sleep(TIER_TROUBLE_S)


def _tell(one: ConfiguredTier, trouble: str, told: set[int]) -> None:
    if trouble and one.number not in told:
        told.add(one.number)
        log.warning(
            "tier %s keeps failing: %s; the node serves without it, and tries again; kvfs doctor"
            " says what to do", one.name, trouble,
        )  # fmt: skip
    elif not trouble and one.number in told:
        told.remove(one.number)
        log.info("tier %s is well again", one.name)
