"""One directory of a store: private staging files, blobs under their digest, a quarantine.

Blobs lie at `blobs/<hh>/<hh>/<digest>`. A staging file is in the same file system, so publishing is
one rename and nothing partial is ever under a digest. Staging names carry the store's id and the
run of the node that made them: what another run left is garbage, since a lock admits one run.

What is no regular file in a blob's place, and no directory in a fan-out directory's, is damage: it
counts as no blob, and goes to the quarantine when the place is needed.

Crash cases: killed before the rename: a staging file of a dead run stays, and `purge_staging`
removes it. Killed after it: a blob that no metadata knows; the metadata's intents name it.
"""

import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvfs.config import (
    GIB,
    PAGE_BYTES,
    QUARANTINE_BYTES_MAX,
    QUARANTINE_FILES_MAX,
    DirectoryConfig,
    Share,
)
from kvfs.errors import InvalidInput, OwnedElsewhere
from kvfs.home import PARTS, STORE_MARK, check_directory
from kvfs.mark import make_mark, read_mark
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.stored import allocated_bytes

log = logging.getLogger(__name__)

_FANOUT_NAME = re.compile("[0-9a-f]{2}")
_BLOB_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_FIXED_FILES = (
    10  # the store, its parts, meta with its lock (two pages), roster and mark; the store's mark
)


@dataclass(frozen=True, slots=True)
class StagingFile:
    """A private file that may become a blob. The descriptor is the caller's to close."""

    name: str
    fd: int


@dataclass(slots=True)
class Purged:
    """What became of names in staging that no node of this store gave."""

    removed: int = 0
    left: list[str] = field(default_factory=list)  # paths


class BlobDirectory:
    """The files of one store directory. Owned by one node at a time; the lock goes with `close`."""

    def __init__(self, config: DirectoryConfig, store_id: str, lock_fd: int) -> None:
        self.config = config
        self.path = config.path
        self.store_id = store_id
        self.quarantined_bytes = 0
        self._lock_fd = lock_fd
        self._run = secrets.token_hex(4)
        self._opened_ns = time.time_ns()
        self._aside = itertools.count(1)
        self._serial = 0
        self._root = os.fspath(config.path)
        self._fanout_directories = _count_fanout(f"{self._root}/blobs")
        self._leaves: set[bytes] = set()  # those known to be there, by their digests' beginning
        self._leaves_lock = threading.Lock()
        self._trim_quarantine()

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
            raise OwnedElsewhere(path) from error
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
        match self.config.min_free:
            case None:
                return min(GIB, self.capacity_bytes() // 20)
            case Share(of_capacity):
                return int(of_capacity * self.capacity_bytes())
            case fixed:
                return fixed

    def capacity_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_blocks * status.f_frsize

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def overhead_bytes(self) -> int:
        """What `du` counts beside blobs and staging: directories, quarantine, marks."""
        return (self._fanout_directories + _FIXED_FILES) * PAGE_BYTES + self.quarantined_bytes

    def has_blobs(self) -> bool:
        """Whether anything was ever stored here."""
        return self._fanout_directories > 0

    # Staging -------------------------------------------------------------------------------------
    def stage(self) -> StagingFile:
        """Make an empty private file, open for reading and writing."""
        self._serial += 1
        name = f"{self.store_id}.{self._run}.{self._serial:x}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.stage_path(name), flags, 0o600)
        return StagingFile(name, fd)

    def stage_path(self, name: str) -> str:
        """Where a staging file lies."""
        return f"{self._root}/staging/{name}"

    def discard(self, name: str) -> None:
        """Remove a staging file; one that is gone is fine."""
        try:
            os.unlink(self.stage_path(name))
        except FileNotFoundError:
            pass

    def adopt(self, name: str, digest: bytes) -> None:
        """Put a staging file under its digest, over what was there."""
        target = self.blob_path(digest)
        source = self.stage_path(name)
        try:
            os.rename(source, target)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._make_leaf(os.path.dirname(target))
            self._clear_way(target)
            os.rename(source, target)

    def lacks_leaf(self, digest: bytes) -> bool:
        """Whether the directory in which a blob will lie may be missing."""
        return digest[:2] not in self._leaves

    def make_leaves(self, digests: Iterable[bytes]) -> None:
        """Make the directories in which blobs will lie, ahead of `adopt`, which would be slowed
        down. Blocks; safe in worker threads."""
        for digest in digests:
            if self.lacks_leaf(digest):
                self._make_leaf(os.path.dirname(self.blob_path(digest)))
                self._leaves.add(digest[:2])

    def _make_leaf(self, path: str) -> None:
        for directory in (os.path.dirname(path), path):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                if os.path.isdir(directory):
                    continue
                self._set_aside(directory)
                os.mkdir(directory, 0o700)
            with self._leaves_lock:
                self._fanout_directories += 1

    def _clear_way(self, path: str) -> bool:
        """Whether there was a directory in a blob's place, which is in the quarantine now."""
        try:
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if is_directory:
            self._set_aside(path)
        return is_directory

    def _set_aside(self, path: str) -> None:
        """Move what is in the way to the quarantine: it may be somebody's."""
        name = f"{os.path.basename(path)}.{self._run}.way-{next(self._aside):x}"
        log.warning("%s is in the way of a blob; moved to quarantine/%s", path, name)
        try:
            os.rename(path, f"{self._root}/quarantine/{name}")
        except FileNotFoundError:  # another thread was faster
            pass

    def purge_staging(self) -> int:
        """Remove what dead runs of this store left; how many files."""
        return sum(
            _remove(item.path)
            for item in self._scan_staging()
            if self._is_own(item.name) and item.name.split(".")[1] != self._run
        )

    def purge_foreign(self) -> Purged:
        """Remove what somebody else put into staging before this run began. A directory goes when
        it is empty; links are removed, never followed. What has content or is newer stays."""
        purged = Purged()
        for item in self._scan_staging():
            if self._is_own(item.name):
                continue
            try:
                is_old = item.stat(follow_symlinks=False).st_ctime_ns < self._opened_ns
            except FileNotFoundError:
                continue
            if is_old and _remove(item.path):
                purged.removed += 1
            else:
                purged.left.append(item.path)
        return purged

    def _scan_staging(self) -> list[os.DirEntry[str]]:
        with os.scandir(f"{self._root}/staging") as items:
            return sorted(items, key=lambda item: item.name)

    def _is_own(self, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == self.store_id and len(parts) == 3

    # Blobs ---------------------------------------------------------------------------------------
    def blob_path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._root}/blobs/{name[:2]}/{name[2:4]}/{name}"

    def open_blob(self, digest: bytes) -> int:
        """A new read-only descriptor. FileNotFoundError when the blob is not here."""
        return open_blob_file(self.blob_path(digest))

    def has_blob(self, digest: bytes, size_bytes: int) -> bool:
        """Whether a regular file of a size is in a blob's place."""
        try:
            status = os.lstat(self.blob_path(digest))
        except OSError:  # gone, or not to be read
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes

    def trash(self, digest: bytes) -> str | None:
        """Take a blob's file out of the way at once; its new path, to unlink at leisure. None for
        no file."""
        if self._clear_way(self.blob_path(digest)):
            return None
        self._serial += 1
        path = f"{self._root}/staging/{self.store_id}.{self._run}.{self._serial:x}"
        try:
            os.rename(self.blob_path(digest), path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return path

    def quarantine(self, digest: bytes) -> bool:
        """Move a bad blob aside for a person to look at; False when its file is gone."""
        self._serial += 1
        path = f"{self._root}/quarantine/{digest.hex()}.{self._run}.{self._serial:x}"
        try:
            os.rename(self.blob_path(digest), path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._trim_quarantine()
        return True

    def scan(self) -> Iterator[list[tuple[bytes, int]]]:
        """Every blob as (digest, size in bytes), in batches of one fan-out directory; slow. Those
        that come or go meanwhile may be among them or not."""
        for first in _subdirectories(f"{self._root}/blobs"):
            for second in _subdirectories(first.path):
                prefix = first.name + second.name
                yield list(_scan_leaf(second.path, prefix))

    def _trim_quarantine(self) -> None:
        """Keep the newest bad files within their bounds."""
        with os.scandir(f"{self._root}/quarantine") as items:
            looked_at = [(item.path, item.stat(follow_symlinks=False)) for item in items]
        found = sorted((status.st_ctime_ns, path, status) for path, status in looked_at)
        kept_bytes = 0
        for position, (_, path, status) in enumerate(reversed(found)):
            allocated = allocated_bytes(status)
            if (
                position >= QUARANTINE_FILES_MAX
                or kept_bytes + allocated > self._quarantine_bound()
            ):
                _remove(path)
            else:
                kept_bytes += allocated
        self.quarantined_bytes = kept_bytes

    def _quarantine_bound(self) -> int:
        limit = self.limit_bytes()
        return QUARANTINE_BYTES_MAX if limit is None else min(QUARANTINE_BYTES_MAX, limit // 16)


def open_blob_file(path: str) -> int:
    """A read-only descriptor of a regular file. What somebody put in its place is taken for no
    file (FileNotFoundError), and never waited for."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        # A symbolic link; a socket; a file where its directory was.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise FileNotFoundError(errno.ENOENT, "is no regular file", path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "is no regular file", path)
    return fd


def _remove(path: str) -> bool:
    """Remove a name that is no directory with content; False when it stays."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        try:
            os.rmdir(path)
        except OSError:
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
        return False
    return True


def _scan_leaf(path: str, prefix: str) -> Iterator[tuple[bytes, int]]:
    """The blobs in one directory, whose names begin with `prefix`."""
    with os.scandir(path) as items:
        for item in items:
            if not _BLOB_NAME.fullmatch(item.name) or not item.name.startswith(prefix):
                continue
            try:
                size_bytes = item.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # evicted just now
                continue
            yield bytes.fromhex(item.name), size_bytes


def _subdirectories(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as items:
        found = [i for i in items if _FANOUT_NAME.fullmatch(i.name) and os.path.isdir(i.path)]
    return sorted(found, key=lambda item: item.name)


def _count_fanout(path: str) -> int:
    """How many directories `blobs` holds, by their link counts where the file system keeps them."""
    count = 0
    for first in _subdirectories(path):
        links = first.stat().st_nlink
        count += 1 + (links - 2 if links >= 2 else len(_subdirectories(first.path)))
    return count
