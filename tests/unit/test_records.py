"""Packed records: everything that goes in comes out, and byte order is number order."""

import stat

from hypothesis import given
from hypothesis import strategies as st

from kvfs.meta import records
from kvfs.meta.contract import Blob, ChunkInfo, Inode
from kvfs.meta.records import ChunkRecord, State, Use

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TIMES = st.integers(-records.TIME_NS_MAX, records.TIME_NS_MAX)
STAMPS = st.integers(0, records.TIME_NS_MAX)
DIGESTS = st.binary(min_size=16, max_size=16)
KEYS = st.binary(max_size=records.CHUNK_KEY_BYTES_MAX)
KINDS = st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO])


@st.composite
def inodes(draw: st.DrawFn) -> Inode:
    kind = draw(KINDS)
    return Inode(
        draw(U64), kind | draw(st.integers(0, 0o7777)), draw(U32), draw(U32), draw(U32), draw(U64),
        draw(TIMES), draw(TIMES), draw(TIMES), draw(U64),
        draw(DIGESTS | st.just(b"")) if kind == stat.S_IFREG else b"",
        draw(st.binary(min_size=1, max_size=99)) if kind == stat.S_IFLNK else b"",
        draw(STAMPS), draw(st.booleans()),
    )  # fmt: skip


CHUNKS = st.builds(
    ChunkInfo, KEYS, KEYS, U64, U64, U32, U32, st.binary(max_size=16)
)  # fmt: skip


@given(inodes(), STAMPS)
def test_inodes(inode: Inode, used_ns: int) -> None:
    raw = records.encode_inode(inode)
    assert records.decode_inode(inode.ino, raw) == inode
    assert len(raw) <= 100 + len(inode.target)
    assert records.use_of(raw) == Use(inode.used_ns, inode.pinned, inode.digest)
    again = records.decode_inode(inode.ino, records.with_used(raw, used_ns))
    assert (again.used_ns, again.ctime_ns) == (used_ns, inode.ctime_ns)
    assert records.with_used(raw, inode.used_ns) == raw


@given(st.lists(inodes(), max_size=5))
def test_directory_entries(found: list[Inode]) -> None:
    found = [i for i in found if i.size_bytes < 2**64 - 1]
    raws = [records.encode_dirent(inode) for inode in found]
    fields = records.unpack_dirents(raws)
    assert list(fields[::2]) == [inode.ino for inode in found]
    assert list(fields[1::2]) == [i.size_bytes + 1 if i.is_published else 0 for i in found]
    for raw, inode in zip(raws, found, strict=True):
        assert records.dirent_ino(raw) == inode.ino
        assert records.entries_prefix(raw) == records.pack_ordered(inode.ino)


@given(U64, U64, st.binary(min_size=1, max_size=255))
def test_name_keys(ino: int, parent: int, name: bytes) -> None:
    key = records.name_key(ino, parent, name)
    assert records.split_name_key(key) == (parent, name)
    assert key.startswith(records.pack_ordered(ino))
    assert len(key) <= 511


@given(DIGESTS, U64, U64, U16, U64)
def test_blobs(digest: bytes, size: int, allocated: int, directory: int, references: int) -> None:
    blob = Blob(digest, size, allocated, directory, references)
    raw = records.encode_blob(blob)
    assert records.decode_blob(digest, raw) == blob
    assert records.blob_directory(raw) == directory
    key = records.intent_key(digest, directory)
    assert records.split_intent_key(key) == (digest, directory)
    assert key.startswith(digest)


@given(U64, CHUNKS)
def test_chunks(namespace: int, info: ChunkInfo) -> None:
    record = ChunkRecord(namespace, info)
    assert records.decode_chunk(records.encode_chunk(record)) == record


@given(U64, KEYS, KEYS)
def test_no_key_begins_anothers_children(namespace: int, one: bytes, two: bytes) -> None:
    prefixes = records.child_prefix(namespace, one), records.child_prefix(namespace, two)
    assert prefixes[1].startswith(prefixes[0]) == (one == two)
    assert len(prefixes[0]) + 8 <= 511


@given(U16, STAMPS, U64, U16, STAMPS, U64)
def test_eviction_keys_are_in_order(d1: int, t1: int, i1: int, d2: int, t2: int, i2: int) -> None:
    one, two = records.used_key(d1, t1, i1), records.used_key(d2, t2, i2)
    assert (one < two) == ((d1, t1, i1) < (d2, t2, i2))
    assert records.split_used_key(one) == (t1, i1)
    assert one.startswith(records.used_prefix(d1))


@given(U64, U64, U64, U64, st.lists(U64, max_size=4))
def test_totals(ino: int, inodes: int, blobs: int, size: int, allocated: list[int]) -> None:
    state = State(ino, inodes, blobs, size, allocated)
    assert records.decode_state(records.encode_state(state)) == state


def test_weighing_grows_the_list_of_directories() -> None:
    state = State(2)
    state.weigh(Blob(b"d" * 16, 10, 4096, 2), 1)
    state.weigh(Blob(b"e" * 16, 5, 8192, 0), 1)
    assert state == State(2, 0, 2, 15, [8192, 0, 4096])
    state.weigh(Blob(b"d" * 16, 10, 4096, 2), -1)
    assert state == State(2, 0, 1, 5, [8192, 0, 0])


def test_chunks_that_no_record_holds() -> None:
    good = ChunkInfo(b"k", b"", 0, 1, 0, 0, b"")
    assert records.is_chunk_storable(good)
    for bad in [
        ChunkInfo(b"", b"", 0, 1, 0, 0, b""),
        ChunkInfo(b"k" * 256, b"", 0, 1, 0, 0, b""),
        ChunkInfo(b"k", b"p" * 256, 0, 1, 0, 0, b""),
        ChunkInfo(b"k", b"", 1, 1, 0, 0, b""),
        ChunkInfo(b"k", b"", -1, 1, 0, 0, b""),
        ChunkInfo(b"k", b"", 0, 2**64, 0, 0, b""),
        ChunkInfo(b"k", b"", 0, 1, 2**32, 0, b""),
        ChunkInfo(b"k", b"", 0, 1, 0, -1, b""),
    ]:
        assert not records.is_chunk_storable(bad)


def test_times_are_clamped() -> None:
    assert records.clamp_time(2**70) == 2**63 - 1
    assert records.clamp_time(-(2**70)) == -(2**63 - 1)
    assert (records.clamp_used(-5), records.clamp_used(2**70)) == (0, 2**63 - 1)
