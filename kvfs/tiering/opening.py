"""The tiers of a configuration, opened in the background: one that cannot be opened is said once,
and tried again; the node serves without it meanwhile."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kvfs.config import TIERS_OPEN_AGAIN_S, TIERS_OPEN_WAIT_S
from kvfs.errors import InvalidInput, KvfsError
from kvfs.health import HealthState
from kvfs.settings.words import TierConfig, TierKind
from kvfs.tiers.contract import Capacity, WritableTier
from kvfs.tiers.opening import open_tier

FILLED_BY_OTHERS = (TierKind.SHARED, TierKind.OBJECT)  # kinds that other nodes use as well
log = logging.getLogger(__name__)


def place_of(config: TierConfig) -> bytes:
    """See `ConfiguredTier.place`."""
    where = f"{config.endpoint} {config.url}" if config.path is None else str(config.path)
    return f"{config.name}\0{where}".encode(errors="surrogateescape")


@dataclass(slots=True, eq=False)
class ConfiguredTier:
    """A tier as the node has it. `number`: its bit in masks, the same at every start."""

    number: int
    config: TierConfig
    tier: WritableTier | None = None  # None: it is not open (yet)
    trouble: str = ""  # why not
    capacity: Capacity | None = None  # as it was a moment ago
    full_until_s: float = float("-inf")  # since it had no room

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def place(self) -> bytes:
        """What makes it the same tier as before: its name, and where it is."""
        return place_of(self.config)

    @property
    def shown_trouble(self) -> str:
        """Why it is not open, or what keeps failing since it is; empty while all is well."""
        return self.trouble if self.tier is None else self.tier.trouble

    @property
    def is_usable(self) -> bool:
        """Whether something may be asked of it now."""
        return self.tier is not None and self.tier.health is not HealthState.DOWN


class Opening:
    """Opens tiers, and closes them in the end. `opened` hears of each, in the node's thread."""

    def __init__(
        self,
        tiers: Sequence[ConfiguredTier],
        node_id: str,
        opened: Callable[[ConfiguredTier, WritableTier], None],
    ) -> None:
        self._tiers = tiers
        self._node_id = node_id
        self._opened = opened
        self._limiter = trio.CapacityLimiter(max(1, len(tiers)))  # one that hangs keeps no other

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Background task. It has started when all are open, or that takes too long."""
        tried = [trio.Event() for _ in self._tiers]
        async with trio.open_nursery() as nursery:
            for tier, event in zip(self._tiers, tried, strict=True):
                nursery.start_soon(self._open_always, tier, event)
            with trio.move_on_after(TIERS_OPEN_WAIT_S):
                for event in tried:
                    await event.wait()
            task_status.started()

    async def _open_always(self, one: ConfiguredTier, tried: trio.Event) -> None:
        while one.tier is None:
            try:
                one.tier = await trio.to_thread.run_sync(
                    open_tier, one.config, self._node_id, limiter=self._limiter,
                    abandon_on_cancel=True,
                )  # fmt: skip
            except (KvfsError, OSError) as error:
                self._say(one, error)
                tried.set()
                await trio.sleep(TIERS_OPEN_AGAIN_S)
        one.trouble = ""
        log.info("tier %s is open", one.name)
        self._opened(one, one.tier)
        tried.set()

    def _say(self, one: ConfiguredTier, error: Exception) -> None:
        words = str(error)
        is_new, one.trouble = words != one.trouble, words
        level = logging.WARNING if is_new else logging.DEBUG
        advice = "; the node serves without it, and tries again"
        if isinstance(error, InvalidInput):
            advice = "; mend it or the configuration: the node serves without it, and tries again"
        log.log(level, "tier %s cannot be opened: %s%s", one.name, words, advice)

    def close(self) -> None:
        """Let go of those that are open."""
        for one in self._tiers:
            if one.tier is not None:
                one.tier.close()
                one.tier = None
