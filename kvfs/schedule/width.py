"""How many reads a tier has at the same time: a hill climber over its measured throughput.

What it maximizes is `throughput / reads ** PRICE`: twice as many reads must bring 4% more, and the
same with fewer is better, for what is under way ends sooner and can be given to others.

Throughput is measured in windows of a few reads for each slot; only those count in which the tier
had all slots in use, for others measure how much there was to do. A step that was worth it is
followed by another the same way, at first in doubling steps up, until one is not worth it, then one
by one; such a step is taken back, and after some windows of rest the other way is tried. So it goes
on growing while throughput grows, shrinks when that costs nothing, and follows a tier that changes.
"""

from kvfs import config

_PRICE = 0.05
_REST_WINDOWS = 4


class Width:
    """One tier's. `reads` is the number; between 1 and `reads_max`."""

    __slots__ = (
        "_before",
        "_began_ns",
        "_bytes",
        "_count",
        "_is_slow",
        "_last",
        "_rest",
        "_up",
        "reads",
        "reads_max",
    )  # fmt: skip

    def __init__(self, reads_max: int) -> None:
        assert reads_max > 0
        self.reads_max = reads_max
        self.reads = min(reads_max, config.SCHEDULE_READS_FIRST)
        self._before = self.reads  # what it was before the last step
        self._last = 0.0  # throughput before the last step; 0: none is known
        self._up = True  # the last step's direction, or the next one's after a rest
        self._is_slow = False  # whether a step has failed, and steps are single ones
        self._rest = 0
        self._began_ns = 0
        self._count = 0
        self._bytes = 0

    def note(self, size_bytes: int, now_ns: int, *, is_full: bool) -> None:
        """A read landed; `is_full`: all slots were in use until then."""
        if not is_full:
            self._void()
            return
        if not self._began_ns:
            self._began_ns = now_ns
            return
        self._count += 1
        self._bytes += size_bytes
        passed_ns = now_ns - self._began_ns
        if (
            self._count >= self.reads * config.SCHEDULE_WINDOW_READS
            and passed_ns >= config.SCHEDULE_WINDOW_S * 1e9
        ):
            self._judge(self._bytes / passed_ns)
            self._void()

    def limit(self, reads_max: int) -> None:
        """The tier's own limit is another now."""
        assert reads_max > 0
        self.reads_max = reads_max
        self.reads = min(self.reads, reads_max)
        self._last = 0.0
        self._void()

    def _judge(self, now: float) -> None:
        if self._rest:
            self._rest -= 1
            self._last = now
            return
        if self._last and now / self._last < (self.reads / self._before) ** _PRICE:
            self.reads = min(self._before, self.reads_max)
            self._up = not self._up
            self._is_slow = True
            self._last = 0.0
            self._rest = _REST_WINDOWS
            return
        self._step(now)

    def _step(self, now: float) -> None:
        self._before = self.reads
        self._last = now
        if self._up:
            step = 1 if self._is_slow else self.reads
            self.reads = min(self.reads_max, self.reads + step)
        else:
            self.reads = max(1, self.reads - 1)
        if self.reads == self._before:  # at an end of the range
            self._up = not self._up
            self._is_slow = True
            self._rest = _REST_WINDOWS

    def _void(self) -> None:
        self._began_ns = self._count = self._bytes = 0
