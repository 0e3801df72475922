"""What keeps a node from its metadata server: what `kvfs status` shows, and what the log says once.

Several things ask the server, and one may fail while another does not: a server that is full
answers questions and refuses leases. So each has a trouble of its own, and all must be over.
"""

import logging
from collections.abc import Callable

import trio

from kvfs.config import CLUSTER_SAID_S
from kvfs.errors import KvfsError

log = logging.getLogger(__name__)
_SAID_MAX = 16  # texts that are remembered


class Trouble:
    """See the module's docstring."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._now: dict[str, str] = {}  # what fails -> what it said last
        self._said_s: dict[str, float] = {}  # text -> when it was said
        self._is_told = False  # in the log, of what is now

    def __bool__(self) -> bool:
        return bool(self._now)

    def __contains__(self, what: str) -> bool:
        return what in self._now

    @property
    def reason(self) -> str:
        """What was said last; empty while all is well."""
        return next(reversed(self._now.values()), "")

    def begin(self, what: str, error: KvfsError) -> None:
        """It fails. The log has it where it has not had the same for a while."""
        text = str(error)
        is_new = self._now.pop(what, None) != text
        self._now[what] = text
        now_s = self._clock()
        if is_new and now_s - self._said_s.get(text, -CLUSTER_SAID_S) >= CLUSTER_SAID_S:
            log.warning("cut off from the cluster: %s", text)
            self._is_told = True
            self._said_s.pop(text, None)
            self._said_s[text] = now_s
            if len(self._said_s) > _SAID_MAX:
                del self._said_s[next(iter(self._said_s))]

    def end(self, what: str) -> None:
        """It does not fail any more."""
        if self._now.pop(what, None) is not None and not self._now and self._is_told:
            log.warning("the metadata server answers again")
            self._is_told = False
