"""Tiers on a virtual clock: what a schedule meets, without waiting for it. Reads of a tier share
its bandwidth, which changes with time; each has a latency first, some are slow or never end."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

S = 1_000_000_000


@dataclass
class Flow:
    """One read in a tier: `left` bytes to go, from `begins_ns` on."""

    read: int
    size_bytes: int
    left: float
    begins_ns: int
    is_cancelled: bool = False


@dataclass
class SimulatedTier:
    """Bandwidth at a time is `bytes_per_s * pace(t)`, shared by the reads that are past their
    latency. `slow_share` of reads take `slow_factor` times as long, by delay."""

    bytes_per_s: float
    latency_s: float = 0.001
    slots: int = 8
    slow_share: float = 0.0
    slow_factor: float = 20.0
    frozen: tuple[float, float] | None = None  # from when until when
    paces: list[float] = field(default_factory=list)  # of each half second; empty: always 1
    flows: dict[int, Flow] = field(default_factory=dict)
    queue: list[Flow] = field(default_factory=list)
    served_bytes: float = 0.0

    def rate(self, now_ns: int) -> float:
        """Bytes in a nanosecond, now."""
        if self.frozen and self.frozen[0] * S <= now_ns < self.frozen[1] * S:
            return 0.0
        pace = self.paces[now_ns // (S // 2) % len(self.paces)] if self.paces else 1.0
        return self.bytes_per_s * pace / S

    def changes(self, now_ns: int) -> list[int]:
        """When the rate is another next."""
        times = []
        if self.paces:
            times.append((now_ns // (S // 2) + 1) * (S // 2))
        for edge in self.frozen or ():
            if edge * S > now_ns and edge < float("inf"):
                times.append(round(edge * S))
        return times

    def integral(self, until_ns: int) -> float:
        """Bytes that it could give from the start until then."""
        at_ns, total = 0, 0.0
        while at_ns < until_ns:
            next_ns = min([until_ns, *self.changes(at_ns)])
            total += self.rate(at_ns) * (next_ns - at_ns)
            at_ns = next_ns
        return total

    def start(self, read: int, size_bytes: int, now_ns: int, rng: random.Random) -> None:
        delay_s = self.latency_s * rng.uniform(0.5, 1.5)  # else all that begin together end so
        if rng.random() < self.slow_share:
            delay_s += self.slow_factor * (self.latency_s + size_bytes / self.bytes_per_s)
        begins_ns = now_ns + round(delay_s * S)
        self.flows[read] = Flow(read, size_bytes, float(size_bytes), begins_ns)

    def next_ns(self, now_ns: int) -> int | None:
        """When the next read of it begins to get bytes or ends, or its rate changes."""
        if not self.flows:
            return None
        active = [flow for flow in self.flows.values() if flow.begins_ns <= now_ns]
        times = self.changes(now_ns)
        times += [flow.begins_ns for flow in self.flows.values() if flow.begins_ns > now_ns]
        rate = self.rate(now_ns)
        if active and rate:
            least = min(flow.left for flow in active)
            times.append(now_ns + max(1, round(least * len(active) / rate)))
        return min(times, default=None)

    def advance(self, begin_ns: int, end_ns: int) -> list[Flow]:
        """Serve from one time to another, between which nothing begins, ends or changes; what
        ended."""
        active = [flow for flow in self.flows.values() if flow.begins_ns <= begin_ns]
        if not active:
            return []
        given = self.rate(begin_ns) * (end_ns - begin_ns) / len(active)
        ended = []
        for flow in active:
            self.served_bytes += min(flow.left, given)
            flow.left -= given
            if flow.left <= 0.5:
                ended.append(flow)
                del self.flows[flow.read]
        return ended


class World:
    """Tiers, a clock, and times at which something is to be called."""

    def __init__(self, tiers: list[SimulatedTier], seed: int) -> None:
        self.tiers = tiers
        self.rng = random.Random(seed)
        self.now_ns = 0
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._calls, (when_ns, self._count, call))

    def run(
        self,
        on_end: Callable[[int, Flow], None],
        *,
        wake_ns: Callable[[], int | None],
        on_wake: Callable[[], None],
        until: Callable[[], bool],
        limit_s: float = 3600.0,
    ) -> None:
        """Until it is so; an hour is taken for never."""
        while not until():
            times = [tier.next_ns(self.now_ns) for tier in self.tiers]
            times += [wake_ns(), self._calls[0][0] if self._calls else None]
            known = [when_ns for when_ns in times if when_ns is not None]
            if not known or min(known) > limit_s * S:
                raise RuntimeError(f"nothing happens any more after {self.now_ns / S:.3f} s")
            next_ns = max(self.now_ns, min(known))
            for number, tier in enumerate(self.tiers):
                for flow in tier.advance(self.now_ns, next_ns):
                    self.at(next_ns, partial(on_end, number, flow))
            self.now_ns = next_ns
            while self._calls and self._calls[0][0] <= next_ns:
                heappop(self._calls)[2]()
            wake = wake_ns()
            if wake is not None and wake <= next_ns:
                on_wake()
