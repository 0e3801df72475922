"""The index of chunk files against a dict, in tables so full that keys pass full buckets."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from kvfs.meta.chunk_index import ChunkIndex
from kvfs.names import ChunkKeys, chunk_key

PARTS = ((0, 0), (1, 0), (0, 1))
HASHES = [bytes([n, n % 3]) for n in range(40)] + [bytes([n]) * 33 for n in range(10)]
LEAVES = [byte % 4 + 1 for byte in range(256)]  # numbers of directories

files = st.tuples(st.sampled_from(HASHES), st.sampled_from(PARTS))
changes = st.dictionaries(files, st.one_of(st.just(0), st.integers(1, 2**63)), max_size=40)


@given(steps=st.lists(changes, max_size=12), expected=st.sampled_from([0, 30, 70]))
def test_the_index_says_what_it_was_told(
    steps: list[dict[tuple[bytes, tuple[int, int]], int]], expected: int
) -> None:
    told: dict[tuple[bytes, tuple[int, int]], int] = {}
    with (
        patch("kvfs.meta.chunk_index.CHUNK_INDEX_ROWS_MIN", 16),
        patch("kvfs.meta.chunk_index._FILLED_MAX", 0.9),
    ):
        index = ChunkIndex(expected)
        for step in steps:
            index.change(
                (LEAVES[key[0]], chunk_key(key, *part).encode() + b".safetensors", size)
                for (key, part), size in step.items()
            )
            told |= step
            for length in (2, 33):
                hashes = [key for key in HASHES if len(key) == length]
                keys = ChunkKeys(b"".join(hashes), length, PARTS)
                wanted = [told.get((key, part), 0) for key in hashes for part in PARTS]
                assert index.sizes(LEAVES, keys) == [size - 1 if size else None for size in wanted]
            assert len(index) == sum(size > 0 for size in told.values())


def test_what_is_no_chunk_or_lies_elsewhere_is_not_there() -> None:
    index = ChunkIndex()
    name = chunk_key(b"\x01\x02", 0, 0).encode()
    index.change([(1, name, 5), (1, name + b".SAFETENSORS", 5), (1, b"\xff.safetensors", 5)])
    assert len(index) == 0
    index.change([(9, name + b".safetensors", 5)])
    keys = ChunkKeys(b"\x01\x02", 2, ((0, 0),))
    assert index.sizes(LEAVES, keys) == [None]
    assert index.sizes([9] * 256, keys) == [4]
