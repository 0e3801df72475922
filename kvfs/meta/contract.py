"""The metadata contract: what every engine promises, and the records it speaks in.

An engine holds the namespace (inodes and names), the blobs that the inodes point to, the chunk
records that make prefixes visible, and the order in which things were used. It does no file I/O on
blobs. Every method is one atomic transaction: it happens whole or, on an error, not at all. Methods
return in microseconds and are called from one thread.

Life of a regular file: `make` gives an inode without digest (*unpublished*: the mount shows it, no
client sees it, a restart drops it). `publish` gives it a digest. Publishing again replaces the
digest under the same inode. The last `unlink` makes it an *orphan* that lives until `forget`.

Life of a blob: `intend` (about to be renamed into place) -> `publish` (in use) -> no inode points
to it: *doomed* -> its file was removed: `bury`. `recover` finishes what a dead node left between.

Errors: `NamespaceError` with the errno that POSIX names for the same system call. Nothing else.
"""

import enum
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.meta.tier_contract import TierRecords
from kvfs.names import ChunkKeys

ROOT_INO = 1
DIGEST_BYTES = 16
AWAY = 2**16 - 1  # in place of a directory: the bytes are not here, but in tiers (`TierRecords`)


@dataclass(frozen=True, slots=True)
class Inode:
    """One file, directory, symbolic link or special file. Times are nanoseconds since the epoch."""

    ino: int
    mode: int  # type and permission bits, as in stat.st_mode
    uid: int
    gid: int
    nlink: int
    size_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int = 0
    digest: bytes = b""  # of a published regular file, else empty
    target: bytes = b""  # of a symbolic link
    used_ns: int = 0  # last use as the eviction order sees it
    pinned: bool = False

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_published(self) -> bool:
        return bool(self.digest)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory."""

    name: bytes
    inode: Inode


@dataclass(frozen=True, slots=True)
class HeldPath:
    """One path of a file, with what orders it among all of the same content."""

    ino: int
    parent: int
    name: bytes
    path: bytes  # from the root, without a leading slash


@dataclass(frozen=True, slots=True)
class Changes:
    """Attributes to set; None leaves one as it is."""

    mode: int | None = None  # permission bits only; the type never changes
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None  # of an unpublished file, as its staging file grows
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes under a digest, as one store directory holds them."""

    digest: bytes
    size_bytes: int
    allocated_bytes: int  # what `du` counts for the blob's file
    directory: int  # index of the store directory
    references: int = 0


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What the tree of prefixes needs to know of a chunk file without opening it."""

    key: bytes
    parent: bytes  # key of the chunk before, empty at the start of a prompt
    token_start: int
    token_end: int
    group: int
    shard: int
    tokens_digest: bytes  # xxh3_64 of the token ids as little-endian u32, empty when not stored


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A chunk record with the file that it describes."""

    info: ChunkInfo
    inode: Inode


@dataclass(frozen=True, slots=True)
class Publication:
    """New content for a file, named by exactly one of `ino` and `path`.

    By `ino`: the inode gets the digest (size, mtime, ctime change; ctime to `ctime_ns`, if that is
    given and nothing has changed it since). By `path`: missing parents are
    made (0o755, `uid`, `gid`) and a new inode takes the name, over whatever file held it, as by
    rename; the file it replaced loses that name. With `AWAY` as its directory a file is named
    whose bytes are in tiers only.
    """

    digest: bytes
    size_bytes: int
    allocated_bytes: int
    directory: int
    mtime_ns: int
    ino: int = 0
    path: bytes = b""
    mode: int = stat.S_IFREG | 0o644
    uid: int = 0
    gid: int = 0
    chunk: ChunkInfo | None = None
    ctime_ns: int = 0  # when the bytes came; 0: now
    is_open: bool = False  # somebody can still write to the file: on record until `bury`


@dataclass(frozen=True, slots=True)
class Published:
    """Where a publication went."""

    inode: Inode
    parent: int  # of the name, 0 when published by ino
    name: bytes
    replaced: Inode | None  # after it lost its name; an orphan when its nlink is 0


class RenameMode(enum.Enum):
    """What to do when the new name exists."""

    REPLACE = enum.auto()
    NO_REPLACE = enum.auto()
    EXCHANGE = enum.auto()


@dataclass(frozen=True, slots=True)
class Renamed:
    """What a rename did."""

    moved: Inode
    replaced: Inode | None  # after it lost its name; an orphan when its nlink is 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published file as eviction sees it."""

    ino: int
    used_ns: int
    digest: bytes
    directory: int  # of its blob
    allocated_bytes: int  # of its blob: freed when the last of `references` has gone
    references: int  # inodes that share the blob, this one included
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals, kept in the engine's own transactions, so that they survive any restart."""

    inodes: int
    blobs: int
    size_bytes: int  # of all blobs
    allocated_bytes: tuple[int, ...]  # of all blobs, not yet buried ones included, per directory


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a dead node left behind: remove the blob files that are in use by nobody, read those
    again that are open to change, then `bury` them all."""

    intended: tuple[tuple[bytes, int], ...]  # digest, directory: in place perhaps, in use by nobody
    open_blobs: tuple[tuple[bytes, int], ...]  # in use, and somebody could still write to them
    doomed: tuple[Blob, ...]
    dropped_inodes: int  # unpublished files and orphans


class MetaEngine(TierRecords, Protocol):
    """See the module's docstring. `now_ns` is always the caller's clock.

    A name that is empty, `.` or `..`, or holds `/` or NUL is EINVAL everywhere; one above
    `NAME_BYTES_MAX` is ENAMETOOLONG. An unknown `ino` or `parent` is ENOENT, a `parent` that is no
    directory ENOTDIR. What cannot be written for lack of room raises `OutOfSpace`, for another
    fault of the disk `Unavailable`; nothing has changed then.
    """

    identity: bytes  # of the tables that inode numbers are of: none made after them has it

    def close(self) -> None: ...

    # Reading -------------------------------------------------------------------------------------
    def inode(self, ino: int) -> Inode | None: ...

    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """Find one name. ENOTDIR when `parent` is no directory, ENOENT when it is gone."""
        ...

    def resolve(self, paths: Sequence[bytes]) -> list[Inode | None]:
        """Find many absolute or relative paths from the root at once, following no links.

        A missing part is None, never an error. 1,000 paths below a few directories take about 1 ms.
        """
        ...

    def sizes(self, paths: Sequence[bytes]) -> list[int | None]:
        """The size of each path that is a published regular file, else None.

        Cheaper than `resolve`: 1,000 paths below a few directories take less than 1 ms.
        """
        ...

    def chunk_sizes(self, namespace: bytes, keys: ChunkKeys) -> list[int | None]:
        """As `sizes`, of a model's chunks, by its directory and their keys. Fast, once `index_more`
        has read all names: 1,000 keys in well under 1 ms."""
        ...

    def index_more(self) -> bool:
        """Read some more names, for 3 ms, into what makes `chunk_sizes` fast; False once all are.
        Right answers do not wait for it."""
        ...

    def entries(self, parent: int, after: bytes, limit: int) -> list[Entry]:
        """List names greater than `after` in byte order, at most `limit`, so that a listing can
        resume while the directory changes and shows every name that stays exactly once."""
        ...

    def parent_of(self, ino: int) -> int:
        """The directory that holds a directory; the root holds itself."""
        ...

    def paths_of(self, ino: int) -> list[bytes]:
        """All paths of an inode from the root, without a leading slash; the root's is b""."""
        ...

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        """All (parent, name) of an inode; none for the root and for orphans."""
        ...

    # Names: each change is atomic, sets ctime/mtime of parents as POSIX says ---------------------
    def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Inode:
        """Make a file of the type in `mode`: directory, regular (unpublished), link, fifo, socket,
        device. EEXIST, ENOENT, ENOTDIR, ENAMETOOLONG. A setgid parent gives its group."""
        ...

    def make_directories(self, path: bytes, mode: int, uid: int, gid: int, now_ns: int) -> Inode:
        """Make a directory and what is missing above it; ENOTDIR when a file is in the way."""
        ...

    def link(self, ino: int, parent: int, name: bytes, now_ns: int) -> Inode: ...

    def unlink(self, parent: int, name: bytes, now_ns: int) -> Inode:
        """Remove a name; the inode afterwards (nlink 0: an orphan until `forget`). EISDIR."""
        ...

    def unlink_all(self, inos: Sequence[int], now_ns: int) -> list[tuple[int, bytes, Inode]]:
        """Remove every name of these files, as eviction does: (parent, name, inode afterwards) for
        each. They are orphans until `forget`. Directories and unknown inodes are left alone."""
        ...

    def rmdir(self, parent: int, name: bytes, now_ns: int) -> Inode:
        """Remove an empty directory; the inode as it was last, which is gone at once (nlink 0)."""
        ...

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        now_ns: int,
        mode: RenameMode = RenameMode.REPLACE,
    ) -> Renamed:
        """As renameat2: EINVAL into itself, ENOTEMPTY, EISDIR, ENOTDIR, EEXIST with NO_REPLACE.

        A file that is replaced is an orphan until `forget` when that was its last name; a directory
        that is replaced is gone at once. A chunk that moves goes to its new place's namespace.
        """
        ...

    def set_attributes(self, ino: int, changes: Changes, now_ns: int) -> Inode:
        """Change what `changes` names. EINVAL for a size of anything but an unpublished file."""
        ...

    # Content -------------------------------------------------------------------------------------
    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        """Blobs in use; a doomed one is None."""
        ...

    def held_paths(
        self, digest: bytes, after: tuple[int, int, bytes], limit: int
    ) -> list[HeldPath]:
        """Paths of the files whose content a digest is, in order of (ino, parent, name), those
        greater than `after`: a listing can resume, as one of `entries`."""
        ...

    def intend(self, blobs: Sequence[tuple[bytes, int]]) -> None:
        """Note (digest, directory) pairs that are about to be renamed into place."""
        ...

    def publish(self, publications: Sequence[Publication], now_ns: int) -> list[Published]:
        """Point names at contents, all in one transaction; clears the intents of these digests, but
        notes one for each that `is_open`.

        A digest that is in use already gains a reference and keeps its `directory`. A blob that
        loses its last reference is doomed; one that was doomed is in use again, where the
        publication says. EISDIR when a path names a directory, EINVAL for a digest that is none or
        is in use with another size, and for a chunk whose tokens do not run forward or whose key is
        empty or above 255 bytes. By `ino`, a new digest ends the chunk record of the old one.
        Counts as a use, ordered as in `touch`.
        """
        ...

    def relocate(self, digest: bytes, directory: int, allocated_bytes: int) -> None:
        """A new copy of a blob in use lies in `directory`, the old one is lost or not there: weight
        and eviction order follow it, names, pins and stamps stay. Clears the intents of the digest.
        ENOENT for a blob that is not in use."""
        ...

    def add_copy(self, publication: Publication) -> bool:
        """The bytes of a digest have come here from elsewhere, and lie where the publication says;
        False where no file holds it any more. Clears the intents of the digest."""
        ...

    def forget(self, inos: Sequence[int]) -> None:
        """Drop orphans, and unpublished files that have no name; others are left alone."""
        ...

    def doomed(self, limit: int) -> list[Blob]:
        """Blobs that nothing points to and whose files must go."""
        ...

    def bury(self, digests: Sequence[bytes]) -> None:
        """The files of these blobs are gone: a doomed one's weight is freed, and the intents of the
        others are cleared. Blobs in use stay as they are."""
        ...

    def lose(self, digest: bytes, now_ns: int) -> list[tuple[int, bytes, Inode]]:
        """A blob is corrupt or missing and its file has been moved away: every name that points to
        it goes, unless tiers have the bytes (`TierRecords`). Returns (parent, name, inode as it
        was) for each. The blob's weight is freed; the inodes are orphans without content until
        `forget`."""
        ...

    def recover(self) -> Recovery:
        """Drop unpublished inodes and orphans of a dead node; say which files are in question.

        What it says stays on record until `bury`. Takes as long as what is left, not as the store.
        """
        ...

    # Chunks --------------------------------------------------------------------------------------
    def set_chunk(self, ino: int, info: ChunkInfo) -> None:
        """Record that a published file is a chunk. Its namespace is the directory two above its
        first name. Gone with the file's last name. EINVAL as for `publish`."""
        ...

    def drop_chunk(self, ino: int) -> None:
        """Forget that a file is a chunk; one that is none is left alone."""
        ...

    def chunk(self, ino: int) -> ChunkInfo | None: ...

    def children(self, namespace: int, parent: bytes, after: int, limit: int) -> list[ChunkEntry]:
        """Chunks of the namespace directory that continue the chunk with key `parent` (b"": those
        that start a prompt), by inode number greater than `after`."""
        ...

    # Use and eviction ----------------------------------------------------------------------------
    def set_pinned(self, ino: int, pinned: bool) -> Inode: ...

    def coldest(
        self, limit: int, after: tuple[int, int] = (0, 0), directory: int | None = None
    ) -> list[Candidate]:
        """Published files with a name and without a pin, in order of (used_ns, ino), those greater
        than `after`; all, or those whose blob lies in one store directory."""
        ...

    def newest_used_ns(self) -> int:
        """The last stamp in the order of `coldest`, 0 when it is empty."""
        ...

    def continuations(self, ino: int, after: int, limit: int) -> list[Candidate]:
        """The cached chunks that continue a chunk and begin behind its beginning, by inode number
        greater than `after`, pinned ones included. None for a file that is no chunk. Follows no
        circle, since token positions only grow."""
        ...

    def restamp(self, stamps: Sequence[tuple[int, int]]) -> None:
        """Set (ino, used_ns), of a use or as eviction decided. Unknown inodes are ignored."""
        ...

    def usage(self) -> Usage: ...

    def sync(self) -> None:
        """Make everything so far durable against a crash of the machine. May block: call it from a
        worker thread."""
        ...
