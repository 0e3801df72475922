"""Tells the node of corrupt chunks, and of those that a tier has no more, apart from all loads.

The node reads such a chunk again, whole, to see for itself, which on a sick disk takes long. So
this has a thread and a connection of its own, and no buffer. A complaint that is dropped or not
answered costs little: the request recomputes the chunk, and what is recomputed replaces it.
"""

import logging
import threading

from kvfs.client import Client
from kvfs.config import READER_COMPLAINTS_MAX, TIERS_MAX
from kvfs.errors import KvfsError
from kvfs.workers import Workers

log = logging.getLogger(__name__)


class Complaints:
    """`complain` may be called from any thread and never blocks. Owns the client."""

    def __init__(self, client: Client, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s
        self._workers = Workers("kvfs-complain", 1)
        self._lock = threading.Lock()
        self._waiting: set[bytes | tuple[int, bytes]] = set()

    def complain(self, digest: bytes) -> None:
        """Have the node look at a blob, unless it is about to or too many wait."""
        if self._queue(digest):
            self._workers.start(self._report, digest)

    def note_gone(self, tier: int, digest: bytes) -> None:
        """Tell the node that a tier of its configuration has a blob no more; the same."""
        if tier < TIERS_MAX and self._queue((tier, digest)):
            self._workers.start(self._report_gone, tier, digest)

    def close(self) -> None:
        """Give up what is under way."""
        self._workers.close()
        self._client.close()

    def _queue(self, item: bytes | tuple[int, bytes]) -> bool:
        with self._lock:
            if item in self._waiting or len(self._waiting) >= READER_COMPLAINTS_MAX:
                return False
            self._waiting.add(item)
            return True

    def _report(self, digest: bytes) -> None:
        try:
            self._client.report_corrupt(digest, self._deadline_s)
        except KvfsError as error:
            log.warning("kvfs: the node did not look at corrupt blob %s: %s", digest.hex(), error)
        finally:
            with self._lock:
                self._waiting.discard(digest)

    def _report_gone(self, tier: int, digest: bytes) -> None:
        try:
            self._client.note_gone([(tier, digest)])
        except KvfsError as error:
            log.info("kvfs: the node still takes tier %d to have %s: %s", tier, digest.hex(), error)
        finally:
            with self._lock:
                self._waiting.discard((tier, digest))
