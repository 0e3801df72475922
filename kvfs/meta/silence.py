"""How the server of a cluster's names is left alone when it does not answer.

The node's one thread waits for each answer, and nobody is served meanwhile. So it asks a server
that was silent less and less often, and again at once when one of the threads that wait for news
and renew the lease has heard it.
"""

import time
from collections.abc import Callable

from kvfs.config import CLUSTER_BACKOFF_S, CLUSTER_BACKOFF_S_MAX
from kvfs.errors import Unavailable


class Silence:
    """What is known of it; each value is written in one step, so that threads need no lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0  # 0: it answered the last time
        self._until_s = 0.0
        self._reason = ""

    def check(self) -> None:
        """Raise `Unavailable` while the server is left alone."""
        if self._pause_s and self._clock() < self._until_s:
            raise Unavailable(self._reason)

    def note_failure(self, error: Unavailable) -> None:
        """It gave no answer, or will not have this node."""
        self._reason = str(error)
        self._pause_s = min(CLUSTER_BACKOFF_S_MAX, max(CLUSTER_BACKOFF_S, 2 * self._pause_s))
        self._until_s = self._clock() + self._pause_s

    def note_answer(self) -> None:
        """Somebody heard it."""
        self._pause_s = 0.0
