"""From where loads get their bytes, counted: `read_bytes`, `reads`, `hedges_won` and `hedges_lost`,
each by its source."""

import threading
from dataclasses import dataclass

from gpu_bridge.counters import Counters
from kvfs.reader.places import PEERS, Places
from kvfs.transfer.runner import Transfer


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was counted of a tier until now."""

    reads: int = 0
    read_bytes: int = 0
    hedges_won: int = 0
    hedges_lost: int = 0


class SourceCounts:
    """Adds to the counters what has come since the last time. Thread-safe."""

    def __init__(self, places: Places, transfer: Transfer, counters: Counters) -> None:
        self._places = places
        self._transfer = transfer
        self._counters = counters
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}

    def note(self) -> None:
        """Count."""
        with self._lock:
            for tier in self._transfer.view().tiers:
                found = tier.schedule
                now = _Seen(
                    found.reads_ended, found.bytes_read, found.hedges_won, found.hedges_lost
                )
                before = self._seen.get(tier.number, _Seen())
                if now != before:
                    self._seen[tier.number] = now
                    self._add(self._places.source_of(tier.number) or tier.name, before, now)

    def _add(self, source: str, before: _Seen, now: _Seen) -> None:
        for name in _Seen.__slots__:
            more = getattr(now, name) - getattr(before, name)
            if more > 0:
                self._counters.add(f"{name}.{source}", more)
        if source == PEERS and now.read_bytes > before.read_bytes:
            self._counters.add("loaded_remote_bytes", now.read_bytes - before.read_bytes)
