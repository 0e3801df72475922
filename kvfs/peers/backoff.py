"""How a client leaves a peer alone that does not answer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvfs.config import PeerLimits
from kvfs.errors import Unavailable
from kvfs.peers.gone import PeerGone


class Backoff:
    """After a failure nobody asks for a while, then one caller does; each failure doubles the
    while. Safe in several threads."""

    def __init__(self, limits: PeerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: it answered the last time
        self._quiet_until_s = 0.0
        self._is_probed = False  # one caller asks now, for all

    @contextmanager
    def asking(self, who: object, deadline_s: float) -> Iterator[None]:
        """The frame of a question to the peer, which is named in errors: notes how it went. Raises
        `Unavailable` while the peer is left alone."""
        wait_s = self.refusal_s(deadline_s)
        if wait_s is not None:
            raise Unavailable(f"{who}: did not answer; it is asked again in {wait_s:.1f} s")
        try:
            yield
        except PeerGone:
            self.note_failure()
            raise
        except BaseException:
            self.note_other()
            raise
        self.note_answer()

    def refusal_s(self, deadline_s: float) -> float | None:
        """None for a caller who may ask; else how long it is until one may. Of those who may after
        a failure, the first asks for all, and has `deadline_s` for it."""
        with self._lock:
            if not self._pause_s:
                return None
            now_s = self._clock()
            if now_s < self._quiet_until_s:
                return self._quiet_until_s - now_s
            self._quiet_until_s = now_s + deadline_s
            self._is_probed = True
            return None

    def note_failure(self) -> None:
        """The peer gave no answer. Of calls that fail together, one counts."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._quiet_until_s and not self._is_probed:
                return
            limits = self._limits
            self._pause_s = min(limits.backoff_s_max, max(limits.backoff_s_min, 2 * self._pause_s))
            self._quiet_until_s = now_s + self._pause_s
            self._is_probed = False

    def note_other(self) -> None:
        """The peer was found neither well nor failing: who comes next may ask."""
        with self._lock:
            if self._is_probed:
                self._quiet_until_s = 0.0
                self._is_probed = False

    def note_answer(self) -> None:
        """It serves."""
        with self._lock:
            self._pause_s = self._quiet_until_s = 0.0
            self._is_probed = False
