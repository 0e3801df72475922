"""Records of the metadata server that no node of ours wrote. Each is a miss: nothing is made of
what it says, and who gives its name a file anew writes over it."""

import logging

from kvfs.errors import Corrupt

log = logging.getLogger(__name__)


class Unreadable:
    """How many were met by this process. The first is said in the log."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, error: Corrupt) -> None:
        """One more."""
        if not self.count:
            log.warning(
                "the metadata server holds records that are not kvfs's: they count as missing (%s)",
                error,
            )
        self.count += 1


UNREADABLE = Unreadable()
