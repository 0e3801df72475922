"""What nodes leave unfinished that do not come back: files without content, and orphans.

Each node has a list of them on the server (`SharedTable.LOOSE`), written in the transactions that
make and finish them. While it lives only it drops them (`MetaEngine.recover`, `forget`). Once its
lease has been gone for long another node does; the transaction sees that it still is
(`SharedTable.GONE`), so that a node which is just coming back loses nothing of what it begins.
"""

from itertools import islice

from kvfs.config import ABANDONED_STEP
from kvfs.meta.batch import is_loose
from kvfs.meta.cluster import ClusterBatch, loose_record
from kvfs.meta.shared import Record, SharedTable

Named = tuple[int, bytes, int]  # parent, name, inode number


def drop_loose(batch: ClusterBatch, node_id: bytes, *, if_gone: bool) -> list[Named] | None:
    """Drop some of what a node left; the names that went with it. None once nothing is left, or,
    with `if_gone`, when the node is back."""
    shared = batch.txn.shared
    if if_gone and shared.get(Record(SharedTable.GONE, node_id)) is None:
        return None
    members = list(islice(shared.members(SharedTable.LOOSE, node_id, b""), ABANDONED_STEP))
    if not members:
        return None
    gone: list[Named] = []
    for member in members:
        ino = int.from_bytes(member, "big")
        inode = batch.find(ino)
        if inode is not None and is_loose(inode):  # else another node has seen to it
            names = batch.names(ino)
            for parent, name in names:
                batch.remove_name(parent, name, ino)
            batch.drop(inode)
            gone += [(parent, name, ino) for parent, name in names]
        shared.write(loose_record(node_id, ino), None)
    return gone
