"""What inodes hold, as functions on one write transaction of the embedded engine: publishing,
losing, letting go, and what a restart finds."""

import errno
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvfs.errors import NamespaceError
from kvfs.meta import records, tree
from kvfs.meta.batch import Batch, is_loose
from kvfs.meta.contract import (
    AWAY,
    DIGEST_BYTES,
    Blob,
    ChunkInfo,
    Inode,
    Publication,
    Published,
    Recovery,
)
from kvfs.meta.tier_contract import GivenUp
from kvfs.meta.view import View, check_name

_MADE_DIRECTORY_MODE = 0o755


def publish(batch: Batch, publications: Sequence[Publication], now_ns: int) -> list[Published]:
    """As `MetaEngine.publish`."""
    directories: dict[bytes, int] = {}
    return [
        _publish(batch, publication, directories, now_ns - index, now_ns)
        for index, publication in enumerate(publications)
    ]


def _publish(
    batch: Batch,
    publication: Publication,
    directories: dict[bytes, int],
    used_ns: int,
    now_ns: int,
) -> Published:
    """`directories`: those made or found for this batch, by path."""
    check_digest(publication.digest)
    if bool(publication.ino) == bool(publication.path):
        raise NamespaceError(errno.EINVAL, publication.path)
    batch.ensure_blob(publication)
    used_ns = records.clamp_used(used_ns)
    if publication.ino:
        published = _publish_inode(batch, publication, used_ns, now_ns)
    else:
        published = _publish_path(batch, publication, directories, used_ns, now_ns)
    if publication.is_open:
        batch.keep_intent(publication.digest, publication.directory)
    else:
        batch.clear_intents(publication.digest)
    if publication.chunk is not None and published.inode.nlink:
        batch.put_chunk(published.inode.ino, publication.chunk)
    return published


def _publish_inode(batch: Batch, publication: Publication, used_ns: int, now_ns: int) -> Published:
    old = batch.inode(publication.ino)
    if not old.is_regular:
        raise NamespaceError(errno.EISDIR if old.is_directory else errno.EINVAL)
    ctime_ns = max(publication.ctime_ns, old.ctime_ns) if publication.ctime_ns else now_ns
    new = replace(
        old,
        digest=publication.digest,
        size_bytes=publication.size_bytes,
        mtime_ns=records.clamp_time(publication.mtime_ns),
        ctime_ns=records.clamp_time(ctime_ns),
        used_ns=used_ns,
    )
    return Published(batch.store(new, old), 0, b"", None)


def _publish_path(
    batch: Batch,
    publication: Publication,
    directories: dict[bytes, int],
    used_ns: int,
    now_ns: int,
) -> Published:
    path, uid, gid = publication.path, publication.uid, publication.gid
    if not stat.S_ISREG(publication.mode):
        raise NamespaceError(errno.EINVAL, path)
    above, _, name = path.rpartition(b"/")
    tree.check_path(path)
    check_name(name)
    if above not in directories:
        names = tree.split_path(above)
        made = tree.make_directories(batch, names, _MADE_DIRECTORY_MODE, uid, gid, now_ns)
        directories[above] = made.ino
    directory = batch.directory(directories[above])
    found = batch.entry(directory.ino, name)
    if found is not None and found.is_directory:
        raise NamespaceError(errno.EISDIR, path)
    inode = replace(
        tree.new_inode(batch, directory, publication.mode, uid, gid, now_ns),
        digest=publication.digest,
        size_bytes=publication.size_bytes,
        mtime_ns=records.clamp_time(publication.mtime_ns),
        used_ns=used_ns,
    )
    batch.store(inode, None)
    replaced = None
    if found is not None:
        replaced = tree.release_name(batch, directory.ino, name, found, now_ns)
    batch.add_name(directory.ino, name, inode)
    tree.change_directory(batch, directory, now_ns)
    return Published(inode, directory.ino, name, replaced)


def intend(batch: Batch, blobs: Iterable[tuple[bytes, int]]) -> None:
    """As `MetaEngine.intend`."""
    for digest, directory in blobs:
        check_digest(digest)
        batch.txn.put(records.intent_key(digest, directory), b"", db=batch.tables.intent)


def relocate(batch: Batch, digest: bytes, directory: int, allocated_bytes: int) -> None:
    """As `MetaEngine.relocate`."""
    check_digest(digest)
    blob = batch.blob(digest)
    if blob is None or not blob.references:
        raise NamespaceError(errno.ENOENT, digest)
    batch.move_blob(blob, directory, allocated_bytes)
    batch.clear_intents(digest)


def check_digest(digest: bytes) -> None:
    """Refuse what is no digest."""
    if len(digest) != DIGEST_BYTES:
        raise NamespaceError(errno.EINVAL, digest)


def set_chunk(batch: Batch, ino: int, info: ChunkInfo) -> None:
    """As `MetaEngine.set_chunk`."""
    inode = batch.inode(ino)
    if inode.nlink == 0:
        raise NamespaceError(errno.ENOENT)
    if not inode.is_published:
        raise NamespaceError(errno.EINVAL)
    batch.put_chunk(ino, info)


def set_pinned(batch: Batch, ino: int, pinned: bool) -> Inode:
    """As `MetaEngine.set_pinned`."""
    inode = batch.inode(ino)
    return batch.store(replace(inode, pinned=pinned), inode)


def restamp(batch: Batch, stamps: Iterable[tuple[int, int]]) -> None:
    """As `MetaEngine.restamp`."""
    for ino, used_ns in stamps:
        batch.stamp(ino, used_ns)


def lose(batch: Batch, digest: bytes, now_ns: int) -> list[tuple[int, bytes, Inode]]:
    """As `MetaEngine.lose`."""
    check_digest(digest)
    if batch.tier_mask(digest):
        _send_away(batch, digest)
        return []
    gone: list[tuple[int, bytes, Inode]] = []
    for ino in batch.holders(digest):
        before = batch.find(ino)
        if before is None or before.digest != digest:
            batch.drop_holder(digest, ino)
            continue
        names = tree.unlink_all(batch, before, now_ns)
        gone += [(parent, name, before) for parent, name, _ in names]
        orphan = batch.inode(ino)
        batch.store(replace(orphan, digest=b""), orphan)
    batch.bury(digest)
    return gone


def give_up(batch: Batch, digest: bytes) -> list[GivenUp]:
    """As `MetaEngine.give_up`, of one that tiers have."""
    blob = _send_away(batch, digest)
    if blob is None:
        return []
    if blob.directory == AWAY:
        return [GivenUp(digest, None)]
    intend(batch, [(digest, blob.directory)])
    return [GivenUp(digest, blob.directory)]


def _send_away(batch: Batch, digest: bytes) -> Blob | None:
    """Have a blob in use lie in tiers only; what it was before. None for one that is not in use."""
    blob = batch.blob(digest)
    if blob is None or not blob.references:
        return None
    if blob.directory != AWAY:
        batch.move_blob(blob, AWAY, 0)
    return blob


def is_pinned(batch: Batch, digest: bytes) -> bool:
    """Whether a file that holds these bytes must stay."""
    inodes = map(batch.find, batch.holders(digest))
    return any(inode is not None and inode.pinned for inode in inodes)


def add_copy(batch: Batch, publication: Publication) -> bool:
    """As `MetaEngine.add_copy`."""
    blob = batch.blob(publication.digest)
    if blob is None or not blob.references:
        return False
    if blob.directory != publication.directory:  # away, or on a disk that is missing
        batch.move_blob(blob, publication.directory, publication.allocated_bytes)
    batch.clear_intents(publication.digest)
    return True


def bury(batch: Batch, digests: Iterable[bytes]) -> None:
    """As `MetaEngine.bury`. A doomed blob's intent stays: it may be of a new copy on its way."""
    for digest in digests:
        check_digest(digest)
        if not batch.bury(digest):
            batch.clear_intents(digest)


def forget(batch: Batch, inos: Iterable[int]) -> None:
    """As `MetaEngine.forget`."""
    for ino in inos:
        inode = batch.find(ino)
        if inode is not None and inode.nlink == 0:
            batch.drop(inode)


def recover(batch: Batch) -> Recovery:
    """As `MetaEngine.recover`."""
    drop_wrong_dooms(batch)
    loose = [int.from_bytes(key, "big") for key in batch.keys(batch.tables.loose, b"")]
    dropped = 0
    for ino in loose:
        inode = batch.find(ino)
        if inode is None or not is_loose(inode):  # another node of the cluster saw to it
            batch.txn.delete(records.pack_ordered(ino), db=batch.tables.loose)
            continue
        dropped += 1
        for parent, name in batch.names(ino):
            batch.remove_name(parent, name, ino)
        batch.drop(inode)
    intended = [records.split_intent_key(key) for key in batch.keys(batch.tables.intent, b"")]
    unused: list[tuple[bytes, int]] = []
    open_blobs: list[tuple[bytes, int]] = []
    for digest, directory in intended:
        blob = batch.blob(digest)
        is_used = blob is not None and blob.references and blob.directory == directory
        (open_blobs if is_used else unused).append((digest, directory))
    return Recovery(tuple(unused), tuple(open_blobs), tuple(doomed(batch, None)), dropped)


def doomed(view: View, limit: int | None) -> list[Blob]:
    """Doomed blobs, at most `limit`: those that no file holds, whatever else is said to be doomed,
    for their files are about to go."""
    found: list[Blob] = []
    for digest in view.keys(view.tables.doomed, b""):
        if limit is not None and len(found) >= limit:
            break
        blob = view.blob(digest)
        if blob is not None and not blob.references:
            found.append(blob)
    return found


def drop_wrong_dooms(batch: Batch) -> None:
    """Take from the doomed blobs those that files hold, or that nobody knows."""
    for digest in list(batch.keys(batch.tables.doomed, b"")):
        blob = batch.blob(digest)
        if blob is None or blob.references:
            batch.txn.delete(digest, db=batch.tables.doomed)
