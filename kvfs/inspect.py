"""What the shell looks up in a namespace: trees of files and sums. It only asks.

Everything is read in pages and yielded as it comes, so that ten million files need no more memory
than ten. The namespace may change meanwhile: what vanished is left out, nothing is shown twice.
"""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvfs.config import PATH_BYTES_MAX
from kvfs.errors import InvalidInput, NamespaceError
from kvfs.meta.contract import DIGEST_BYTES, Blob, ChunkInfo, Entry, Inode
from kvfs.names import escape

PAGE_ITEMS = 1000


class Directories(Protocol):
    """The part of a client that listing names takes."""

    def stat(self, path: bytes) -> Inode | None: ...

    def entries(self, path: bytes, after: bytes, limit: int) -> Sequence[Entry]: ...


class Catalogue(Directories, Protocol):
    """What following names to their bytes takes besides."""

    def blobs(self, digests: Sequence[bytes]) -> Sequence[Blob | None]: ...


class FileCatalogue(Catalogue, Protocol):
    """What telling everything about one file takes besides."""

    def chunk(self, path: bytes) -> ChunkInfo | None: ...

    def paths_of(self, digest: bytes) -> Sequence[bytes]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A file or directory with its path from the root."""

    path: bytes
    inode: Inode


def find(directories: Directories, path: bytes) -> Found:
    """One path. Raises `NamespaceError` (ENOENT) when it is not there."""
    inode = directories.stat(path)
    if inode is None:
        raise NamespaceError(errno.ENOENT, b"/" + path)
    return Found(path, inode)


def list_directory(directories: Directories, path: bytes) -> Iterator[Entry]:
    """All names of a directory in byte order, whatever their number."""
    after = b""
    while True:
        page = directories.entries(path, after, PAGE_ITEMS)
        yield from page
        if len(page) < PAGE_ITEMS:
            return
        after = page[-1].name


def walk(directories: Directories, path: bytes) -> Iterator[Found]:
    """A path and everything below it: each directory before what it holds, names in byte order.
    What lies so deep that no path of `PATH_BYTES_MAX` names it is left out.

    Raises `NamespaceError` when `path` itself is not there.
    """
    top = find(directories, path)
    yield top
    if not top.inode.is_directory:
        return
    stack = [(path, list_directory(directories, path))]
    while stack:
        directory, entries = stack[-1]
        entry = _next_entry(entries)
        if entry is None:
            stack.pop()
            continue
        below = directory + b"/" + entry.name if directory else entry.name
        if len(below) > PATH_BYTES_MAX:
            continue
        yield Found(below, entry.inode)
        if entry.inode.is_directory:
            stack.append((below, list_directory(directories, below)))


def _next_entry(entries: Iterator[Entry]) -> Entry | None:
    """The next name, or None at the end and when the directory was removed meanwhile."""
    try:
        return next(entries, None)
    except NamespaceError:
        return None


# One file -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FileFacts:
    """All that the namespace knows of a file, and of who shares its bytes."""

    path: bytes
    inode: Inode
    blob: Blob | None
    chunk: ChunkInfo | None
    same_bytes: tuple[bytes, ...]  # other paths that show this digest


def parse_digest(text: str) -> bytes | None:
    """A digest from its 32 hexadecimal digits, None when the text is something else."""
    try:
        digest = bytes.fromhex(text) if len(text) == 2 * DIGEST_BYTES else b""
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def describe(catalogue: FileCatalogue, path: bytes, word: str) -> FileFacts:
    """Everything about one file, named by its path or, as `word`, by its digest.

    Raises `NamespaceError` (ENOENT) when neither is there.
    """
    inode = catalogue.stat(path)
    digest = parse_digest(word) if inode is None else inode.digest
    paths = sorted(catalogue.paths_of(digest)) if digest else []
    if inode is None and paths:
        path = paths[0]
        inode = catalogue.stat(path)
    if inode is None:
        raise NamespaceError(errno.ENOENT, b"/" + path)
    (blob,) = catalogue.blobs([inode.digest]) if inode.digest else (None,)
    chunk = catalogue.chunk(path) if inode.is_regular else None
    return FileFacts(path, inode, blob, chunk, tuple(other for other in paths if other != path))


# Sums ---------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Sum:
    """What lies in a directory and below it."""

    path: bytes
    files: int = 0
    size_bytes: int = 0  # as `ls` shows it: each file in full
    unique_bytes: int = 0  # each content once, where it was met first
    allocated_bytes: int = 0  # of these contents on disk

    def add(self, other: "Sum") -> None:
        self.files += other.files
        self.size_bytes += other.size_bytes
        self.unique_bytes += other.unique_bytes
        self.allocated_bytes += other.allocated_bytes


def disk_usage(catalogue: Catalogue, path: bytes, depth: int) -> Iterator[Sum]:
    """Sums of the directories down to `depth` below `path`, each after those that it holds.

    Only contents that several files share are remembered, to count them once.
    """
    summer = _Summer(catalogue)
    open_sums: list[Sum] = []
    files: list[Found] = []
    for found in walk(catalogue, path):
        level = _depth(found.path, path)
        is_new_sum = found.inode.is_directory and level <= depth
        if is_new_sum or len(files) >= PAGE_ITEMS or (open_sums and _left(open_sums, found.path)):
            summer.add_files(files, open_sums)
            files = []
        while open_sums and _left(open_sums, found.path):
            yield _close(open_sums)
        if is_new_sum or not open_sums:
            open_sums.append(Sum(found.path))
        if not found.inode.is_directory:
            files.append(found)
    summer.add_files(files, open_sums)
    while open_sums:
        yield _close(open_sums)


def _depth(path: bytes, top: bytes) -> int:
    if path == top:
        return 0
    return path.count(b"/") - (top.count(b"/") + 1 if top else 0) + 1


def _left(open_sums: list[Sum], path: bytes) -> bool:
    """Whether a path lies outside the innermost open directory."""
    inner = open_sums[-1].path
    return bool(inner) and not path.startswith(inner + b"/")


def _close(open_sums: list[Sum]) -> Sum:
    done = open_sums.pop()
    if open_sums:
        open_sums[-1].add(done)
    return done


@dataclass(slots=True)
class _Summer:
    catalogue: Catalogue
    shared: set[bytes] = field(default_factory=set)  # digests of several files, already counted
    linked: set[int] = field(default_factory=set)  # files of several names, already counted

    def add_files(self, files: Sequence[Found], open_sums: Sequence[Sum]) -> None:
        if not files:
            return
        digests = list({item.inode.digest for item in files if item.inode.digest})
        blobs = dict(zip(digests, self.catalogue.blobs(digests), strict=True)) if digests else {}
        total = open_sums[-1]
        for item in files:
            inode = item.inode
            if inode.nlink > 1 and inode.ino in self.linked:
                continue
            if inode.nlink > 1:
                self.linked.add(inode.ino)
            total.files += 1
            total.size_bytes += inode.size_bytes
            blob = blobs.get(inode.digest)
            if blob is None or blob.digest in self.shared:
                continue
            if blob.references > 1:
                self.shared.add(blob.digest)
            total.unique_bytes += blob.size_bytes
            total.allocated_bytes += blob.allocated_bytes


def files_below(catalogue: Catalogue, paths: Sequence[bytes]) -> Iterator[bytes]:
    """The published files that paths name: a file itself, of a directory all that it holds.

    Raises `NamespaceError` for a path that is not there, `InvalidInput` for one without content.
    """
    for path in paths:
        top = find(catalogue, path)
        if not top.inode.is_directory and not top.inode.is_published:
            raise InvalidInput(escape(path), "is no published file")
        for found in walk(catalogue, path):
            if found.inode.is_published:
                yield found.path
