"""A directory as a tier: on tmpfs, a local disk, or a file system that many nodes share.

Blobs lie at `blobs/<hh>/<hh>/<digest>`, as in a store, but nobody owns the directory: any number of
nodes read and write at the same time. A blob is written under a name in `staging/` that carries the
node and its run, and renamed when it is whole; two nodes that put the same blob write the same
bytes. What has wrong bytes goes to `quarantine/`. `tier.json` says that this is a tier: when it is
gone, the file system is not mounted, and nothing is a miss.

**A shared file system may hang.** All that touches it runs on threads that their caller leaves at
its deadline (`kvfs.tiers.threads`), so bytes take one copy, through a piece of the thread's own.
Local directories are read by the caller itself, straight into its buffer (O_DIRECT where it works
and memory has not all of it): no copy, and no deadline while the kernel waits for the device to
give or take the next piece.
"""

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import xxhash

from kvfs.blob_files import BlobFiles, open_blob_file, remove_name
from kvfs.config import TIER_QUESTIONS_MAX, TIER_STAGING_LEFT_S, TIER_STUCK_MAX
from kvfs.errors import InvalidInput, OutOfSpace, TierTrouble
from kvfs.file_io import read_into, write_from
from kvfs.home import PART_MARK, PARTS, STORE_MARK, TIER_MARK, file_system_of
from kvfs.settings.sizes import least_free_bytes
from kvfs.settings.words import TierConfig, TierKind
from kvfs.tiers.contract import Capacity, Source, Use, WritableTier, check_time
from kvfs.tiers.sources import check_source, drawing, filled, reopen, slices
from kvfs.tiers.threads import Gate, Threads

TIER_VERSION = 1
_FILE_MODE = 0o660  # less the umask: engines of other users read here themselves
_DIRECTORY_MODE = 0o770
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # the last from NFS: removed by another node

Result = TypeVar("Result")


class DirectoryTier(WritableTier):
    """Blobs in a directory, which may have other users."""

    def __init__(self, config: TierConfig, node_id: str, *, must_exist: bool = False) -> None:
        """Open it; it is made when it is missing, unless it `must_exist`. `node_id`: of this node,
        unlike all others'. Raises `InvalidInput` for what cannot be a tier, and `TierTrouble`."""
        path = config.path
        assert path is not None
        super().__init__(config.name, config.kind, config.limits)
        self.path = path
        self._config = config
        self._files = BlobFiles(os.fspath(path), node_id, _FILE_MODE, _DIRECTORY_MODE)
        self._threads: Threads | None = None
        if config.kind is TierKind.SHARED:
            slots = config.limits.reads_max + config.limits.writes_max + TIER_QUESTIONS_MAX
            self._threads = Threads(config.name, slots + TIER_STUCK_MAX)
        end_s = time.monotonic() + config.limits.write_deadline_s
        try:
            self._apart(lambda: (_find if must_exist else _settle)(path, config.kind), end_s)
        except OSError as error:
            raise InvalidInput(str(path), f"cannot be a tier: {error.strerror}") from error

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    # Reading --------------------------------------------------------------------------------------
    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        if self._threads is None:
            return self._read_straight(digest, offset_bytes, buffer, end_s)
        gate = Gate(buffer)
        try:
            return self._threads.run(
                lambda: self._read_apart(digest, offset_bytes, len(buffer), gate, end_s), end_s
            )
        finally:
            gate.shut()

    def _read_straight(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        fd = self._open(digest, offset_bytes + len(buffer))
        if fd is None:
            return False
        try:
            self._read_exactly(fd, buffer, offset_bytes, end_s)
        finally:
            os.close(fd)
        return True

    def _read_apart(
        self, digest: bytes, offset_bytes: int, size_bytes: int, gate: Gate, end_s: float
    ) -> bool:
        fd = self._open(digest, offset_bytes + size_bytes)
        if fd is None:
            return False

        def draw(at: int, piece: memoryview) -> None:
            self._read_exactly(fd, piece, offset_bytes + at, end_s)

        assert self._threads is not None
        done = 0
        try:
            for piece in filled(size_bytes, draw, self._threads.memory):
                gate.fill(done, piece)
                done += len(piece)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        finally:
            os.close(fd)
        return True

    def open_here(self, digest: bytes) -> int | None:
        """A descriptor of a blob on a local disk or in memory, for the caller to close; None when
        it is not here. Raises `TierTrouble` and OSError."""
        assert self._threads is None
        return self._open(digest, 0)

    def _open(self, digest: bytes, least_bytes: int) -> int | None:
        """A descriptor of a blob that is at least so long; None when there is none."""
        try:
            fd = open_blob_file(self._files.blob_path(digest))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._check_mounted()
            return None
        if os.fstat(fd).st_size >= least_bytes:
            return fd
        os.close(fd)
        return None

    def _read_exactly(self, fd: int, memory: memoryview, at: int, end_s: float) -> None:
        def tell(_: memoryview) -> None:
            check_time(end_s, self.name)

        count = read_into(fd, memory, len(memory), tell, at)
        if count < len(memory):
            raise TierTrouble(self.name, "a blob became shorter while it was read")

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        return self._apart(lambda: self._sizes(digests), end_s)

    def _sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        sizes = [_size_of(self._files.blob_path(digest)) for digest in digests]
        if None in sizes:
            self._check_mounted()
        return sizes

    def _check_mounted(self) -> None:
        """Before anything is called a miss."""
        if not os.path.exists(self.path / TIER_MARK):
            raise TierTrouble(self.name, f"{self.path / TIER_MARK} is gone; is it mounted?")

    # Writing --------------------------------------------------------------------------------------
    def _put(self, digest: bytes, source: Source, size_bytes: int, end_s: float) -> None:
        if isinstance(source, int):
            fd = reopen(source)
            self._apart(
                lambda: self._write_file(digest, fd, size_bytes, end_s), end_s, lambda: os.close(fd)
            )
        elif self._threads is None:
            self._write(digest, slices(source), size_bytes, end_s)
        else:
            gate = Gate(source)
            try:
                pieces = filled(size_bytes, gate.draw, self._threads.memory)
                self._threads.run(lambda: self._write(digest, pieces, size_bytes, end_s), end_s)
            finally:
                gate.shut()

    def _write_file(self, digest: bytes, fd: int, size_bytes: int, end_s: float) -> None:
        try:
            self._write(digest, filled(size_bytes, drawing(fd, digest)), size_bytes, end_s)
        finally:
            os.close(fd)

    def _write(
        self, digest: bytes, pieces: Iterator[memoryview], size_bytes: int, end_s: float
    ) -> None:
        try:
            self._check_room(size_bytes)
            staged = self._files.stage()
            try:
                self._fill(staged.fd, digest, pieces, end_s)
                self._files.adopt(staged.name, digest)
            except BaseException:
                remove_name(self._files.stage_path(staged.name))
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"tier {self.name}: {error.strerror}") from error
            raise

    def _fill(self, fd: int, digest: bytes, pieces: Iterator[memoryview], end_s: float) -> None:
        """Write a staged file, and close it: a network file system may tell only then that it has
        not stored the bytes."""
        hashing = xxhash.xxh3_128()
        try:
            done = 0
            for piece in pieces:
                check_time(end_s, self.name)
                hashing.update(piece)
                write_from(fd, piece, done)
                done += len(piece)
            check_source(hashing.digest(), digest)
            if self._config.fsync or self.kind is TierKind.SHARED:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _check_room(self, size_bytes: int) -> None:
        room = self._room()
        least = least_free_bytes(self._config.min_free, room.total_bytes)
        if room.free_bytes - size_bytes < least:
            raise OutOfSpace(
                f"tier {self.name}: {size_bytes} bytes beside {least} that must stay free"
            )

    def _remove(self, digest: bytes, end_s: float) -> None:
        def work() -> None:
            try:
                self._files.remove(digest)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._check_mounted()

        self._apart(work, end_s)

    def _set_aside(self, digest: bytes, end_s: float) -> None:
        self._apart(lambda: self._files.quarantine(digest), end_s)

    def purge(self, deadline_s: float | None = None) -> int:
        """Remove what puts left in `staging/` that never ended, of whatever node; how many files.
        The clock is the file system's own."""
        with self._call(Use.WRITE, deadline_s) as (_, end_s):
            return self._apart(self._purge, end_s)

    def _purge(self) -> int:
        probe = self._files.stage()
        try:
            now_s = os.fstat(probe.fd).st_mtime
        finally:
            os.close(probe.fd)
            self._files.discard(probe.name)
        with os.scandir(self.path / "staging") as items:
            left = [item.path for item in items if _age_s(item, now_s) > TIER_STAGING_LEFT_S]
        return sum(remove_name(path) for path in left)

    # All of it ------------------------------------------------------------------------------------
    def _begin_scan(self) -> Callable[[float], list[tuple[bytes, int]] | None]:
        batches = self._files.scan()
        return lambda end_s: self._apart(lambda: next(batches, None), end_s)

    def _capacity(self, end_s: float) -> Capacity:
        return self._apart(self._room, end_s)

    def _room(self) -> Capacity:
        status = os.statvfs(self.path)
        return Capacity(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def _apart(
        self,
        work: Callable[[], Result],
        end_s: float,
        refused: Callable[[], None] | None = None,
    ) -> Result:
        """Do what may hang in a shared file system where the caller can leave it."""
        return work() if self._threads is None else self._threads.run(work, end_s, refused)


def _size_of(path: str) -> int | None:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _age_s(item: os.DirEntry[str], now_s: float) -> float:
    try:
        return now_s - item.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:  # published just now
        return 0.0


# A tier's directory -------------------------------------------------------------------------------
def _find(path: Path, kind: TierKind) -> None:
    """Raise `InvalidInput` for a directory that is no tier, whatever could be made of it."""
    mark = path / TIER_MARK
    if not mark.exists():
        raise InvalidInput(str(path), f"has no {TIER_MARK}; is it mounted here?")
    _check_mark(mark)


def _settle(path: Path, kind: TierKind) -> None:
    """Make a tier of a directory that is missing or empty; other nodes may do the same just now.
    Raises `InvalidInput` for any other that is none."""
    if not path.parent.is_dir():
        raise InvalidInput(str(path), f"cannot be made: {path.parent} is no directory")
    path.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    file_system = file_system_of(path)
    if file_system == "fuse.kvfs":
        raise InvalidInput(str(path), "lies in a mount of kvfs; name a directory on a disk")
    if kind is TierKind.MEMORY and file_system not in _MEMORY_FILE_SYSTEMS:
        raise InvalidInput(str(path), f"lies on {file_system}, not in memory; name one on tmpfs")
    if any((path / own).exists() for own in (STORE_MARK, PART_MARK)):
        raise InvalidInput(str(path), "is a store's own directory; name another one")
    mark = path / TIER_MARK
    complaint = _find_foreign(path)
    if mark.exists():  # looked at last: another node may have made it just now, and put blobs
        _check_mark(mark)
        return
    if complaint is not None:
        raise InvalidInput(str(path), complaint)
    for part in PARTS:
        (path / part).mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
    draft = path / f".{TIER_MARK}.{secrets.token_hex(4)}"
    draft.write_text(json.dumps({"version": TIER_VERSION}) + "\n", encoding="utf-8")
    os.rename(draft, mark)


def _find_foreign(path: Path) -> str | None:
    """Why a directory without a mark can become no tier; None when it can."""
    names = set(os.listdir(path))
    drafts = {name for name in names if name.startswith(f".{TIER_MARK}.")}
    if foreign := names - drafts - {*PARTS, TIER_MARK, "lost+found"}:
        return f"holds other files ({sorted(foreign)[0]}); name an empty directory"
    if "blobs" in names and os.listdir(path / "blobs"):
        return f'has lost its {TIER_MARK}; write {{"version": {TIER_VERSION}}} into it'
    return None


def _check_mark(mark: Path) -> None:
    text = mark.read_text(encoding="utf-8", errors="replace")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or "version" not in table:
        wrong = "has no version" if isinstance(table, dict) else "is no JSON object"
        raise InvalidInput(
            str(mark),
            f"{wrong if text.strip() else 'is empty'}; if this is your tier, write"
            f' {{"version": {TIER_VERSION}}} into it',
        )
    version = table["version"]
    if version != TIER_VERSION:
        raise InvalidInput(
            str(mark), f"is of version {version!r:.40}; this kvfs reads {TIER_VERSION}"
        )
