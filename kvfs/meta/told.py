"""What the nodes of a cluster tell each other of what they did, as the feed has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from kvfs.meta import records
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.meta.records import pack_native
from kvfs.meta.shared import KEPT_IF_THERE, Record, SharedTable, SharedTransaction, is_key
from kvfs.meta.view import View

_BY_LETTER = {table.value: table for table in SharedTable}


@dataclass(frozen=True, slots=True)
class Move:
    """What a transaction did to a file, as far as nodes care that have its bytes, old or new."""

    ino: int
    old: bytes  # digest
    new: bytes
    is_named: bool
    is_pinned: bool
    used_ns: int


def encode_news(
    shared: SharedTransaction, moves: Sequence[Move], *, moves_directories: bool
) -> bytes:
    """What other nodes must hear of a transaction: which records they may have kept. Of files that
    it made they have no inode and no names under their numbers, not even that they are missing.
    Entries of published files come with it, since a name that is new here is soon asked for there.
    """
    packed = msgpack.packb(
        [
            [
                [record.table.value, record.key, value]
                if record.table is SharedTable.DIRENT and _is_of_published(value)
                else [record.table.value, record.key]
                for record, value in shared.commit.writes.items()
                if record.table is not SharedTable.LOOSE
                and (record.table not in KEPT_IF_THERE or not shared.is_new(record))
            ],
            [[m.ino, m.old, m.new, m.is_named, m.is_pinned, m.used_ns] for m in moves],
            moves_directories,
        ]
    )
    assert isinstance(packed, bytes)
    return packed


def concerns(local: View, move: Move) -> bool:
    """Whether this node's own tables may have to say something else after a move: it has the bytes,
    old or new, or knew the file."""
    get, tables = local.txn.get, local.tables
    return (
        any(get(digest, db=tables.blob) for digest in (move.old, move.new) if digest)
        or get(pack_native(move.ino), db=tables.stamp) is not None
        or get(records.pack_ordered(move.ino), db=tables.loose) is not None
    )


def _is_of_published(dirent: bytes | None) -> bool:
    return dirent is not None and records.dirent_size_field(dirent) > 0


@dataclass(frozen=True, slots=True)
class Heard:
    """What another node did."""

    records: tuple[Record, ...]
    moves: tuple[Move, ...]
    moves_directories: bool
    # All directory entries among the records, by their keys: what they are now, where it is said.
    dirents: tuple[tuple[bytes, bytes | None], ...] = ()


def decode_news(raw: bytes) -> Heard:
    """What `encode_news` said. Raises `ValueError` and the like for anything else."""
    written, moves, moves_directories = msgpack.unpackb(raw)
    heard = Heard(
        tuple(Record(_BY_LETTER[letter], key) for letter, key, *_ in written),
        tuple(Move(*fields) for fields in moves),
        moves_directories,
        tuple(
            (key, value[0] if value else None)
            for letter, key, *value in written
            if letter == SharedTable.DIRENT.value
        ),
    )
    if (
        not all(map(_is_record, heard.records))
        or not all(map(_is_move, heard.moves))
        or not all(value is None or _is_dirent(value) for _, value in heard.dirents)
    ):
        raise ValueError("not what a node says")
    return heard


def _is_record(record: Record) -> bool:
    return isinstance(record.key, bytes) and is_key(record.table, record.key)


def _is_dirent(value: object) -> bool:
    return isinstance(value, bytes) and records.is_dirent(value)


def _is_move(move: Move) -> bool:
    digests = move.old, move.new
    return all(
        isinstance(number, int) and 0 <= number < 2**63 for number in (move.ino, move.used_ns)
    ) and all(isinstance(one, bytes) and len(one) in (0, DIGEST_BYTES) for one in digests)
