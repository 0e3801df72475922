"""The tiers of a node's configuration, opened in another process, each when it is first wanted."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvfs.config import READER_TIER_AGAIN_S, READER_TIER_OPEN_S
from kvfs.errors import KvfsError
from kvfs.located import ToldTiers
from kvfs.settings.words import TierConfig
from kvfs.tiers.contract import Tier
from kvfs.tiers.opening import open_tier

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Known:
    """A tier of the node, as it is here."""

    config: TierConfig
    tier: Tier | None = None
    is_opening: bool = False
    began_s: float = 0.0  # when that began
    again_s: float = 0.0  # when a tier that could not be opened is tried once more
    is_said: bool = False


class ConfiguredTiers:
    """Opens tiers on threads of their own, since one may hang. Thread-safe.

    One that cannot be opened here is not used, which is said once, and is tried again later: its
    file system may be mounted, its credentials set, only elsewhere.
    """

    def __init__(
        self,
        ask: Callable[[], ToldTiers | None],
        opened: Callable[[int, Tier], None],
        closed: Callable[[int], None],
    ) -> None:
        """`ask`: what tiers the node has; None when it does not say. `opened` and `closed`: a tier
        may be read from now on, or not any more; they must not block."""
        self._ask = ask
        self._opened = opened
        self._closed = closed
        self._changed = threading.Condition()
        self._revision: int | None = None
        self._known: dict[int, _Known] = {}
        self._is_closed = False
        self._reader_id = secrets.token_hex(8)

    def learn(self, revision: int) -> None:
        """The node names tiers as they were at a revision: know which those are. Asks the node
        where that is not known."""
        with self._changed:
            if revision == self._revision:
                return
        told = self._ask()
        if told is None:
            return
        with self._changed:
            if self._is_closed or told.revision == self._revision:
                return
            self._revision = told.revision
            gone = [
                self._forget(number)
                for number, known in list(self._known.items())
                if told.tiers.get(number) != known.config
            ]
            for number, config in told.tiers.items():
                self._known.setdefault(number, _Known(config))
        _close_all(gone)

    def wait_open(self, numbers: Collection[int], end_s: float) -> None:
        """Begin to open those of some tiers that are not open, and wait for them until a time; for
        each no longer than `READER_TIER_OPEN_S` in all, whoever waits: one may hang."""
        with self._changed:
            for number in numbers:
                known = self._known.get(number)
                if known is not None and self._may_open(known):
                    known.is_opening = True
                    known.began_s = time.monotonic()
                    threading.Thread(
                        target=self._open, args=(number, known), name="kvfs-open", daemon=True
                    ).start()
            while (begun := self._newest_opening(numbers)) is not None:
                left_s = min(end_s, begun + READER_TIER_OPEN_S) - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def are_open(self, numbers: Collection[int]) -> tuple[int, ...]:
        """Those of some tiers that may be read."""
        with self._changed:
            return tuple(n for n in numbers if (k := self._known.get(n)) and k.tier is not None)

    def close(self) -> None:
        """Close all."""
        with self._changed:
            self._is_closed = True
            gone = [self._forget(number) for number in list(self._known)]
        _close_all(gone)

    def _newest_opening(self, numbers: Collection[int]) -> float | None:
        """When the last of those began that are being opened; None when none is."""
        known = [self._known.get(number) for number in numbers]
        return max((one.began_s for one in known if one and one.is_opening), default=None)

    def _may_open(self, known: _Known) -> bool:
        is_due = time.monotonic() >= known.again_s
        return known.tier is None and not known.is_opening and is_due and not self._is_closed

    def _open(self, number: int, known: _Known) -> None:
        tier: Tier | None = None
        try:
            tier = open_tier(known.config, self._reader_id, must_exist=True)
            with self._changed:
                if self._known.get(number) is known:
                    self._opened(number, tier)
                    known.tier, tier = tier, None
        except (KvfsError, OSError) as error:
            level = logging.INFO if known.is_said else logging.WARNING
            known.is_said = True
            log.log(level, "kvfs: tier %s is not used here: %s", known.config.name, error)
        finally:
            with self._changed:
                known.is_opening = False
                known.again_s = time.monotonic() + READER_TIER_AGAIN_S
                self._changed.notify_all()
        _close_all([tier])

    def _forget(self, number: int) -> Tier | None:
        """A tier that the node has not any more, or not like that; to be closed without the
        lock."""
        known = self._known.pop(number)
        if known.tier is not None:
            self._closed(number)
        return known.tier


def _close_all(tiers: Iterable[Tier | None]) -> None:
    for tier in tiers:
        if tier is not None:
            tier.close()
