"""How long a tier takes for a read, from what it took for others: moving averages.

Reads at the same time share a tier's bandwidth: one of n reads, of s bytes each, takes
`pace * (latency + n * s * per_byte)`. How many there were is a mean over the read's time (harmonic:
its time over what it would have had of the tier alone), for they begin and end at any time. Latency
and time for a byte are the weighted least squares of what was measured in some seconds; where all
was alike nothing tells them apart, and latency stays what it was, as far as the mean allows. (A
tier that gives each read its own bandwidth shows as one of high latency and no time for a byte.)
The pace is what all reads took of late, of what that says: it follows a tier whose speed changes.

What was measured loses half its weight in a half-life, but the last few reads always count. One
that took far longer than expected counts as less, and says nothing of latency: a single one does
not make a tier slow, one after the other does. The pace of a tier of which nothing is read comes
back to 1, so that one that was slow is tried again.
"""

from kvfs import config

_DECAY_STEP_NS = 20_000_000  # a decay for less would cost more than it changes
_WEIGHT_MIN = 4.0  # reads that count, however long ago
_OUTLIER_FACTOR = 2.0  # times as long as expected is the most that one read counts
_SPREAD_MIN = 0.1  # of what was shared, squared and relative, for a line to mean anything
_QUIET_NS = 1_000_000_000  # without a read, after which the pace is half-way to 1
_PACE_HALF_LIFE_NS = config.SCHEDULE_PACE_HALF_LIFE_S * 1e9
_LINE_HALF_LIFE_NS = config.SCHEDULE_LINE_HALF_LIFE_S * 1e9


class Speed:
    """One tier's. `latency_ns` and `ns_per_byte`, of a read alone, are as of the last read."""

    __slots__ = (
        "_aged_ns", "_at_ns", "_latency_ns", "_ns_per_byte", "_pace", "_paces", "_paces_weight",
        "_reads", "_shared", "_shared2", "_sharedtime", "_size", "_time", "_together", "_typical",
        "_weight", "latency_ns", "ns_per_byte",
    )  # fmt: skip

    def __init__(self, latency_ns: float, ns_per_byte: float) -> None:
        assert latency_ns >= 0 and ns_per_byte > 0
        self._latency_ns = latency_ns
        self._ns_per_byte = ns_per_byte
        self._pace = 1.0
        self._set()
        self._typical = 0.0  # bytes of a read
        self._together = 1.0  # reads at the same time
        self._at_ns = 0
        self._aged_ns = 0
        self._paces = self._paces_weight = 0.0
        self._weight = self._size = self._time = self._reads = 0.0
        self._shared = self._shared2 = self._sharedtime = 0.0

    def read_ns(self, size_bytes: int, reads: int) -> float:
        """How long a read of so many bytes is expected to take as one of so many."""
        return self.latency_ns + reads * size_bytes * self.ns_per_byte

    def rate(self) -> float:
        """Bytes in a nanosecond, of all reads together, as there were lately."""
        if not self._typical:
            return 1 / self.ns_per_byte
        shared = self._together * self._typical
        return shared / (self.latency_ns + shared * self.ns_per_byte)

    def note(self, size_bytes: int, took_ns: int, reads: float, now_ns: int) -> None:
        """A read took so long, as one of so many on average; or one that was cancelled had taken so
        long already."""
        assert size_bytes > 0 and reads > 0
        took = float(took_ns or 1)
        shared = float(reads * size_bytes)
        pace = took / (self._latency_ns + shared * self._ns_per_byte)
        is_outlier = self._weight > 0 and pace > _OUTLIER_FACTOR * self._pace
        if is_outlier:
            pace = _OUTLIER_FACTOR * self._pace
        if now_ns - self._at_ns >= _DECAY_STEP_NS:
            self._decay(now_ns)
        self._paces += pace
        self._paces_weight += 1
        self._pace = self._paces / self._paces_weight
        if is_outlier:
            self._set()
            return
        time = took / self._pace
        self._weight += 1
        self._size += size_bytes
        self._reads += reads
        self._shared += shared
        self._time += time
        self._shared2 += shared * shared
        self._sharedtime += shared * time
        self._fit()

    def _fit(self) -> None:
        weight, shared, time = self._weight, self._shared, self._time
        spread = weight * self._shared2 - shared * shared
        if spread > _SPREAD_MIN * shared * shared:
            per_byte = (weight * self._sharedtime - shared * time) / spread
        else:
            per_byte = (time - weight * min(self._latency_ns, time / weight / 2)) / shared
        # Neither may be less than nothing, and together they meet the mean.
        most = time / shared
        if per_byte > most:
            per_byte = most
        elif per_byte < 0.01 * most:
            per_byte = 0.01 * most
        self._ns_per_byte = per_byte
        latency_ns = (time - shared * per_byte) / weight
        self._latency_ns = latency_ns if latency_ns > 0 else 0.0
        self._typical = self._size / weight
        self._together = self._reads / weight
        self._set()

    def _set(self) -> None:
        self.latency_ns = self._pace * self._latency_ns
        self.ns_per_byte = self._pace * self._ns_per_byte

    def age(self, now_ns: int) -> None:
        """Time has passed, perhaps without a read."""
        if now_ns - max(self._at_ns, self._aged_ns) >= _QUIET_NS:
            self._aged_ns = now_ns
            self._pace = (self._pace + 1) / 2
            self._paces = self._pace * self._paces_weight
            self._set()

    def _decay(self, now_ns: int) -> None:
        passed_ns = now_ns - self._at_ns
        self._at_ns = now_ns
        kept = _kept(passed_ns / _PACE_HALF_LIFE_NS, self._paces_weight)
        self._paces *= kept
        self._paces_weight *= kept
        kept = _kept(passed_ns / _LINE_HALF_LIFE_NS, self._weight)
        self._weight *= kept
        self._size *= kept
        self._time *= kept
        self._reads *= kept
        self._shared *= kept
        self._shared2 *= kept
        self._sharedtime *= kept


def _kept(half_lives: float, weight: float) -> float:
    """What is left of a weight: not less than the last few reads."""
    return max(0.5**half_lives, min(1.0, _WEIGHT_MIN / weight)) if weight else 1.0
