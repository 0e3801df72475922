"""What the bridge counts, from any thread, until the engine takes it."""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Sums since the last take, and how long each request's load took."""

    sums: dict[str, float] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.sums and not self.load_seconds


class Counters:
    """Names are free; a reason follows a dot (`failed_loads.corrupt`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = Tally()

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._tally.sums[name] = self._tally.sums.get(name, 0) + amount

    def add_load_seconds(self, seconds: float) -> None:
        with self._lock:
            self._tally.load_seconds.append(seconds)

    def take(self) -> Tally:
        """All of it; the counters begin anew."""
        with self._lock:
            tally, self._tally = self._tally, Tally()
        return tally
