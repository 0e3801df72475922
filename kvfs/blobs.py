"""One directory of a store: `kvfs.blob_files` with one owner, a limit, and what a crash left.

Staging names carry the store's id and the run of the node that made them: what another run left is
garbage, since a lock admits one run.

Crash cases: killed before the rename: a staging file of a dead run stays, and `purge_staging`
removes it. Killed after it: a blob that no metadata knows; the metadata's intents name it.
"""

import contextlib
import fcntl
import os
import time

from kvfs.blob_files import BlobFiles, Foreign, remove_name, subdirectories
from kvfs.config import DISK_FIGURES_S, FREE_INODES, PAGE_BYTES, QUARANTINE_BYTES_MAX
from kvfs.errors import InvalidInput, OwnedElsewhere
from kvfs.holder import describe_holder
from kvfs.home import PARTS, STORE_MARK, check_directory
from kvfs.mark import make_mark, read_mark
from kvfs.settings.sizes import Share, least_free_bytes
from kvfs.settings.words import DirectoryConfig
from kvfs.stored import digest_own_file

_KEPT_DOTS = 3  # in the second name of a staging file; its first has two
_FIXED_FILES = (
    10  # the store, its parts, meta with its lock (two pages), roster and mark; the store's mark
)


class BlobDirectory(BlobFiles):
    """The files of one store directory. Owned by one node at a time; the lock goes with `close`."""

    def __init__(self, config: DirectoryConfig, store_id: str, lock_fd: int) -> None:
        self.config = config
        self.path = config.path
        self.store_id = store_id
        super().__init__(os.fspath(config.path), store_id)
        self._lock_fd = lock_fd
        self._opened_ns = time.time_ns()
        self._fanout_directories = _count_fanout(f"{self._root}/blobs")
        self._place = _place_of(self._root)
        self._disk = os.statvfs(self._root)
        self.disk_seen_s = time.monotonic()  # another whenever the figures of the disk are
        self.trim_quarantine()

    @classmethod
    def open(cls, config: DirectoryConfig) -> "BlobDirectory":
        """Take a store directory, made if it is missing or empty.

        Raises `InvalidInput` for a directory that holds something else or another version, and
        `OwnedElsewhere` when another node owns it. Nothing is changed then.
        """
        path = config.path
        mark = path / STORE_MARK
        check_directory(path)
        if not mark.exists():
            make_mark(path)
        store_id = read_mark(path)
        lock_fd = os.open(mark, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in PARTS:
                (path / part).mkdir(mode=0o700, exist_ok=True)
        except BlockingIOError as error:
            os.close(lock_fd)
            raise OwnedElsewhere(path, describe_holder(path)) from error
        except OSError as error:
            os.close(lock_fd)
            raise InvalidInput(str(path), f"cannot be used: {error.strerror}") from error
        return cls(config, store_id, lock_fd)

    def close(self) -> None:
        """Give the directory up."""
        os.close(self._lock_fd)

    # Room ----------------------------------------------------------------------------------------
    def limit_bytes(self) -> int | None:
        """What may be used in all, or None when only `min_free` binds."""
        limit = self.config.max_bytes
        return int(limit.of_capacity * self.capacity_bytes()) if isinstance(limit, Share) else limit

    def min_free_bytes(self) -> int:
        """What must stay free on the file system."""
        return least_free_bytes(self.config.min_free, self.capacity_bytes())

    def capacity_bytes(self) -> int:
        return self._disk_now().f_blocks * self._disk.f_frsize

    def free_bytes(self) -> int:
        return self._disk_now().f_bavail * self._disk.f_frsize

    def missing_inodes(self) -> int:
        """How many the disk lacks of those that stay free for staging files and directories: 5% of
        all, at most `FREE_INODES`. 0 where the file system does not count them."""
        disk = self._disk_now()
        return max(0, min(FREE_INODES, disk.f_files // 20) - disk.f_favail)

    def _disk_now(self) -> os.statvfs_result:
        now_s = time.monotonic()
        if now_s - self.disk_seen_s > DISK_FIGURES_S:
            with contextlib.suppress(OSError):  # gone: who makes a file there is told
                self._disk = os.statvfs(self._root)
            self.disk_seen_s = now_s
        return self._disk

    def note_freed(self) -> None:
        """Something was removed: the figures of the disk are asked for anew."""
        self.disk_seen_s = -DISK_FIGURES_S

    def overhead_bytes(self) -> int:
        """What `du` counts beside blobs and staging: directories, quarantine, marks."""
        return self.fanout_bytes() + _FIXED_FILES * PAGE_BYTES + self.quarantined_bytes

    def fanout_bytes(self) -> int:
        """What the directories take in which blobs lie or lay."""
        return self._fanout_directories * PAGE_BYTES

    def is_there(self) -> bool:
        """Whether its disk is where it was when the directory was opened: blobs that are not found
        there are lost. Else they are missing until it is back."""
        try:
            return _place_of(self._root) == self._place
        except OSError:
            return False

    def has_blobs(self) -> bool:
        """Whether anything was ever stored here."""
        return self._fanout_directories > 0

    # Staging -------------------------------------------------------------------------------------
    def prepare(self, fd: int) -> bytes:
        """The digest of a staging file, whose blob has a directory to lie in then. Blocks; safe in
        worker threads."""
        digest = digest_own_file(fd)
        self.make_leaves([digest])
        return digest

    def purge_staging(self) -> int:
        """Remove what dead runs of this store left; how many files."""
        return sum(remove_name(item.path) for item in self._scan_dead_runs())

    def purge_foreign(self, left: Foreign) -> int:
        """Remove what somebody else put into staging before this run began; how much. A directory
        goes when it is empty; links are removed, never followed. What has content or is newer
        stays, and is noted."""
        removed = 0
        for item in self._scan_staging():
            if is_own(item, self.store_id):
                continue
            try:
                is_old = item.stat(follow_symlinks=False).st_ctime_ns < self._opened_ns
            except FileNotFoundError:
                continue
            if is_old and remove_name(item.path):
                removed += 1
            else:
                left.note(item.path)
        return removed

    def _scan_staging(self) -> list[os.DirEntry[str]]:
        with os.scandir(f"{self._root}/staging") as items:
            return sorted(items, key=lambda item: item.name)

    def kept_names(self) -> list[str]:
        """Second names that dead runs of this store gave to staging files (`kvfs.kept`)."""
        names = [item.name for item in self._scan_dead_runs()]
        return [name for name in names if name.count(".") == _KEPT_DOTS]

    def _scan_dead_runs(self) -> list[os.DirEntry[str]]:
        own = [item for item in self._scan_staging() if is_own(item, self.store_id)]
        return [item for item in own if item.name.split(".")[1] != self._run]

    def _quarantine_bound(self) -> int:
        limit = self.limit_bytes()
        return QUARANTINE_BYTES_MAX if limit is None else min(QUARANTINE_BYTES_MAX, limit // 16)


def _place_of(root: str) -> tuple[int, int]:
    status = os.stat(root)
    return status.st_dev, status.st_ino


def is_own(item: os.DirEntry[str], store_id: str) -> bool:
    """Whether nodes of a store make such things in its staging: files, of such names."""
    is_named = item.name.split(".")[0] == store_id and item.name.count(".") in (2, _KEPT_DOTS)
    return is_named and item.is_file(follow_symlinks=False)


def _count_fanout(path: str) -> int:
    """How many directories `blobs` holds, by their link counts where the file system keeps them."""
    count = 0
    for first in subdirectories(path):
        links = first.stat().st_nlink
        count += 1 + (links - 2 if links >= 2 else len(subdirectories(first.path)))
    return count
