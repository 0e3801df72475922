"""Whether a store's metadata may be trusted, as `meta/running` says: it is there while a node runs,
with the id of the machine's start, and while names are rebuilt.

A start that fails leaves it as it was, so that what nobody changed is trusted also after a crash of
the machine.
"""

import logging
import os
from pathlib import Path

from kvfs.belonging import RUNNING
from kvfs.boot import boot_id
from kvfs.errors import OutOfSpace, Unavailable
from kvfs.meta.lmdb import DISTRUST_MARK, LmdbEngine, find_damage

log = logging.getLogger(__name__)
_REBUILDING = "rebuilding"


class Trust:
    """The mark of one start, which has the store's lock. `distrust`: why what lies there may not be
    trusted, in words for people; None when it may."""

    def __init__(self, meta: Path) -> None:
        self._meta = meta
        self._mark = meta / RUNNING
        said = self._mark.read_text("utf-8", "replace") if self._mark.exists() else None
        self._was_clean = said is None
        self._is_half = said == _REBUILDING
        self._is_rebuilding = False
        self._has_served = False
        self.distrust = self._find_distrust(said)

    def _find_distrust(self, said: str | None) -> str | None:
        if self._is_half:
            return "names were not all rebuilt"
        if said is not None and said != boot_id():
            return "the machine stopped while a node ran"
        if (self._meta / DISTRUST_MARK).exists():
            return "a page of the metadata is damaged"
        return find_damage(self._meta)

    def set_aside(self) -> None:
        """Keep the last database that was not trusted for a person to look at."""
        database = self._meta / "data.mdb"
        if self._is_half:  # which has nothing but what a rebuild put there
            database.unlink(missing_ok=True)
        elif database.exists():
            database.replace(self._meta / "data.mdb.distrusted")
        (self._meta / "lock.mdb").unlink(missing_ok=True)
        (self._meta / DISTRUST_MARK).unlink(missing_ok=True)

    def begin(self, *, is_rebuilding: bool) -> None:
        """Before the database is opened, and once more when a rebuild is over: one that is cut
        short begins again."""
        self._is_rebuilding = is_rebuilding
        self._write(_REBUILDING if is_rebuilding else boot_id())

    def served(self) -> None:
        """From now on a start has not failed."""
        self._has_served = True

    def settle(self, engine: LmdbEngine) -> None:
        """Before the database of a start that may have failed is closed: have it on the disk."""
        if self._has_served or self._is_rebuilding:
            return
        try:
            engine.sync()
        except (OutOfSpace, Unavailable) as error:
            log.warning("%s", error)
            self._was_clean = False
        else:
            self._was_clean = True

    def undo(self) -> None:
        """After that: a start that failed says nothing that was not so before it."""
        if self._was_clean and not self._has_served and not self._is_rebuilding:
            self.end()

    def end(self) -> None:
        """After a clean stop, with all on the disk."""
        self._mark.unlink(missing_ok=True)

    def _write(self, said: str) -> None:
        """On the disk, before anything else is written there."""
        fd = os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(said)
            file.flush()
            os.fsync(fd)
        directory = os.open(self._meta, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
