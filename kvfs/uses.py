"""Which files were used last, on the way to the metadata.

To write each use down by itself costs as much as a fifth of a small file's open. So uses wait for a
moment, and are written together: when there are many, before anything is evicted, every few
seconds, and at the end. A crash loses those that wait; eviction then goes by the uses before.
"""

import logging
from collections.abc import Sequence

from kvfs.config import USES_WAITING_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import MetaEngine

log = logging.getLogger(__name__)


class Uses:
    """See the module's docstring."""

    def __init__(self, engine: MetaEngine) -> None:
        self._meta = engine
        self._waiting: dict[int, int] = {}  # inode number -> its newest stamp

    def note(self, inos: Sequence[int], stamp_ns: int) -> None:
        """Files are in use now, the first as the most recent."""
        for index, ino in enumerate(dict.fromkeys(inos)):
            self._waiting[ino] = stamp_ns - index
        if len(self._waiting) >= USES_WAITING_MAX:
            self.write()

    def forget(self, ino: int) -> None:
        """A file has a newer stamp already."""
        self._waiting.pop(ino, None)

    def write(self) -> None:
        """Write what waits; or not, where nothing can be written: a full disk keeps nobody from
        reading."""
        if not self._waiting:
            return
        stamps = list(self._waiting.items())
        self._waiting.clear()
        try:
            self._meta.restamp(stamps)
        except KvfsError as error:
            log.debug("%d uses are not noted: %s", len(stamps), error)
