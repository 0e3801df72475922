"""Hits, loads and saves as pure arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_bridge.plan import (
    Chunk,
    Geometry,
    Group,
    blocks_of_chunk,
    chunk_hash,
    chunk_keys,
    chunk_of,
    hashed_chunks,
    hit_end,
    plan_load,
    presence,
    resolve_chunk_tokens,
)
from kvfs.errors import InvalidInput
from kvfs.names import ChunkKeys

FULL = Geometry(256, 128, (Group(0, 128),), shards=1)
# Full attention in blocks of 64, and a window of 300 tokens in blocks of 32.
HYBRID = Geometry(128, 32, (Group(0, 64), Group(1, 32, window_tokens=300)), shards=2)


def hashes(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(1, count + 1)]


@pytest.mark.parametrize(
    ("wanted", "blocks", "tokens"),
    [
        (None, [128], 256),
        (None, [96], 288),
        (None, [512], 512),
        (None, [48, 64], 384),
        (64, [16], 64),
    ],
)
def test_chunks_are_whole_blocks(wanted: int | None, blocks: list[int], tokens: int) -> None:
    assert resolve_chunk_tokens(wanted, blocks) == tokens


def test_a_chunk_size_that_cuts_blocks_is_refused_with_the_size_to_write() -> None:
    with pytest.raises(InvalidInput, match=r"kvfs\.chunk_tokens: 200 .* 128 tokens; write 256"):
        resolve_chunk_tokens(200, [128])


def test_a_chunk_is_named_by_the_hash_of_its_last_block() -> None:
    known = hashes(5)
    assert hashed_chunks(FULL, known) == 2
    assert chunk_hash(FULL, known, 0) == known[1]
    assert chunk_of(FULL, known, 1, FULL.groups[0]) == Chunk(known[3], known[1], 256, 512, 0)
    assert chunk_of(FULL, known, 0, FULL.groups[0]).parent == b""


def test_keys_and_presence_have_one_order() -> None:
    keys = chunk_keys(HYBRID, [b"\1" * 32, b"\2" * 32])
    assert keys == ChunkKeys(b"\1" * 32 + b"\2" * 32, 32, ((0, 0), (0, 1), (1, 0), (1, 1)))
    found = [True] * 8
    found[3] = False  # chunk 0, group 1, shard 1
    assert presence(HYBRID, found) == [(True, False), (True, True)]


def test_a_missing_shard_is_a_missing_chunk() -> None:
    geometry = Geometry(256, 128, (Group(0, 128),), shards=3)
    assert presence(geometry, [True, True, True, True, False, True]) == [(True,), (False,)]


@pytest.mark.parametrize(
    ("present", "local", "tokens", "end"),
    [
        ([True] * 4, 0, 1025, 1024),
        ([True] * 4, 0, 1024, 1024),  # the whole prompt: the engine computes its last token again
        ([True] * 4, 0, 1023, 768),
        ([True, True, False, True], 0, 1025, 512),
        ([False, True, True, True], 0, 1025, 0),
        ([False, True, True, True], 256, 1025, 1024),  # what the engine has itself is not needed
        ([False, True, True, True], 128, 1025, 128),
        ([True, True, True, True], 384, 1025, 1024),  # in the middle of a chunk
        ([True] * 4, 1024, 1025, 1024),
        ([], 128, 1025, 128),
    ],
)
def test_a_hit_ends_at_the_first_gap(
    present: list[bool], local: int, tokens: int, end: int
) -> None:
    assert hit_end(FULL, [(p,) for p in present], local, tokens) == end


def test_a_window_needs_only_what_it_reads_at_the_end_of_the_hit() -> None:
    # At 1,024 a window of 300 reads from token 725 on: chunks 5, 6 and 7.
    windows = [False] * 5 + [True] * 3
    present = [(True, window) for window in windows]
    assert hit_end(HYBRID, present, 0, 2000) == 1024
    # Without chunk 7's window the hit can't end at 8; at 7 it would need chunk 4.
    present[7] = (True, False)
    assert hit_end(HYBRID, present, 0, 2000) == 0
    # What lies before the engine's own tokens is in its memory.
    assert hit_end(HYBRID, [(True, True)] * 6 + [(True, False)] * 2, 5 * 128, 2000) == 6 * 128


def test_with_windows_a_hit_leaves_a_token_to_compute() -> None:
    present = [(True, True)] * 4
    assert hit_end(HYBRID, present, 0, 512) == 384
    assert hit_end(HYBRID, present, 0, 513) == 512


def test_a_load_fills_each_block_once_and_skips_null_blocks() -> None:
    tables = {0: list(range(10, 18)), 1: [0] * 9 + list(range(29, 36))}
    loads = plan_load(HYBRID, hashes(16), tables, 0, 512)
    filled: dict[int, list[int]] = {0: [], 1: []}
    for load in loads:
        filled[load.chunk.group] += load.block_ids
    assert filled == {0: list(range(10, 18)), 1: list(range(29, 36))}
    # The window's first chunk that is kept lost its first block.
    partial = next(load for load in loads if load.chunk.group == 1)
    assert (partial.chunk.token_start, partial.rows) == (256, (1, 2, 3))
    assert [load.chunk.token_start for load in loads] == [0, 128, 256, 256, 384, 384]


def test_a_load_begins_behind_the_engines_own_blocks() -> None:
    (first, second) = plan_load(FULL, hashes(4), {0: [7, 8, 9, 10]}, 128, 512)
    assert (first.rows, first.block_ids) == ((1,), (8,))
    assert (second.rows, second.block_ids) == ((0, 1), (9, 10))


@given(
    local=st.integers(0, 15).map(lambda n: n * 128),
    reach=st.integers(0, 8).map(lambda n: n * 256),
)
def test_every_block_of_a_range_is_loaded_exactly_once(local: int, reach: int) -> None:
    table = list(range(100, 116))
    loads = plan_load(FULL, hashes(16), {0: table}, local, max(local, reach))
    blocks = [block for load in loads for block in load.block_ids]
    assert blocks == table[local // 128 : max(local, reach) // 128]
    for load in loads:
        start = load.chunk.token_start // 128
        assert [table[start + row] for row in load.rows] == list(load.block_ids)


def test_a_chunk_is_saved_only_when_all_its_blocks_are_there() -> None:
    window = HYBRID.groups[1]
    table = [0, 5, 6, 7, 8, 9, 10, 11, 12]
    assert blocks_of_chunk(HYBRID, window, table, 0) is None
    assert blocks_of_chunk(HYBRID, window, table, 1) == (8, 9, 10, 11)
    assert blocks_of_chunk(HYBRID, window, table, 2) is None
