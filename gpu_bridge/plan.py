"""Block tables to chunks and back: which chunks are a hit, and which blocks each of them fills.

Pure. Tokens, chunks and blocks are counted from the start of the request; a range excludes its end.
A block id 0 is the engine's null block: nothing was kept there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfs.config import BRIDGE_CHUNK_TOKENS
from kvfs.errors import InvalidInput
from kvfs.names import ChunkKeys

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A set of layers with one block table. `window_tokens`: how many tokens before a position its
    layers read at most; None means all of them."""

    index: int
    block_tokens: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """How an engine cuts a request. `hash_tokens`: tokens per prefix hash; `shards`: ranks that
    each hold a part of every chunk."""

    chunk_tokens: int
    hash_tokens: int
    groups: tuple[Group, ...]
    shards: int

    @property
    def has_windows(self) -> bool:
        return any(group.window_tokens is not None for group in self.groups)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One group's part of a run of tokens. `parent`: the hash of the run before, or empty."""

    hash: bytes
    parent: bytes
    token_start: int
    token_end: int
    group: int


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """A chunk to read. Its block number `rows[i]` goes to the engine's block `block_ids[i]`."""

    chunk: Chunk
    rows: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkSave:
    """A chunk to write from the engine's blocks. `is_replacing`: write it although it is there."""

    job: int
    chunk: Chunk
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...] | None
    is_replacing: bool


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """All that one request loads."""

    request_id: str
    chunks: tuple[ChunkLoad, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where chunks of a model lie, and what their headers say of it."""

    namespace: bytes
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a worker does in one engine step.

    `fenced`: saves whose blocks this step will write; they are copied or given up before it.
    `held`: finished requests whose blocks the engine keeps until these saves were copied.
    `is_idle`: nothing is computed in this step.
    """

    place: Place | None = None
    loads: tuple[RequestLoad, ...] = ()
    saves: tuple[ChunkSave, ...] = ()
    fenced: tuple[int, ...] = ()
    held: tuple[tuple[str, tuple[int, ...]], ...] = ()
    is_idle: bool = False


def resolve_chunk_tokens(wanted: int | None, block_tokens: Sequence[int]) -> int:
    """Tokens per chunk: `wanted`, or the usual size rounded up to whole blocks of every group.
    Raises `InvalidInput` when `wanted` cuts a block."""
    unit = math.lcm(*block_tokens)
    if wanted is None:
        return _round_up(BRIDGE_CHUNK_TOKENS, unit)
    if wanted % unit:
        raise InvalidInput(
            "kvfs.chunk_tokens",
            f"{wanted} is no multiple of the engine's block size, {unit} tokens;"
            f" write {_round_up(wanted, unit)}",
        )
    return wanted


def chunk_hash(geometry: Geometry, hashes: Sequence[bytes], index: int) -> bytes:
    """The prefix hash that names chunk `index`: that of its last block."""
    return hashes[(index + 1) * geometry.chunk_tokens // geometry.hash_tokens - 1]


def hashed_chunks(geometry: Geometry, hashes: Sequence[bytes]) -> int:
    """How many chunks the hashes reach."""
    return len(hashes) * geometry.hash_tokens // geometry.chunk_tokens


def chunk_keys(geometry: Geometry, chunk_hashes: Sequence[bytes]) -> ChunkKeys:
    """The keys of chunks, for each chunk all groups, for each group all shards."""
    parts = [(group.index, shard) for group in geometry.groups for shard in range(geometry.shards)]
    return ChunkKeys(b"".join(chunk_hashes), len(chunk_hashes[0]), tuple(parts))


def presence(geometry: Geometry, found: Sequence[bool]) -> list[tuple[bool, ...]]:
    """Fold an answer in the order of `chunk_keys`: for each chunk, which groups are whole, which
    means that every shard is there."""
    parts = len(geometry.groups) * geometry.shards
    return [
        tuple(
            all(found[start + first : start + first + geometry.shards])
            for first in range(0, parts, geometry.shards)
        )
        for start in range(0, len(found), parts)
    ]


def hit_end(
    geometry: Geometry, present: Sequence[Sequence[bool]], local_tokens: int, tokens: int
) -> int:
    """Up to which token a request can be served: `local_tokens`, which the engine has itself, or
    the end of a chunk behind them, at most `tokens`.

    Groups that read everything need every chunk from `local_tokens` on; a group with a window only
    those that its window touches at the end of the hit.
    """
    first = local_tokens // geometry.chunk_tokens
    # The engine computes a hit's last token again when nothing is left to compute: a window then
    # begins one token earlier than the loaded blocks may. So something must be left.
    reach = min(len(present), (tokens - geometry.has_windows) // geometry.chunk_tokens)
    everything = [i for i, group in enumerate(geometry.groups) if group.window_tokens is None]
    end = first
    while end < reach and all(present[end][i] for i in everything):
        end += 1
    while end > first and not _windows_present(geometry, present, first, end):
        end -= 1
    return max(local_tokens, end * geometry.chunk_tokens)


def _windows_present(
    geometry: Geometry, present: Sequence[Sequence[bool]], first: int, end: int
) -> bool:
    end_token = end * geometry.chunk_tokens
    return all(
        present[index][i]
        for i, group in enumerate(geometry.groups)
        if group.window_tokens is not None
        for index in range(
            max(first, max(0, end_token - group.window_tokens + 1) // geometry.chunk_tokens), end
        )
    )


def plan_load(
    geometry: Geometry,
    hashes: Sequence[bytes],
    block_tables: Mapping[int, Sequence[int]],
    token_start: int,
    token_end: int,
) -> tuple[ChunkLoad, ...]:
    """The reads that fill the blocks of a range of tokens, in the order of the tokens.

    `block_tables` holds each group's blocks from the start of the request. Null blocks get nothing.
    """
    loads = []
    size = geometry.chunk_tokens
    for index in range(token_start // size, -(-token_end // size)):
        for group in geometry.groups:
            table = block_tables[group.index]
            first = index * size // group.block_tokens
            begin = max(first, token_start // group.block_tokens)
            end = min(first + size // group.block_tokens, -(-token_end // group.block_tokens))
            kept = [block for block in range(begin, end) if table[block] != NULL_BLOCK]
            if kept:
                loads.append(
                    ChunkLoad(
                        chunk_of(geometry, hashes, index, group),
                        tuple(block - first for block in kept),
                        tuple(table[block] for block in kept),
                    )
                )
    return tuple(loads)


def blocks_of_chunk(
    geometry: Geometry, group: Group, table: Sequence[int], index: int
) -> tuple[int, ...] | None:
    """The engine's blocks that hold a chunk; None when not all of them do."""
    count = geometry.chunk_tokens // group.block_tokens
    blocks = tuple(table[index * count : (index + 1) * count])
    return blocks if len(blocks) == count and NULL_BLOCK not in blocks else None


def chunk_of(geometry: Geometry, hashes: Sequence[bytes], index: int, group: Group) -> Chunk:
    """A group's part of chunk `index`."""
    return Chunk(
        hash=bytes(chunk_hash(geometry, hashes, index)),
        parent=bytes(chunk_hash(geometry, hashes, index - 1)) if index else b"",
        token_start=index * geometry.chunk_tokens,
        token_end=(index + 1) * geometry.chunk_tokens,
        group=group.index,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
