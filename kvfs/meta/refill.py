"""Giving a server that has lost everything its names again: those of the files whose bytes a node
has, with the directories above them, under the inode numbers that they had.

Several nodes do it at the same time. Each name is given once; what a name has got meanwhile stays,
and the bytes that it stood for go as if it had been replaced.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvfs.config import REFILL_STEP
from kvfs.meta import records, tree
from kvfs.meta.cluster import ClusterBatch
from kvfs.meta.contract import ROOT_INO, ChunkInfo, Inode
from kvfs.meta.mirror import Mirror
from kvfs.meta.shared import Commit, SharedTable
from kvfs.meta.view import Tables

if TYPE_CHECKING:
    import lmdb


_EPOCH_KEY = b"epoch"  # in the table of the state


def read_epoch(txn: "lmdb.Transaction[bytes]", tables: Tables) -> bytes | None:
    """The epoch of the server that was told last all that this node has; None: none ever was."""
    return txn.get(_EPOCH_KEY, db=tables.state)


def note_epoch(txn: "lmdb.Transaction[bytes]", tables: Tables, epoch: bytes) -> None:
    """The server of this epoch has been told all; also a node that starts again must know."""
    txn.put(_EPOCH_KEY, epoch, db=tables.state)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A name as a node remembers it."""

    parent: int
    name: bytes
    inode: Inode
    chunk: ChunkInfo | None


class Refill:
    """A walk over all that a node remembers, directories before what they hold. `of_single_keys`:
    the server may have lost a part of what it says of a name, and not the rest."""

    def __init__(self, *, of_single_keys: bool = False) -> None:
        self.of_single_keys = of_single_keys
        self._directories = deque([ROOT_INO])
        self._after = b""

    def next_names(self, mirror: Mirror) -> list[Remembered]:
        """The next names, none at the end."""
        while self._directories:
            parent = self._directories[0]
            listed = mirror.names(parent, self._after, REFILL_STEP)
            if not listed:
                self._directories.popleft()
                self._after = b""
                continue
            self._after = listed[-1][0]
            found = [remember(mirror, parent, name, ino) for name, ino in listed]
            names = [one for one in found if one is not None]
            self._directories += (one.inode.ino for one in names if one.inode.is_directory)
            if names:
                return names
        return []


def remember(mirror: Mirror, parent: int, name: bytes, ino: int) -> Remembered | None:
    """What a name stood for."""
    inode = mirror.inode(ino)
    if inode is None:
        return None
    return Remembered(parent, name, inode, mirror.chunk(ino))


def give_back(
    batch: ClusterBatch, names: Sequence[Remembered], now_ns: int, *, of_single_keys: bool = False
) -> None:
    """Write those names that are free, of directories and of files whose bytes are here; with
    `of_single_keys` also what else is said of those that are there."""
    for one in names:
        above = batch.find(one.parent)
        if above is None or not above.is_directory:
            continue
        blob = batch.blob(one.inode.digest)
        is_here = blob is not None and blob.references > 0  # else its file is on its way out
        if not (one.inode.is_directory or is_here):
            continue
        found = batch.entry(one.parent, one.name)
        if found is None:
            _give_name(batch, one, now_ns)
        elif of_single_keys and found.ino == one.inode.ino:
            batch.add_name(one.parent, one.name, found)
        now = batch.find(one.inode.ino) if of_single_keys else None
        if now is not None and is_here and now.digest == one.inode.digest:
            batch.add_holder(now.digest, now.ino)
        if is_here and batch.holders(one.inode.digest):  # else a check of all blobs finds it
            batch.begin_copy(one.inode.digest)


def _give_name(batch: ClusterBatch, one: Remembered, now_ns: int) -> None:
    there = batch.find(one.inode.ino)
    names = [] if there is None else batch.names(there.ino)
    if there is not None and one.inode.is_directory:
        if any(batch.entry_ino(*name) == there.ino for name in names):
            return  # it has got another name
        inode = there  # which the server has lost, and not the directory
    elif one.inode.is_directory:
        inode = batch.store(replace(one.inode, nlink=2), None)
    elif there is None:
        stamp = batch.stamp_of(one.inode.ino)
        used_ns = one.inode.used_ns if stamp is None else stamp.used_ns
        inode = batch.store(replace(one.inode, nlink=1, used_ns=used_ns), None)
    else:
        is_counted = (one.parent, one.name) in names
        inode = batch.store(replace(there, nlink=there.nlink + (not is_counted)), there)
    batch.add_name(one.parent, one.name, inode)
    tree.change_directory(batch, batch.directory(one.parent), now_ns, links=int(inode.is_directory))
    if one.chunk is not None:
        batch.put_chunk(inode.ino, one.chunk)


def give_back_deed(
    batch: ClusterBatch, commit: Commit, names: Sequence[Remembered], now_ns: int
) -> None:
    """Write what is left of a transaction that cannot be done again as it was: its `names`, where
    they are free, and which bytes are here."""
    give_back(batch, names, now_ns)
    for record in commit.writes:
        if record.table is SharedTable.COPY:
            batch.settle_copy(record.split()[0])


def remember_deed(mirror: Mirror, commit: Commit) -> list[Remembered]:
    """The names that a transaction made, as far as they are so still."""
    found = []
    for record, value in commit.writes.items():
        known = mirror.value(record) if record.table is SharedTable.DIRENT and value else None
        if known is not None:
            group, name = record.split()
            ino = records.dirent_ino(known)
            found.append(remember(mirror, int.from_bytes(group, "big"), name, ino))
    return [one for one in found if one is not None]
