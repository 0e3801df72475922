"""How much room each store directory has: what lies there, what is being written, what is going.

The sum of these never exceeds `max_bytes`, and `min_free` of the file system stays free, as do some
of its inodes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.blobs import BlobDirectory
from kvfs.config import DIRECTORY_AVOIDED_S, FILES_MAX, PAGE_BYTES, whole_pages
from kvfs.meta.contract import Usage
from kvfs.stage import Stage
from kvfs.stored import allocated_bytes


@dataclass(frozen=True, slots=True)
class Statfs:
    """What statfs tells of the whole store."""

    capacity_bytes: int
    free_bytes: int
    files: int
    files_free: int


@dataclass(slots=True)
class _Load:
    reserved_bytes: int = 0  # staging files: what they hold or may grow to
    trash_bytes: int = 0  # taken away, not yet unlinked
    stuck_bytes: int = 0  # taken away, and can't be unlinked before the next start
    stages: set[Stage] = field(default_factory=set)
    on_disk_bytes: int = 0  # of the reserved ones, what the disk's own figures count already
    looked_s: float = 0.0  # when those were asked for
    avoided_until_s: float = 0.0  # no file could be made there


class Space:
    """The room of all directories of one node. An absent directory (None) has none."""

    def __init__(
        self,
        directories: Sequence[BlobDirectory | None],
        usage: Callable[[], Usage],
        meta_file: Path,
    ) -> None:
        self._directories = directories
        self._usage = usage
        self._meta_file = meta_file
        self._loads = [_Load() for _ in directories]

    def used_bytes(self, index: int) -> int:
        """All that `du` would count in a directory, plus what writers may still fill."""
        directory = self._directories[index]
        allocated = self._usage().allocated_bytes
        load = self._loads[index]
        used = load.reserved_bytes + load.trash_bytes + load.stuck_bytes
        used += allocated[index] if index < len(allocated) else 0
        used += directory.overhead_bytes() if directory is not None else 0
        return used + (self.meta_bytes() if index == 0 else 0)

    def meta_bytes(self) -> int:
        """The metadata file of the first directory, and one that was set aside."""
        total = 0
        for file in (self._meta_file, self._meta_file.with_suffix(".mdb.distrusted")):
            with contextlib.suppress(FileNotFoundError):
                total += allocated_bytes(os.stat(file))
        return total

    def statfs(self) -> Statfs:
        """Capacity and room of all directories together; never waits."""
        present = [d for d in self._directories if d is not None]
        capacity = free = 0
        for index, directory in enumerate(self._directories):
            if directory is not None:
                limit = directory.limit_bytes()
                capacity += directory.capacity_bytes() if limit is None else limit
                free += max(0, self.room_bytes(index))
        assert present
        inodes = self._usage().inodes
        return Statfs(capacity, min(free, capacity), FILES_MAX, max(0, FILES_MAX - inodes))

    def staging_bytes(self, index: int) -> int:
        return self._loads[index].reserved_bytes

    def trash_bytes(self, index: int) -> int:
        return self._loads[index].trash_bytes

    def room_bytes(self, index: int) -> int:
        """How much more fits without evicting; negative when too much is there already."""
        directory = self._directories[index]
        if directory is None:
            return 0
        spare_bytes = directory.free_bytes() - directory.min_free_bytes()
        room = spare_bytes - _unwritten_bytes(self._loads[index], directory.disk_seen_s)
        limit = directory.limit_bytes()
        return room if limit is None else min(room, limit - self.used_bytes(index))

    def short_bytes(self, index: int, extra_bytes: int) -> int:
        """How much has to go before so much more fits, and the disk has inodes for it: each that is
        missing counts as a blob of the mean size. At most 0: nothing."""
        short = extra_bytes - self.room_bytes(index)
        directory = self._directories[index]
        missing = 0 if directory is None else directory.missing_inodes()
        return max(short, missing * self._mean_blob_bytes()) if missing else short

    def _mean_blob_bytes(self) -> int:
        usage = self._usage()
        return max(PAGE_BYTES, sum(usage.allocated_bytes) // max(1, usage.blobs))

    def evictable_bytes(self, index: int) -> int:
        """How much more room there is when everything that is stored has gone."""
        allocated = self._usage().allocated_bytes
        stored = allocated[index] if index < len(allocated) else 0
        return stored + self._loads[index].trash_bytes

    def fits_ever(self, index: int, size_bytes: int) -> bool:
        """Whether a file of this size could be held by an otherwise empty directory."""
        directory = self._directories[index]
        if directory is None:
            return False
        limit = directory.limit_bytes()
        return size_bytes <= (directory.capacity_bytes() if limit is None else limit)

    def pick(self, size_bytes: int, tried: Collection[int] = ()) -> int | None:
        """The least busy directory but those that were tried, of equals the least filled, so that
        all devices get to read and write. One that has room comes first, then who may make some,
        and who is avoided only where there is no other."""
        indexes = (i for i in range(len(self._loads)) if i not in tried)
        candidates = [i for i in indexes if self.fits_ever(i, size_bytes)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        return min(candidates, key=lambda index: self._busyness(index, size_bytes))

    def _busyness(self, index: int, size_bytes: int) -> tuple[bool, bool, int, int]:
        load = self._loads[index]
        is_avoided = time.monotonic() < load.avoided_until_s
        has_no_room = self.short_bytes(index, size_bytes) > 0
        return is_avoided, has_no_room, len(load.stages), self.used_bytes(index)

    def avoid(self, index: int) -> bool:
        """No file could be made in a directory: pick others for a while. Whether that is news."""
        now_s, load = time.monotonic(), self._loads[index]
        is_new = load.avoided_until_s <= now_s
        load.avoided_until_s = now_s + DIRECTORY_AVOIDED_S
        return is_new

    def begin_stage(self, stage: Stage) -> None:
        """A stage is written; its descriptor, if it has one, stays open until `end_stage`."""
        assert stage.reserved_bytes == 0
        self._loads[stage.directory].stages.add(stage)

    def end_stage(self, stage: Stage) -> None:
        """A stage is a blob, or goes: its reservation ends."""
        load = self._loads[stage.directory]
        load.stages.remove(stage)
        load.reserved_bytes -= stage.reserved_bytes
        load.on_disk_bytes -= stage.on_disk_bytes

    def reserve(self, stage: Stage, size_bytes: int) -> None:
        """Count bytes more that a stage may fill, until its end."""
        assert size_bytes >= 0
        stage.reserved_bytes += size_bytes
        self._loads[stage.directory].reserved_bytes += size_bytes

    def fit(self, stage: Stage, size_bytes: int) -> None:
        """Give back what a stage has reserved beyond what it takes, since it is written."""
        spare_bytes = stage.reserved_bytes - whole_pages(size_bytes)
        load = self._loads[stage.directory]
        if spare_bytes > 0 and stage in load.stages:
            stage.reserved_bytes -= spare_bytes
            load.reserved_bytes -= spare_bytes
            self._count_on_disk(stage, min(stage.on_disk_bytes, stage.reserved_bytes))

    def note_cut(self, stage: Stage) -> None:
        """A stage may take less than it did, and grow again."""
        if stage in self._loads[stage.directory].stages:
            self._count_on_disk(stage, 0)

    def _count_on_disk(self, stage: Stage, size_bytes: int) -> None:
        self._loads[stage.directory].on_disk_bytes += size_bytes - stage.on_disk_bytes
        stage.on_disk_bytes = size_bytes

    def begin_trash(self, index: int, size_bytes: int) -> None:
        self._loads[index].trash_bytes += size_bytes

    def end_trash(self, index: int, size_bytes: int, *, is_removed: bool = True) -> None:
        self._loads[index].trash_bytes -= size_bytes
        directory = self._directories[index]
        if not is_removed:
            self._loads[index].stuck_bytes += size_bytes
        elif directory is not None:
            directory.note_freed()


def _unwritten_bytes(load: _Load, disk_seen_s: float) -> int:
    """How much writers may still take of what the disk said was free at that time."""
    if load.looked_s != disk_seen_s:
        load.looked_s, load.on_disk_bytes = disk_seen_s, 0
        for stage in load.stages:
            if stage.on_disk_bytes < stage.reserved_bytes and stage.fd >= 0:
                taken = allocated_bytes(os.fstat(stage.fd))
                stage.on_disk_bytes = min(stage.reserved_bytes, taken)
            load.on_disk_bytes += stage.on_disk_bytes
    return load.reserved_bytes - load.on_disk_bytes
