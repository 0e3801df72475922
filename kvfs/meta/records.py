"""Packed records and keys of the embedded engine: pure functions between dataclasses and bytes.

About 85 bytes an inode. Keys that are walked in order are big-endian, so that byte order is number
order; tables keyed by one number use the native word, which LMDB compares fastest.
"""

import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs.config import NAME_BYTES_MAX
from kvfs.errors import Corrupt
from kvfs.meta.contract import AWAY, DIGEST_BYTES, ROOT_INO, Blob, ChunkInfo, Inode

TIME_NS_MAX = 2**63 - 1
CHUNK_KEY_BYTES_MAX = 255
_COUNT_MAX = 2**64 - 1

_INODE = struct.Struct("<IIIIQqqqqQB")
_USE = struct.Struct("<I44xQ8xB")  # mode, used_ns and flags of an inode
_USED_OFFSET = struct.calcsize("<IIIIQqqq")
_USED_END = _USED_OFFSET + 8
_PINNED = 1
_KINDS_WITH_TAIL = {stat.S_IFREG, stat.S_IFLNK}
_KINDS = _KINDS_WITH_TAIL | {
    stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK
}  # fmt: skip
_MODE_MAX = 2**16 - 1
_LINKS_MAX = 2**32 - 1
_DIRENT = struct.Struct("<QQ")
_BLOB = struct.Struct("<QQHQ")
_STAMP = struct.Struct("<QH?")
_CHUNK = struct.Struct("<QQQIIBBB")
_STATE = struct.Struct("<QQQQ")
_NATIVE = struct.Struct("=Q")
_ORDERED = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_USED = struct.Struct(">HQQ")
_INTENT = struct.Struct(">16sH")
_HOLDING = struct.Struct("<QQ")
_TIER = struct.Struct("<QQ")

pack_native = _NATIVE.pack
pack_ordered = _ORDERED.pack

ROOT_DIRENT_KEY = pack_ordered(0)  # the root's own entry, so that b"" resolves like any path
NO_DIRENT = _DIRENT.pack(0, 0)
NO_DIRECTORY = pack_ordered(2**64 - 1)  # stands for a directory that does not exist


def encode_inode(inode: Inode) -> bytes:
    """Pack an inode; its digest or link target is the tail."""
    return _INODE.pack(
        inode.mode,
        inode.uid,
        inode.gid,
        max(0, min(inode.nlink, _LINKS_MAX)),
        inode.size_bytes,
        inode.atime_ns,
        inode.mtime_ns,
        inode.ctime_ns,
        inode.used_ns,
        inode.rdev,
        _PINNED if inode.pinned else 0,
    ) + (inode.target or inode.digest)


def decode_inode(ino: int, raw: bytes) -> Inode:
    """The inode that `encode_inode` packed. Raises `Corrupt` for anything else."""
    if len(raw) < _INODE.size:
        raise Corrupt(f"inode {ino}", "its record is cut short")
    mode, uid, gid, nlink, size, atime, mtime, ctime, used, rdev, flags = _INODE.unpack_from(raw)
    tail = raw[_INODE.size :]
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        digest, target = b"", tail
    else:
        digest, target = tail, b""
    if mode > _MODE_MAX or flags not in (0, _PINNED):
        raise Corrupt(f"inode {ino}", "its record is of no mode")
    if kind not in _KINDS or (tail and kind not in _KINDS_WITH_TAIL):
        raise Corrupt(f"inode {ino}", "its record is of no kind of file")
    if digest and len(digest) != DIGEST_BYTES:
        raise Corrupt(f"inode {ino}", "its record has no digest")
    return Inode(
        ino, mode, uid, gid, nlink, size, atime, mtime, ctime, rdev, digest, target, used,
        flags == _PINNED,
    )  # fmt: skip


def new_root(uid: int, gid: int, now_ns: int) -> Inode:
    """The root of an empty namespace."""
    return Inode(ROOT_INO, stat.S_IFDIR | 0o755, uid, gid, 2, 0, now_ns, now_ns, now_ns)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A node's own use of a file, in a cluster."""

    used_ns: int
    directory: int  # of its blob
    is_ranked: bool  # in the order of eviction


def encode_stamp(stamp: Stamp) -> bytes:
    """Pack a stamp; the inode number is its key."""
    return _STAMP.pack(stamp.used_ns, stamp.directory, stamp.is_ranked)


def decode_stamp(raw: bytes) -> Stamp:
    """The stamp that `encode_stamp` packed."""
    return Stamp(*_STAMP.unpack(raw))


@dataclass(frozen=True, slots=True)
class Use:
    """What eviction asks of an inode."""

    used_ns: int
    is_pinned: bool
    digest: bytes  # empty when it is no published file


def use_of(raw: bytes) -> Use:
    """The use of a packed inode, without unpacking the rest. Raises `Corrupt` for none."""
    if len(raw) < _INODE.size:
        raise Corrupt("an inode", "its record is cut short")
    mode, used_ns, flags = _USE.unpack_from(raw)
    return Use(used_ns, flags == _PINNED, raw[_INODE.size :] if stat.S_ISREG(mode) else b"")


def with_used(raw: bytes, used_ns: int) -> bytes:
    """A packed inode with another `used_ns`."""
    return raw[:_USED_OFFSET] + used_ns.to_bytes(8, "little") + raw[_USED_END:]


def clamp_time(time_ns: int) -> int:
    """The nearest time that a record holds: the years 1678 to 2262."""
    return max(-TIME_NS_MAX, min(time_ns, TIME_NS_MAX))


def clamp_used(time_ns: int) -> int:
    """The nearest stamp that the eviction order holds: none before the epoch."""
    return max(0, min(time_ns, TIME_NS_MAX))


# Names -------------------------------------------------------------------------------------------


def encode_dirent(inode: Inode) -> bytes:
    """Inode number, and size plus one of a published regular file, else 0: what a batch look-up
    wants, so that it need not fetch the inode."""
    return _DIRENT.pack(inode.ino, inode.size_bytes + 1 if inode.digest else 0)


def is_dirent(raw: bytes) -> bool:
    """Whether `encode_dirent` may have packed it."""
    return len(raw) == _DIRENT.size


def is_name(name: bytes) -> bool:
    """Whether a file can be called so."""
    return (
        0 < len(name) <= NAME_BYTES_MAX
        and b"/" not in name
        and b"\0" not in name
        and name not in (b".", b"..")
    )


def dirent_ino(raw: bytes) -> int:
    """The inode number of a packed directory entry."""
    return int.from_bytes(raw[:8], "little")


def dirent_size_field(raw: bytes) -> int:
    """Size plus one of the published file that a packed directory entry names, else 0."""
    return int.from_bytes(raw[8:], "little")


def entries_prefix(raw: bytes) -> bytes:
    """Where the entries begin of the directory that a packed directory entry names."""
    return raw[7::-1]


def unpack_dirents(raws: Sequence[bytes]) -> tuple[int, ...]:
    """The fields of many packed directory entries, all in a row: number, size field, number, ..."""
    return struct.unpack(f"<{2 * len(raws)}Q", b"".join(raws))


def name_key(ino: int, parent: int, name: bytes) -> bytes:
    """Key of the table of reverse links."""
    return _PAIR.pack(ino, parent) + name


def split_name_key(key: bytes) -> tuple[int, bytes]:
    """Parent and name of a reverse link."""
    return _ORDERED.unpack_from(key, 8)[0], key[16:]


# Blobs -------------------------------------------------------------------------------------------


def encode_blob(blob: Blob) -> bytes:
    """Pack a blob; its digest is the key."""
    return _BLOB.pack(blob.size_bytes, blob.allocated_bytes, blob.directory, blob.references)


def decode_blob(digest: bytes, raw: bytes) -> Blob:
    """The blob that `encode_blob` packed."""
    return Blob(digest, *_BLOB.unpack(raw))


def blob_directory(raw: bytes) -> int:
    """The directory of a packed blob."""
    return int.from_bytes(raw[16:18], "little")


def intent_key(digest: bytes, directory: int) -> bytes:
    """Key of the table of intents."""
    return _INTENT.pack(digest, directory)


def split_intent_key(key: bytes) -> tuple[bytes, int]:
    """Digest and directory of an intent."""
    digest, directory = _INTENT.unpack(key)
    return digest, directory


def holder_key(digest: bytes, ino: int) -> bytes:
    """Key of the table that finds the inodes of a digest."""
    return digest + pack_ordered(ino)


# Tiers -------------------------------------------------------------------------------------------


def encode_holding(mask: int, size_bytes: int) -> bytes:
    """Pack which tiers have a blob; its digest is the key."""
    return _HOLDING.pack(mask, size_bytes)


def decode_holding(raw: bytes) -> tuple[int, int]:
    """The mask and the size that `encode_holding` packed."""
    mask, size_bytes = _HOLDING.unpack(raw)
    return mask, size_bytes


def holding_mask(raw: bytes) -> int:
    """The mask of a packed holding."""
    return int.from_bytes(raw[:8], "little")


def encode_tier(blobs: int, size_bytes: int, place: bytes) -> bytes:
    """Pack what a tier is and what is known to lie in it; its number is in the key."""
    return _TIER.pack(max(0, blobs), max(0, size_bytes)) + place


def decode_tier(raw: bytes) -> tuple[int, int, bytes]:
    """What `encode_tier` packed."""
    blobs, size_bytes = _TIER.unpack_from(raw)
    return blobs, size_bytes, raw[_TIER.size :]


# Chunks ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk with the directory whose prefixes it belongs to."""

    namespace: int
    info: ChunkInfo


def encode_chunk(record: ChunkRecord) -> bytes:
    """Pack a chunk record; the inode number is its key."""
    info = record.info
    return (
        _CHUNK.pack(
            record.namespace,
            info.token_start,
            info.token_end,
            info.group,
            info.shard,
            len(info.key),
            len(info.parent),
            len(info.tokens_digest),
        )
        + info.key
        + info.parent
        + info.tokens_digest
    )


def decode_chunk(raw: bytes) -> ChunkRecord:
    """The record that `encode_chunk` packed. Raises `Corrupt` for anything else."""
    if len(raw) < _CHUNK.size:
        raise Corrupt("a chunk", "its record is cut short")
    fields = _CHUNK.unpack_from(raw)
    namespace, start, end, group, shard, key_bytes, parent_bytes, digest_bytes = fields
    parent_at = _CHUNK.size + key_bytes
    tokens_at = parent_at + parent_bytes
    if len(raw) != tokens_at + digest_bytes:
        raise Corrupt("a chunk", "its record is not as long as it says")
    return ChunkRecord(
        namespace,
        ChunkInfo(
            raw[_CHUNK.size : parent_at], raw[parent_at:tokens_at], start, end, group, shard,
            raw[tokens_at:],
        ),
    )  # fmt: skip


def is_chunk_storable(info: ChunkInfo) -> bool:
    """Whether a record can hold it, and its tokens run forward: what keeps a lineage free of
    circles, whatever a client says."""
    return (
        0 < len(info.key) <= CHUNK_KEY_BYTES_MAX
        and len(info.parent) <= CHUNK_KEY_BYTES_MAX
        and len(info.tokens_digest) <= CHUNK_KEY_BYTES_MAX
        and 0 <= info.token_start < info.token_end < 2**64
        and 0 <= info.group < 2**32
        and 0 <= info.shard < 2**32
    )


def child_prefix(namespace: int, parent: bytes) -> bytes:
    """Where the children of one chunk begin in the child index; the length keeps keys apart that
    begin alike."""
    return pack_ordered(namespace) + bytes((len(parent),)) + parent


# Eviction order and totals -----------------------------------------------------------------------


def used_key(directory: int, used_ns: int, ino: int) -> bytes:
    """Key of the eviction order, which each store directory has for itself."""
    return _USED.pack(directory, used_ns, ino)


def used_prefix(directory: int) -> bytes:
    """Where a store directory's eviction order begins."""
    return directory.to_bytes(2, "big")


def split_used_key(key: bytes) -> tuple[int, int]:
    """Stamp and inode number of an entry of the eviction order."""
    _, used_ns, ino = _USED.unpack(key)
    return used_ns, ino


@dataclass(slots=True)
class State:
    """Totals, in the transaction that changes what they count."""

    next_ino: int
    inodes: int = 0
    blobs: int = 0
    size_bytes: int = 0
    allocated_bytes: list[int] = field(default_factory=list)  # per directory

    def weigh(self, blob: Blob, sign: int) -> None:
        """Add (1) or take away (-1) a blob, which has no weight when it lies elsewhere."""
        if blob.directory == AWAY:
            return
        allocated = self.allocated_bytes
        allocated += [0] * (blob.directory + 1 - len(allocated))
        self.blobs += sign
        self.size_bytes += sign * blob.size_bytes
        allocated[blob.directory] += sign * blob.allocated_bytes


def encode_state(state: State) -> bytes:
    """Pack the totals. They are for people and limits: one that went wrong is the nearest that a
    record holds, and ends nothing."""
    totals = state.inodes, state.blobs, state.size_bytes, *state.allocated_bytes
    counts = [max(0, min(total, _COUNT_MAX)) for total in totals]
    return _STATE.pack(state.next_ino, *counts[:3]) + struct.pack(
        f"<{len(counts) - 3}Q", *counts[3:]
    )


def decode_state(raw: bytes) -> State:
    """The totals that `encode_state` packed."""
    allocated = struct.unpack_from(f"<{(len(raw) - _STATE.size) // 8}Q", raw, _STATE.size)
    next_ino, inodes, blobs, size_bytes = _STATE.unpack_from(raw)
    return State(next_ino, inodes, blobs, size_bytes, list(allocated))
