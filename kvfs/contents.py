"""The bytes of the blobs that are here: opened, checked, and given up where they are bad.

A blob that has lost its file, or has other bytes than its digest says, costs the names that show
it: a miss from then on. One that the disk cannot read keeps them, since another try may do.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence

from kvfs.blobs import BlobDirectory
from kvfs.checks import Checks
from kvfs.counters import Counters
from kvfs.errors import Corrupt, KvfsError, NamespaceError
from kvfs.meta.contract import Inode, MetaEngine
from kvfs.open_blobs import OpenBlobs

log = logging.getLogger(__name__)


class Contents:
    """Of one node, in its thread. `take_away(digest, directory)` removes what lies at a blob's
    place; `drop_lost` hears of names that have gone with their bytes."""

    def __init__(
        self,
        directories: Sequence[BlobDirectory | None],
        engine: MetaEngine,
        checks: Checks,
        counters: Counters,
        open_blobs: OpenBlobs,
        now_ns: Callable[[], int],
        take_away: Callable[[bytes, int], None],
        drop_lost: Callable[[Sequence[tuple[int, bytes, Inode]]], None],
    ) -> None:
        self._directories = directories
        self._meta = engine
        self._checks = checks
        self._counters = counters
        self._open_blobs = open_blobs
        self._now_ns = now_ns
        self._take_away = take_away
        self._drop_lost = drop_lost

    async def open_checked(self, inode: Inode) -> int:
        """A descriptor, after the first open of a blob has read it whole. See `Node.open_content`
        for what it raises."""
        await self.check(inode.digest)
        fd = self.open_unchecked(inode)
        if fd is not None and self._was_written_to(inode.digest, fd):
            os.close(fd)
            await self.check(inode.digest, again=True)
            fd = self.open_unchecked(inode)
        if fd is None:
            raise NamespaceError(errno.ENOENT)
        return fd

    def _was_written_to(self, digest: bytes, fd: int) -> bool:
        """Whether somebody wrote to a blob's file since it was checked, past the mount."""
        mtime_ns = os.fstat(fd).st_mtime_ns
        return digest not in self._open_blobs and self._checks.is_changed(digest, mtime_ns)

    def is_as_checked(self, inode: Inode, fd: int) -> bool:
        """Whether `open_checked` would find these bytes, of which this is a descriptor, without
        reading them: their file is there and as it was when it was checked. Never raises."""
        try:
            status = os.fstat(fd)
        except OSError as error:
            log.debug("blob %s: %s", inode.digest.hex(), error)
            return False
        if status.st_nlink == 0 or status.st_size != inode.size_bytes:
            return False
        if inode.digest in self._open_blobs:
            return True
        is_known = self._checks.is_known(inode.digest)
        return is_known and not self._checks.is_changed(inode.digest, status.st_mtime_ns)

    def open_inode(self, inode: Inode) -> int | None:
        """As `open_unchecked`, for who asks for many: what cannot be opened is a miss, told in the
        log, and keeps its names."""
        try:
            return self.open_unchecked(inode)
        except OSError as error:
            self._counters.open_misses += 1
            self.note_unreadable(inode.digest, error)
            return None

    def open_unchecked(self, inode: Inode) -> int | None:
        """A descriptor without a digest check, for those who check in their own buffer. A blob
        whose file is gone costs its names: a miss from then on, unless all of its directory has
        gone. OSError passes."""
        self._counters.opens += 1
        directory = self.directory_of(inode.digest)
        if directory is None:
            self._counters.open_misses += 1
            return None
        try:
            fd = directory.open_blob(inode.digest)
        except FileNotFoundError as error:
            self._counters.open_misses += 1
            self._note_missing(inode.digest, directory, error)
            return None
        try:
            is_whole = os.fstat(fd).st_size == inode.size_bytes
        except BaseException:
            os.close(fd)
            raise
        if not is_whole:
            os.close(fd)
            self._counters.open_misses += 1
            self.quarantine(inode.digest, "its file has the wrong length")
            return None
        return fd

    def _note_missing(self, digest: bytes, directory: BlobDirectory, error: OSError) -> None:
        if not directory.is_there():  # a disk that is not mounted costs no names
            self.note_unreadable(digest, error)
            return
        self._counters.missing_blobs += 1
        log.warning("blob %s has lost its file; what only it had loses its names", digest.hex())
        self._lose(digest)

    def open_blob(self, digest: bytes) -> int | None:
        """A descriptor of a blob that is here, whole and not open for writing; for a peer, which
        checks it. One whose file is gone is lost, so that nobody asks again. OSError passes."""
        blob = self._meta.blobs([digest])[0]
        directory = self._directories[blob.directory] if blob is not None else None
        if blob is None or directory is None or digest in self._open_blobs:
            return None
        try:
            return directory.open_blob(digest)
        except FileNotFoundError as error:
            self._note_missing(digest, directory, error)
            return None

    def directory_of(self, digest: bytes) -> BlobDirectory | None:
        """Where a blob in use lies; None also when that directory is not there."""
        blob = self._meta.blobs([digest])[0]
        return self._directories[blob.directory] if blob is not None else None

    def note_unreadable(self, digest: bytes, error: OSError) -> None:
        """Count a blob that the disk cannot read. One warning is enough for a disk that fails."""
        level = logging.INFO if self._counters.unreadable_blobs else logging.WARNING
        self._counters.unreadable_blobs += 1
        log.log(level, "blob %s cannot be read: %s", digest.hex(), error.strerror)

    def needs_check(self, digest: bytes) -> bool:
        """Whether a blob is here that was not read and found right since the start."""
        is_known = digest in self._open_blobs or self._checks.is_known(digest)
        return not is_known and self.directory_of(digest) is not None

    async def check(self, digest: bytes, *, again: bool = False) -> None:
        """Read a blob whole and compare its digest, once since the start unless `again`; readers
        of one blob share one check. Raises `Corrupt` after quarantining it; OSError passes."""
        if digest in self._open_blobs or (not again and self._checks.is_known(digest)):
            return
        directory = self.directory_of(digest)
        if directory is None:
            return
        path = directory.blob_path(digest)
        if not await self._checks.is_right(digest, path, again=again):
            self.quarantine(digest, "its bytes changed since they were stored")
            raise Corrupt(digest.hex(), "its bytes changed since they were stored; quarantined")

    def quarantine(self, digest: bytes, reason: str) -> None:
        """Move a bad blob aside and drop every name that points to it."""
        blob = self._meta.blobs([digest])[0]
        if blob is None or digest in self._open_blobs:
            return
        self._counters.corrupt_blobs += 1
        log.error("blob %s: %s; quarantined", digest.hex(), reason)
        directory = self._directories[blob.directory]
        if directory is not None:
            directory.quarantine(digest)
        self._lose(digest)

    def withdraw(self, digest: bytes, fd: int) -> None:
        """A file that was published as it is holds something else by now: if it still lies under
        its digest, it goes, with the names that show it. Never raises."""
        blob = self._meta.blobs([digest])[0]
        directory = self._directories[blob.directory] if blob is not None else None
        if blob is None or directory is None:
            return
        try:
            if _is_file(directory.blob_path(digest), fd):
                log.info("blob %s was written to after it was stored; withdrawn", digest.hex())
                self._take_away(digest, blob.directory)
                self._lose(digest)
        except (KvfsError, OSError) as error:
            log.warning("blob %s cannot be withdrawn: %s", digest.hex(), error)

    def _lose(self, digest: bytes) -> None:
        self._checks.forget(digest)
        self._drop_lost(self._meta.lose(digest, self._now_ns()))


def _is_file(path: str, fd: int) -> bool:
    """Whether a path is of an open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
