"""Whether a tier may be asked: a circuit breaker as a pure state machine, without a clock.

A tier is UP until it fails too often, then DOWN for a pause, then ON TRIAL: one read at a time may
try it. A trial that lands brings it UP, one that fails or stalls brings it DOWN for twice as long.

It goes DOWN by one of three rules:
- so many failures in a row, with nothing that landed between them;
- so many failures, and no small share of all that ended. Both counts lose half their weight in a
  half-life, so that what is long past counts for nothing;
- silence: a read stalls and nothing at all has landed since it began.
A tier of which one read in fifty fails stays up; a frozen one goes at its first stall.

Pauses double from one DOWN to the next; how many there were loses half its weight in the same time
while the tier is UP. A tier that was
silent is on trial at once when something of it lands after all.

One object per tier, used under its owner's lock or in one thread. Times are of any monotonic clock.
"""

from dataclasses import dataclass
from enum import Enum

from kvfs import config

_NS = 1e9
_DECAY_STEP_NS = 10_000_000  # a decay for less, at each read, would cost more than it changes


class HealthState(Enum):
    UP = "up"
    DOWN = "down"
    ON_TRIAL = "on trial"


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When a tier goes down and for how long."""

    half_life_s: float = config.TIER_HEALTH_HALF_LIFE_S
    failures_max: float = config.TIER_FAILURES_MAX
    failed_share_max: float = config.TIER_FAILED_SHARE_MAX
    pause_s_min: float = config.TIER_PAUSE_S_MIN
    pause_s_max: float = config.TIER_PAUSE_S_MAX


class Health:
    """The health of one tier. It begins UP."""

    __slots__ = (
        "_at_ns", "_failed", "_is_silent", "_is_tried", "_landed", "_landed_ns", "_limits",
        "_retry_ns", "_row", "_state", "_trips",
        "is_up",
    )  # fmt: skip

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._state = HealthState.UP
        self.is_up = True  # at the last event
        self._at_ns = 0  # when the counts below were right
        self._failed = 0.0
        self._landed = 0.0
        self._trips = 0.0  # times that it went down
        self._row = 0  # failures since something landed
        self._landed_ns: int | None = None
        self._retry_ns = 0  # while DOWN: when it is on trial
        self._is_silent = False  # while DOWN: because it was
        self._is_tried = False  # ON TRIAL: the one read is under way

    @property
    def retry_ns(self) -> int | None:
        """When a tier that is DOWN is on trial; None for one that is not."""
        return self._retry_ns if self._state is HealthState.DOWN else None

    @property
    def failures(self) -> float:
        """Failures that still count, as of the last event."""
        return self._failed

    def state(self, now_ns: int) -> HealthState:
        """What the tier is now: a pause that is over ends here."""
        if self._state is HealthState.DOWN and now_ns >= self._retry_ns:
            self._state = HealthState.ON_TRIAL
            self._is_tried = False
        return self._state

    def may_take(self, now_ns: int) -> bool:
        """Whether a read may begin now."""
        if self._state is HealthState.UP:
            return True
        return self.state(now_ns) is HealthState.ON_TRIAL and not self._is_tried

    def take(self, now_ns: int) -> bool:
        """Begin a read; False when none may. Each is followed by one of the notes below."""
        if self._state is HealthState.UP:
            return True
        if not self.may_take(now_ns):
            return False
        self._is_tried = True
        return True

    def note_landed(self, now_ns: int) -> None:
        """A read gave its bytes, or said with reason that it has none."""
        if now_ns - self._at_ns > _DECAY_STEP_NS:
            self._decay(now_ns)
        self._landed += 1
        self._landed_ns = now_ns
        self._row = 0
        if self.is_up:
            return
        state = self.state(now_ns)
        if state is HealthState.ON_TRIAL:
            self._state = HealthState.UP
            self.is_up = True
            self._failed = 0.0
        elif state is HealthState.DOWN and self._is_silent:
            self._retry_ns = now_ns

    def note_failed(self, now_ns: int) -> None:
        """A read failed by the tier's fault. Those that were under way as it went down say nothing
        new."""
        self._decay(now_ns)
        state = self.state(now_ns)
        if state is HealthState.DOWN:
            return
        self._failed += 1
        self._row += 1
        most = self._limits.failures_max
        share = self._failed / (self._failed + self._landed)
        often = self._failed > most - 0.5 and share >= self._limits.failed_share_max
        if state is HealthState.ON_TRIAL or self._row >= most or often:
            self._trip(now_ns, is_silent=False)

    def note_stalled(self, began_ns: int, now_ns: int) -> None:
        """A read that began then has not ended, and should have long ago."""
        heard = self._landed_ns is not None and self._landed_ns >= began_ns
        state = self.state(now_ns)
        if heard and state is not HealthState.ON_TRIAL:
            self.note_failed(now_ns)
        elif state is not HealthState.DOWN:
            self._decay(now_ns)
            self._failed += 1
            self._trip(now_ns, is_silent=True)

    def note_nothing(self) -> None:
        """A read ended that tells nothing of the tier, as one that was cancelled: the next may be
        the trial."""
        self._is_tried = False

    def _trip(self, now_ns: int, *, is_silent: bool) -> None:
        limits = self._limits
        pause_s = min(limits.pause_s_max, limits.pause_s_min * 2 ** min(self._trips, 64.0))
        self._state = HealthState.DOWN
        self.is_up = False
        self._retry_ns = now_ns + round(pause_s * _NS)
        self._trips += 1
        self._row = 0
        self._is_silent = is_silent
        self._is_tried = False

    def _decay(self, now_ns: int) -> None:
        if now_ns > self._at_ns:
            kept = 0.5 ** ((now_ns - self._at_ns) / (self._limits.half_life_s * _NS))
            self._failed *= kept
            self._landed *= kept
            if self._state is HealthState.UP:
                self._trips *= kept
            self._at_ns = now_ns
