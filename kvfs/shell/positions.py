"""Positions of prompts: the chunk files of one place, read from a node in batches, and ahead.

Chunk files of one place in a prompt, one for each KV group and shard, are one *position*; it is
complete when all are there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.inspect import PAGE_ITEMS, Directories
from kvfs.meta.contract import ChunkEntry, ChunkInfo
from kvfs.names import chunk_key, parse_key
from kvfs.shell.namespaces import Namespace, Part

CHILDREN_FIRST = 16  # children of each in its first answer; more come in pages
CHILDREN_MAX = 65_536  # of one position; beyond that the tree is cut
AHEAD_KEYS = 256  # whose children one request asks for, when there are so many
AHEAD_POSITIONS_MAX = 16_384  # read before they are asked for, about 1 KiB each
AHEAD_WAITING_MAX = 65_536  # whose children may be read ahead


class ChunkSource(Directories, Protocol):
    """The part of a client that reading trees of chunks takes."""

    def children(
        self, namespace: bytes, parent_key: bytes, after: int, limit: int
    ) -> Sequence[ChunkEntry]: ...

    def children_of(
        self, namespace: bytes, parent_keys: Sequence[bytes], limit: int
    ) -> Sequence[Sequence[ChunkEntry]]: ...

    def chunk(self, path: bytes) -> ChunkInfo | None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """One place in a prompt: the chunk files that hold it."""

    stem: bytes  # what its keys have in common: the engine's hash of the last block
    token_start: int
    token_end: int
    entries: tuple[ChunkEntry, ...]

    @property
    def parts(self) -> frozenset[Part]:
        return frozenset((entry.info.group, entry.info.shard) for entry in self.entries)

    @property
    def size_bytes(self) -> int:
        return sum(entry.inode.size_bytes for entry in self.entries)

    @property
    def created_ns(self) -> int:
        return max(entry.inode.mtime_ns for entry in self.entries)

    @property
    def used_ns(self) -> int:
        return max(entry.inode.used_ns for entry in self.entries)

    @property
    def is_pinned(self) -> bool:
        return any(entry.inode.pinned for entry in self.entries)


def read_positions(
    source: ChunkSource, space: Namespace, parents: Sequence[Sequence[bytes]]
) -> list[list[Position]]:
    """For each parent, given as the keys of its parts: the positions that continue it, the last
    used first."""
    keys = [key for parent in parents for key in parent]
    firsts = source.children_of(space.path, keys, CHILDREN_FIRST)
    found = (_read_rest(source, space, key, first) for key, first in zip(keys, firsts, strict=True))
    return [_merge(entry for _ in parent for entry in next(found)) for parent in parents]


def _read_rest(
    source: ChunkSource, space: Namespace, key: bytes, first: Sequence[ChunkEntry]
) -> Sequence[ChunkEntry]:
    if len(first) < CHILDREN_FIRST:
        return first
    found = list(first)
    page = first
    while page and len(found) < CHILDREN_MAX:
        page = source.children(space.path, key, page[-1].inode.ino, PAGE_ITEMS)
        found += page
    return found


def _merge(entries: Iterable[ChunkEntry]) -> list[Position]:
    places: dict[tuple[bytes, int, int], list[ChunkEntry]] = {}
    for entry in entries:
        info = entry.info
        parsed = parse_stem(info.key)
        if parsed is not None and parsed[1:] == (info.group, info.shard):
            place = (parsed[0], info.token_start, info.token_end)
            places.setdefault(place, []).append(entry)
    positions = [Position(*place, tuple(found)) for place, found in places.items()]
    positions.sort(key=lambda position: (-position.used_ns, position.token_end, position.stem))
    return positions


def parse_stem(key: bytes) -> tuple[bytes, int, int] | None:
    """A key's stem, group and shard; None for what is no key."""
    return parse_key(key.decode("ascii", "replace"))


def keys_of(stem: bytes, parts: Iterable[Part]) -> list[bytes]:
    """The keys of all chunk files that a position may have."""
    return [chunk_key(stem, group, shard).encode() for group, shard in parts]


class ReadAhead:
    """Children of positions, for who walks a tree from its start.

    Chains are long and a request costs as much as hundreds of children in it. So a request that
    must be made also asks for what the walk will want later, the nearest first. That is bounded;
    what was read too early is dropped, and read again.
    """

    def __init__(self, source: ChunkSource, space: Namespace, parts: Iterable[Part]) -> None:
        self._source = source
        self._space = space
        self._parts = sorted(parts)
        self._positions_at_once = max(1, AHEAD_KEYS // max(1, len(self._parts)))
        self._read: dict[bytes, list[Position]] = {}  # by the parent's stem, the nearest last
        self._read_positions = 0
        self._waiting: dict[bytes, None] = {}  # stems of parents, the nearest last

    def roots(self) -> list[Position]:
        """The positions that start a prompt."""
        (found,) = read_positions(self._source, self._space, [[b""]])
        self._expect([found])
        return found

    def after(self, stems: Sequence[bytes]) -> list[list[Position]]:
        """What continues each position, the last used first."""
        found = {stem: positions for stem in stems if (positions := self._take(stem)) is not None}
        missing = [stem for stem in dict.fromkeys(stems) if stem not in found]
        if missing:
            found.update(self._ask(missing))
        return [found[stem] for stem in stems]

    def keep(self, stem: bytes, positions: list[Position]) -> None:
        """Hold what continues a position, as far as there is room, until it is asked for."""
        self._read[stem] = positions
        self._read_positions += len(positions)
        while self._read_positions > AHEAD_POSITIONS_MAX:
            self._take(next(iter(self._read)))

    def _take(self, stem: bytes) -> list[Position] | None:
        positions = self._read.pop(stem, None)
        self._read_positions -= len(positions or ())
        return positions

    def _ask(self, missing: Sequence[bytes]) -> dict[bytes, list[Position]]:
        for stem in missing:
            self._waiting.pop(stem, None)
        count = min(len(self._waiting), max(0, self._positions_at_once - len(missing)))
        ahead = [self._waiting.popitem()[0] for _ in range(count)]
        parents = [keys_of(stem, self._parts) for stem in [*missing, *ahead]]
        found = read_positions(self._source, self._space, parents)
        for stem, positions in zip(ahead[::-1], found[: len(missing) - 1 : -1], strict=True):
            self.keep(stem, positions)
        self._expect(found)
        return dict(zip(missing, found, strict=False))

    def _expect(self, found: Sequence[Sequence[Position]]) -> None:
        """The walk will ask for what continues these, those that come first at first."""
        for positions in reversed(found):
            for position in reversed(positions):
                if position.stem not in self._read:
                    self._waiting.pop(position.stem, None)
                    self._waiting[position.stem] = None
        while len(self._waiting) > AHEAD_WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
