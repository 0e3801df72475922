"""Blobs whose file somebody can still write to, without this process seeing it.

The kernel writes into a staged file by itself where a mount lets it (`mount.through`). Such a file
is published when it is closed, but who closed it may have another descriptor of it. Until the last
one has gone its blob is *open*: its bytes may stop being those of its digest at any moment, which
is nobody's fault. So nothing else is stored by pointing at it (an equal file that comes takes its
place), it is not checked or quarantined, and its record keeps an intent, by which a start after a
crash knows which blobs to read again.

The intents of a few that ended are cleared together: a transaction for each would keep its writer's
next request waiting. A crash before that has the next start read those again as well.
"""

import logging
from collections import Counter

from kvfs.config import OPEN_BLOBS_ENDED_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import MetaEngine

log = logging.getLogger(__name__)


class OpenBlobs:
    """The open blobs of a node, by digest, each counted as often as it was begun."""

    def __init__(self, engine: MetaEngine) -> None:
        self._meta = engine
        self._open: Counter[bytes] = Counter()
        self._ended: list[bytes] = []  # and still on record as open

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._open

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, digest: bytes) -> None:
        """A file that somebody can write to lies under a digest."""
        self._open[digest] += 1

    def end(self, digest: bytes) -> None:
        """Pairs with `begin`: nobody can write to it any more."""
        self._open[digest] -= 1
        if self._open[digest]:
            return
        del self._open[digest]
        self._ended.append(digest)
        if len(self._ended) >= OPEN_BLOBS_ENDED_MAX:
            self.write()

    def write(self) -> None:
        """Take what has ended off the record."""
        ended = [digest for digest in self._ended if digest not in self._open]
        self._ended.clear()
        if not ended:
            return
        try:
            self._meta.bury(ended)
        except KvfsError as error:  # then the next start reads them again
            log.debug("%d blobs stay on record as open: %s", len(ended), error)
