"""Tiers that gave wrong bytes look at what they have, off the threads that read."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvfs.config import TRANSFER_RECHECKS_MAX
from kvfs.errors import KvfsError
from kvfs.tiers.contract import Tier

log = logging.getLogger(__name__)


class Rechecks:
    """A thread for each tier that has something to look at, as long as it has. `note_gone` is told
    what a tier had wrong and took away, or has no more."""

    def __init__(self, note_gone: Callable[[int, bytes], None]) -> None:
        self._note_gone = note_gone
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._is_closed = False
        self._waiting: dict[int, deque[tuple[Tier, bytes]]] = {}  # by tier; there while it works

    def add(self, number: int, tier: Tier, digest: bytes) -> None:
        """Have a tier look at a blob. What there is no room for is left to the next who reads it
        there."""
        with self._lock:
            if self._is_closed:
                return
            waiting = self._waiting.get(number)
            if waiting is None:
                waiting = self._waiting[number] = deque()
                name = f"kvfs-recheck-{tier.name}"
                threading.Thread(target=self._run, args=(number,), name=name, daemon=True).start()
            if len(waiting) < TRANSFER_RECHECKS_MAX and (tier, digest) not in waiting:
                waiting.append((tier, digest))

    def close(self, deadline_s: float) -> bool:
        """Begin with nothing more; whether what is under way has ended by then."""
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting.values():
                waiting.clear()
            return self._ended.wait_for(lambda: not self._waiting, deadline_s)

    def _run(self, number: int) -> None:
        while True:
            with self._lock:
                waiting = self._waiting[number]
                if not waiting:
                    del self._waiting[number]
                    self._ended.notify_all()
                    return
                tier, digest = waiting.popleft()
            self._look(number, tier, digest)

    def _look(self, number: int, tier: Tier, digest: bytes) -> None:
        try:
            is_right = tier.recheck(digest)
        except KvfsError as error:
            log.warning("kvfs: tier %s gave wrong bytes for %s: %s", tier.name, digest.hex(), error)
            return
        except Exception:
            # The edge of this thread: a tier that does not keep its contract is asked on.
            log.exception("kvfs: tier %s looks at its blobs in an unforeseen way", tier.name)
            return
        if is_right:
            log.warning(
                "kvfs: tier %s gave wrong bytes for %s, but has the right ones: its disk, memory or"
                " way to here may be at fault", tier.name, digest.hex(),
            )  # fmt: skip
        else:
            log.warning("kvfs: tier %s had wrong bytes for %s", tier.name, digest.hex())
            self._note_gone(number, digest)
