"""Bringing many files to a node's store: what `kvfs warm` does, in batches.

The node brings them. It answers after a moment with how far it is, so that progress shows and no
request takes long, and a window of files is always on its way.
"""

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.config import WARM_WINDOW_BYTES, WARM_WINDOW_FILES
from kvfs.errors import InvalidInput
from kvfs.inspect import PAGE_ITEMS, Catalogue, Found, find, walk
from kvfs.names import escape


class Warmth(enum.IntEnum):
    """How near a file's bytes are."""

    GONE = 0  # there is no published file of that name
    HERE = 1
    BROUGHT = 2  # here, and were not when this was asked
    COMING = 3
    MISSING = 4  # nobody gives them


class Warmer(Catalogue, Protocol):
    """What warming files takes besides."""

    def is_here(self, digests: Sequence[bytes]) -> Sequence[bool]: ...

    def warm(self, paths: Sequence[bytes]) -> Sequence[Warmth]: ...


@dataclass(frozen=True, slots=True)
class Warmed:
    """A file that is here now, or that cannot be had. `was_away`: it was not here before.
    `was_brought`: its bytes came for it, and not for another that has the same."""

    path: bytes
    size_bytes: int
    is_here: bool
    was_away: bool
    was_brought: bool


def files_to_warm(catalogue: Catalogue, paths: Sequence[bytes]) -> Iterator[Found]:
    """The published files that paths name: a file itself, of a directory all that it holds.

    Raises `NamespaceError` for a path that is not there, `InvalidInput` for one without content.
    """
    for path in paths:
        top = find(catalogue, path)
        if not top.inode.is_directory and not top.inode.is_published:
            raise InvalidInput(escape(path), "is no published file")
        yield from (found for found in walk(catalogue, path) if found.inode.is_published)


def measure_away(warmer: Warmer, paths: Sequence[bytes]) -> int:
    """The bytes of those files that are not here; of equal ones, those of each. Raises as
    `files_to_warm`."""
    away_bytes = 0
    files = files_to_warm(warmer, paths)
    while page := list(itertools.islice(files, PAGE_ITEMS)):
        here = warmer.is_here([found.inode.digest for found in page])
        for found, is_here in zip(page, here, strict=True):
            away_bytes += 0 if is_here else found.inode.size_bytes
    return away_bytes


def warm_files(warmer: Warmer, paths: Sequence[bytes]) -> Iterator[Warmed]:
    """Bring every file that paths name, about in their order. What went meanwhile is left out.
    Raises as `files_to_warm`."""
    files = files_to_warm(warmer, paths)
    window = _Window()
    while window.fill(files):
        asked = list(window.files.values())
        answers = list(zip(asked, warmer.warm([one.found.path for one in asked]), strict=True))
        for one, warmth in answers:
            if warmth in (Warmth.COMING, Warmth.BROUGHT):
                window.note_coming(one)
        for one, warmth in answers:
            if warmth is Warmth.COMING:
                continue
            was_first = window.take(one)
            if warmth is not Warmth.GONE:
                is_here = warmth is not Warmth.MISSING
                yield Warmed(
                    one.found.path,
                    one.found.inode.size_bytes,
                    is_here,
                    one.was_coming or not is_here,
                    is_here and was_first,
                )


@dataclass(slots=True)
class _Asked:
    found: Found
    was_coming: bool = False


class _Window:
    """Files that are asked for and not settled yet."""

    def __init__(self) -> None:
        self.files: dict[bytes, _Asked] = {}  # by path
        self._firsts: dict[bytes, bytes] = {}  # digest -> the first path that it comes for
        self._size_bytes = 0

    def fill(self, files: Iterator[Found]) -> bool:
        """Take further files while there is room; whether there is anything."""
        while len(self.files) < WARM_WINDOW_FILES and self._size_bytes < WARM_WINDOW_BYTES:
            found = next(files, None)
            if found is None:
                break
            if found.path not in self.files:
                self.files[found.path] = _Asked(found)
                self._size_bytes += found.inode.size_bytes
        return bool(self.files)

    def note_coming(self, one: _Asked) -> None:
        """A file's bytes are on their way."""
        one.was_coming = True
        self._firsts.setdefault(one.found.inode.digest, one.found.path)

    def take(self, one: _Asked) -> bool:
        """Take a file out; whether its bytes came for it."""
        path, digest = one.found.path, one.found.inode.digest
        del self.files[path]
        self._size_bytes -= one.found.inode.size_bytes
        was_first = self._firsts.get(digest) == path
        if was_first:
            del self._firsts[digest]
        return was_first
