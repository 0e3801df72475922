"""Blobs under their digest in one directory, with staging and a quarantine beside them.

Blobs lie at `blobs/<hh>/<hh>/<digest>`. A staging file is in the same file system, so publishing is
one rename and nothing partial is ever under a digest. Staging names carry the id of who made them
and its run, so several may use one directory at the same time.

What is no regular file in a blob's place, and no directory in a fan-out directory's, is damage: it
counts as no blob, and goes to the quarantine when the place is needed.
"""

import errno
import itertools
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvfs.config import FOREIGN_SHOWN_MAX, QUARANTINE_BYTES_MAX, QUARANTINE_FILES_MAX
from kvfs.errors import Unavailable
from kvfs.home import FILE_KINDS
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.stored import allocated_bytes

log = logging.getLogger(__name__)

_NAMES_TRIED = 100  # for a new file, where others are in the way
_FANOUT_NAME = re.compile("[0-9a-f]{2}")
_BLOB_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


@dataclass(frozen=True, slots=True)
class StagingFile:
    """A private file that may become a blob. The descriptor is the caller's to close."""

    name: str
    fd: int


@dataclass(slots=True)
class Foreign:
    """What lies in a directory, and nobody who uses it made."""

    count: int = 0
    paths: list[str] = field(default_factory=list)  # the first of them

    def note(self, path: str) -> None:
        self.count += 1
        if self.count <= FOREIGN_SHOWN_MAX:
            self.paths.append(path)


class BlobFiles:
    """The files of one directory, which has `blobs`, `staging` and `quarantine`. Safe in several
    threads. OSError passes, where nothing else is said."""

    def __init__(
        self, root: str, owner_id: str, file_mode: int = 0o600, directory_mode: int = 0o700
    ) -> None:
        """`owner_id`: of who uses it, unlike that of all others who use it meanwhile. The modes of
        what is made here, less the umask."""
        self.quarantined_bytes = 0
        self._file_mode = file_mode
        self._directory_mode = directory_mode
        self._root = root
        self._owner_id = owner_id
        self._run = secrets.token_hex(4)
        self._serials = itertools.count(1)
        self._fanout_directories = 0
        self._leaves = bytearray(1 << 16)  # 1: is known to be there, by its digests' beginning
        self._thinned = bytearray(b"\1") * (1 << 16)  # 1: may be empty, as all may at first
        self._leaves_lock = threading.Lock()

    # Staging -------------------------------------------------------------------------------------
    def stage(self) -> StagingFile:
        """Make an empty private file, open for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_NAMES_TRIED):
            name = self._new_name()
            try:
                return StagingFile(name, os.open(self.stage_path(name), flags, self._file_mode))
            except FileExistsError:  # somebody else put it there
                continue
        raise Unavailable(f"{self._root}/staging has foreign files in the way: remove them")

    def link_stage(self, other: str) -> str:
        """The name of another staging file that is the same file as `other`."""
        name = self._new_name()
        os.link(self.stage_path(other), self.stage_path(name))
        return name

    def _new_name(self) -> str:
        return f"{self._owner_id}.{self._run}.{next(self._serials):x}"

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
        """Put a staging file under its digest, over a file that was there."""
        target = self.blob_path(digest)
        source = self.stage_path(name)
        self._clear_way(target)
        try:
            os.rename(source, target)
        except (FileNotFoundError, NotADirectoryError):
            self._make_leaf(os.path.dirname(target))
            os.rename(source, target)

    def lacks_leaf(self, digest: bytes) -> bool:
        """Whether the directory in which a blob will lie may be missing."""
        return not self._leaves[_leaf_of(digest)]

    def make_leaves(self, digests: Iterable[bytes]) -> None:
        """Make the directories in which blobs will lie, ahead of `adopt`, which would be slowed
        down. Blocks; safe in worker threads."""
        for digest in digests:
            if self.lacks_leaf(digest):
                self._make_leaf(os.path.dirname(self.blob_path(digest)))
                self._leaves[_leaf_of(digest)] = self._thinned[_leaf_of(digest)] = 1

    def _make_leaf(self, path: str) -> None:
        for directory in (os.path.dirname(path), path):
            self._make_directory(directory)

    def _make_directory(self, path: str) -> None:
        try:
            os.mkdir(path, self._directory_mode)
        except FileExistsError:
            try:
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    return
            except FileNotFoundError:  # it was empty and is removed: `adopt` makes it again
                return
            self._set_aside(path)
            os.mkdir(path, self._directory_mode)
        with self._leaves_lock:
            self._fanout_directories += 1

    def remove_empty_leaves(self, tries_max: int) -> bool:
        """Remove directories in which no blob lies any more; False when there may be others. Not
        while `adopt` runs in another thread."""
        for _ in range(tries_max):
            leaf = self._thinned.find(1)
            if leaf < 0:
                return True
            self._thinned[leaf] = 0
            try:
                os.rmdir(os.path.dirname(self.blob_path(leaf.to_bytes(2, "big"))))
            except OSError:  # it has blobs, or was never made
                continue
            self._leaves[leaf] = 0
            with self._leaves_lock:
                self._fanout_directories -= 1
        return False

    def _clear_way(self, path: str) -> bool:
        """Whether something else than a file was in a blob's place; it is in the quarantine now."""
        try:
            is_in_way = not stat.S_ISREG(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if is_in_way:
            self._set_aside(path)
        return is_in_way

    def _set_aside(self, path: str) -> None:
        """Move what is in the way to the quarantine: it may be somebody's."""
        name = f"{os.path.basename(path)}.{self._run}.way-{next(self._serials):x}"
        try:
            kind = FILE_KINDS[stat.S_IFMT(os.lstat(path).st_mode)]
            os.rename(path, f"{self._root}/quarantine/{name}")
        except FileNotFoundError:  # another thread was faster
            return
        log.warning("%s is %s in the way of a blob; moved to quarantine/%s", path, kind, name)

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
        path = self.stage_path(self._new_name())
        try:
            os.rename(self.blob_path(digest), path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._thinned[_leaf_of(digest)] = 1
        return path

    def remove(self, digest: bytes) -> None:
        """Remove a blob's file now. FileNotFoundError and others where there is none."""
        path = self.blob_path(digest)
        if not self._clear_way(path):
            os.unlink(path)
            self._thinned[_leaf_of(digest)] = 1

    def quarantine(self, digest: bytes) -> bool:
        """Move a bad blob aside for a person to look at; False when its file is gone."""
        path = f"{self._root}/quarantine/{digest.hex()}.{self._run}.{next(self._serials):x}"
        try:
            os.rename(self.blob_path(digest), path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._thinned[_leaf_of(digest)] = 1
        self.trim_quarantine()
        return True

    def scan(self, foreign: Foreign | None = None) -> Iterator[list[tuple[bytes, int]]]:
        """Every blob as (digest, size in bytes), in batches of one fan-out directory; slow. Those
        that come or go meanwhile may be among them or not. All else is noted in `foreign`."""
        for first in subdirectories(f"{self._root}/blobs", foreign):
            for second in subdirectories(first.path, foreign):
                prefix = first.name + second.name
                yield list(_scan_leaf(second.path, prefix, foreign))

    def trim_quarantine(self) -> None:
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
                remove_name(path)
            else:
                kept_bytes += allocated
        self.quarantined_bytes = kept_bytes

    def _quarantine_bound(self) -> int:
        return QUARANTINE_BYTES_MAX


def _leaf_of(digest: bytes) -> int:
    """The number of the fan-out directory in which a blob lies."""
    return digest[0] << 8 | digest[1]


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


def remove_name(path: str) -> bool:
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


def _scan_leaf(path: str, prefix: str, foreign: Foreign | None) -> Iterator[tuple[bytes, int]]:
    """The blobs in one directory, whose names begin with `prefix`; all else is noted."""
    try:
        found = os.scandir(path)
    except FileNotFoundError:  # it was empty, and removed just now
        return
    with found as items:
        for item in items:
            is_named = _BLOB_NAME.fullmatch(item.name) and item.name.startswith(prefix)
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:  # evicted just now
                continue
            if is_named and stat.S_ISREG(status.st_mode):
                yield bytes.fromhex(item.name), status.st_size
            elif foreign is not None:
                foreign.note(item.path)


def subdirectories(path: str, foreign: Foreign | None = None) -> list[os.DirEntry[str]]:
    """The fan-out directories below one, in order; all else, also links, is noted."""
    found = []
    with os.scandir(path) as items:
        for item in items:
            if _FANOUT_NAME.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
                found.append(item)
            elif foreign is not None:
                foreign.note(item.path)
    return sorted(found, key=lambda item: item.name)
