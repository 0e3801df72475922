"""What `commit.lua` is told of a transaction: what it compares and writes, under which keys."""

import msgpack

from kvfs.config import CLUSTER_FEED_ENTRIES
from kvfs.meta.shared import Commit, Record, SharedTable

ENTRY_ORDER = "e"  # letter of the names of a directory in order; their values are in a hash
_HAS_VALUES = {SharedTable.DIRENT: ENTRY_ORDER}


def order_of(table: SharedTable) -> str:
    """The letter of the keys under which the members of a table's groups lie in order."""
    return _HAS_VALUES.get(table, table.value)


def pack_commit(
    commit: Commit,
    *,
    epoch: bytes,
    node_id: bytes,
    serial: str,
    news: bytes | None,
    inodes: int,
) -> bytes:
    """The script's one argument. Values and pages are numbered in their order in the commit."""
    packed = msgpack.packb(
        {
            "epoch": epoch,
            "node": node_id,
            "serial": serial,
            "values": [[*_place(r), False if v is None else v] for r, v in commit.values.items()],
            "pages": [
                [order_of(page.table), page.group, page.start, page.limit, members]
                for page, members in commit.pages.items()
            ],
            "writes": [_write(record, value) for record, value in commit.writes.items()],
            "inodes": inodes,
            "news": False if news is None else news,
            "kept": CLUSTER_FEED_ENTRIES,
        },
        use_bin_type=False,  # which the server's msgpack does not know
    )
    assert isinstance(packed, bytes)
    return packed


def keys_of(commit: Commit, node_id: bytes) -> list[bytes]:
    """All keys that `commit.lua` touches."""
    keys = {b"last", b"seq", b"inodes", b"feed", b"mark", b"g" + node_id}
    for record in (*commit.values, *commit.writes):
        group = record.split()[0] if record.is_grouped else record.key
        keys.add(record.table.value.encode() + group)
        if record.table in _HAS_VALUES:
            keys.add(_HAS_VALUES[record.table].encode() + group)
    for page in commit.pages:
        keys.add(order_of(page.table).encode() + page.group)
    return sorted(keys)


def _place(record: Record) -> tuple[str, bytes, bytes | bool]:
    if record.is_grouped:
        return (record.table.value, *record.split())
    return record.table.value, record.key, False


def _write(record: Record, value: bytes | None) -> list[object]:
    order = _HAS_VALUES.get(record.table, False)
    stored: object = False if value is None else value
    if value is not None and record.is_grouped and not order:
        stored = True
    return [*_place(record), stored, order]
