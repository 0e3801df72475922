"""How large every chunk file is, in so little memory that a batch look-up waits for none.

A thousand probes of a B-tree, or of a dict with names in it, each wait several times for memory.
Here a file is one row of 24 bytes: two words made of its directory and key, and its size plus one.
A batch is a few operations of numpy over all of its keys.

The two words stand for the name. Of different names of block hashes one in 2^64 is taken for
missing or for another; whoever needs to know more opens the file, as every reader does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfs.config import CHUNK_INDEX_ROWS_MIN
from kvfs.names import CHUNK_SUFFIX, ChunkKeys, parse_key

_Words = npt.NDArray[np.uint64]
_Slots = npt.NDArray[np.int64]

_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(32)
_BUCKET = 8  # slots: what one line of a processor's cache holds of first words
_FILLED_MAX = 0.5  # of a table's slots: beyond, many buckets are full
_GROWTH = 3  # a further table has so many times the slots of all before


class ChunkIndex:
    """Sizes by directory and key. Room that removed files leave is used again; where there is none,
    a larger table is added, so that no call ever moves what is there."""

    def __init__(self, expected: int = 0) -> None:
        self._tables = [_Table(max(CHUNK_INDEX_ROWS_MIN, int(expected / _FILLED_MAX)))]

    def __len__(self) -> int:
        return sum(table.filled for table in self._tables)

    def sizes(self, leaves: Sequence[int], keys: ChunkKeys) -> list[int | None]:
        """The size of each file, None where there is none. `leaves`: the inode number of the
        directory of the keys that begin with each of the 256 bytes."""
        hashes = np.frombuffer(keys.hashes, np.uint8).reshape(-1, keys.hash_bytes)
        parents = np.array(leaves, np.uint64)[hashes[:, 0]]
        parts = np.array([_part_word(*part) for part in keys.parts], np.uint64)
        repeats = len(parts)
        wanted = _pairs(
            np.repeat(hashes, repeats, axis=0),
            np.repeat(parents, repeats),
            np.tile(parts, len(hashes)),
        )
        found = np.zeros(len(wanted.first), np.uint64)
        for table in self._tables:
            slots = table.find(wanted)
            is_here = slots >= 0
            found[is_here] = table.sizes[slots[is_here]]
        return [size - 1 if size else None for size in found.tolist()]

    def change(self, entries: Iterable[tuple[int, bytes, int]]) -> None:
        """Take note of directory entries: number of the directory, name, and size plus one, or 0
        for one that is not there. Each name once; those that are no chunk's are ignored."""
        by_length: dict[int, tuple[list[bytes], list[int], list[int], list[int]]] = {}
        for parent, name, size_field in entries:
            key = parse_key(name.removesuffix(CHUNK_SUFFIX).decode("ascii", "replace"))
            if key is not None and name.endswith(CHUNK_SUFFIX):
                block_hash, group, shard = key
                hashes, parents, parts, sizes = by_length.setdefault(
                    len(block_hash), ([], [], [], [])
                )
                hashes.append(block_hash)
                parents.append(parent)
                parts.append(_part_word(group, shard))
                sizes.append(size_field)
        for hash_bytes, (hashes, *columns) in by_length.items():
            joined = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, hash_bytes)
            parent_words, part_words, fields = (np.array(c, np.uint64) for c in columns)
            self._put(_pairs(joined, parent_words, part_words), fields)

    def _put(self, pairs: "_Pairs", sizes: _Words) -> None:
        is_new = sizes != 0
        for table in self._tables:
            slots = table.find(pairs)
            is_here = slots >= 0
            table.sizes[slots[is_here]] = sizes[is_here]
            table.remove(pairs.those(is_here & (sizes == 0)))
            is_new &= ~is_here
        pairs, sizes = pairs.those(is_new), sizes[is_new]
        for table in self._tables:
            taken = table.insert(pairs, sizes)
            pairs, sizes = pairs.those(slice(taken, None)), sizes[taken:]
        while len(sizes):
            slots_before = sum(len(table.sizes) for table in self._tables)
            self._tables.append(_Table(_GROWTH * slots_before))
            taken = self._tables[-1].insert(pairs, sizes)
            pairs, sizes = pairs.those(slice(taken, None)), sizes[taken:]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The two words of each of many keys; the first is never 0."""

    first: _Words
    second: _Words

    def those(self, chosen: "npt.NDArray[np.bool_] | slice") -> "_Pairs":
        return _Pairs(self.first[chosen], self.second[chosen])


class _Table:
    """Buckets of eight slots, filled from their first; a first word of 0 is an empty slot. What
    finds its bucket full goes to the next: a key lies only behind full buckets, from its own on."""

    def __init__(self, slots: int) -> None:
        size = 1 << (max(slots, _BUCKET) - 1).bit_length()
        self.first = np.zeros((size // _BUCKET, _BUCKET), np.uint64)
        self.second = np.zeros(size, np.uint64)
        self.sizes = np.zeros(size, np.uint64)
        self.filled = 0
        self._mask = size // _BUCKET - 1

    def find(self, pairs: _Pairs) -> _Slots:
        """The slot of each, -1 where it is not here."""
        buckets, first, second = self._homes(pairs), pairs.first, pairs.second
        found = np.full(len(buckets), -1, np.int64)
        pending = np.arange(len(buckets))
        while len(pending):
            words = self.first.take(buckets, axis=0)
            slots = buckets * _BUCKET + (words == first[:, np.newaxis]).argmax(axis=1)
            is_first = self.first.ravel().take(slots) == first
            is_same = is_first & (self.second.take(slots) == second)
            found[pending] = np.where(is_same, slots, -1)
            is_left = ~is_first & (words[:, -1] != 0)
            pending, first, second = pending[is_left], first[is_left], second[is_left]
            buckets = (buckets[is_left] + 1) & self._mask
        return found

    def insert(self, pairs: _Pairs, sizes: _Words) -> int:
        """Take rows that are nowhere yet, the first so many that there is room for."""
        taken = min(len(sizes), max(0, int(len(self.sizes) * _FILLED_MAX) - self.filled))
        pairs, sizes = pairs.those(slice(taken)), sizes[:taken]
        buckets = self._homes(pairs)
        words = self.first.ravel()
        while len(buckets):
            is_free = self.first.take(buckets, axis=0) == 0
            is_full = ~is_free[:, -1]
            slots = (buckets * _BUCKET + is_free.argmax(axis=1))[~is_full]
            words[slots] = pairs.first[~is_full]  # of two for one slot, the last stays
            self.second[slots] = pairs.second[~is_full]
            self.sizes[slots] = sizes[~is_full]
            is_left = is_full.copy()
            is_left[~is_full] = (words[slots] != pairs.first[~is_full]) | (
                self.second[slots] != pairs.second[~is_full]
            )
            buckets = ((buckets + is_full) & self._mask)[is_left]
            pairs, sizes = pairs.those(is_left), sizes[is_left]
        self.filled += taken
        return taken

    def remove(self, pairs: _Pairs) -> None:
        """Take these out, which are all here. Where a full bucket gets room, a key that had found
        it full comes back into it."""
        for index in range(len(pairs.first)):
            [slot] = self.find(pairs.those(slice(index, index + 1))).tolist()
            bucket = slot // _BUCKET
            was_full = self._empty(slot)
            behind = bucket
            while was_full:
                behind = (behind + 1) & self._mask
                is_full = bool(self.first[behind, -1])
                moved = self._passed(behind, bucket)
                if moved is not None:
                    self._move(moved, bucket * _BUCKET + _BUCKET - 1)
                    self._empty(moved)
                    bucket = behind
                was_full = is_full
            self.filled -= 1

    def _passed(self, bucket: int, gap: int) -> int | None:
        """The slot of a key in a bucket that had passed, or begun at, `gap`."""
        for at, word in enumerate(self.first[bucket].tolist()):
            home = word & self._mask
            if word and (bucket - home) & self._mask >= (bucket - gap) & self._mask:
                return bucket * _BUCKET + at
        return None

    def _empty(self, slot: int) -> bool:
        """Empty a slot, by the last one of its bucket; whether the bucket was full."""
        row = self.first[slot // _BUCKET]
        was_full = bool(row[-1])
        last = slot // _BUCKET * _BUCKET + int(np.count_nonzero(row)) - 1
        self._move(last, slot)
        self.first.ravel()[last] = 0
        return was_full

    def _move(self, source: int, target: int) -> None:
        words = self.first.ravel()
        words[target] = words[source]
        self.second[target] = self.second[source]
        self.sizes[target] = self.sizes[source]

    def _homes(self, pairs: _Pairs) -> _Slots:
        return (pairs.first & np.uint64(self._mask)).astype(np.int64)


def _part_word(group: int, shard: int) -> int:
    return group << 32 | shard


def _pairs(hashes: "npt.NDArray[np.uint8]", parents: _Words, parts: _Words) -> _Pairs:
    """Two words for each key: its block hash, directory and part, folded by multiplication."""
    count, hash_bytes = hashes.shape
    padded = np.zeros((count, -(-hash_bytes // 8) * 8), np.uint8)
    padded[:, :hash_bytes] = hashes
    words = (parents, parts, *np.ascontiguousarray(padded.view("<u8").T))
    first, second = (_fold(words, hash_bytes, multiplier) for multiplier in _MULTIPLIERS)
    first[first == 0] = 1
    return _Pairs(first, second)


def _fold(words: Iterable[_Words], start: int, multiplier: np.uint64) -> _Words:
    folded = np.array([start], np.uint64)
    for word in words:
        folded = (folded ^ word) * multiplier
        folded ^= folded >> _SHIFT
    return folded
