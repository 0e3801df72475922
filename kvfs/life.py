"""From a configuration to a running node, and back: locks, recovery, background work, clean stop.

`running` is what `kvfs mount` and `kvfs serve` have in common. A store whose machine went down
while a node ran has metadata that no one vouches for (LMDB does not sync each transaction): it is
set aside, like a damaged one, and the names of chunk files are rebuilt from their headers. In a
cluster the names are elsewhere, and `kvfs.cluster.search` finds what lies here. A killed process
costs nothing.
"""

import errno
import logging
import os
import resource
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import trio

from kvfs.belonging import (
    Belonging,
    confirm_join,
    read_belonging,
    settle_alone,
    settle_in_cluster,
    undo_join,
)
from kvfs.blobs import BlobDirectory
from kvfs.boot import boot_id
from kvfs.config import CLUSTER_LEASE_S, CLUSTER_RENEW_S, META_SYNC_INTERVAL_S
from kvfs.errors import Corrupt, InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.home import STORE_MARK, has_lost_mark, refuse_part
from kvfs.kept import publish_kept, refuse_to_join
from kvfs.local import serve_clients
from kvfs.meta.contract import Inode
from kvfs.meta.lmdb import LmdbEngine
from kvfs.names import escape
from kvfs.node import Node
from kvfs.roster import ROSTER, Known, mark_part, read_roster, write_roster
from kvfs.settings.words import Config
from kvfs.stored import copy_bytes, digest_file, may_have_writer
from kvfs.trust import Trust
from kvfs.upkeep import collect_garbage, rebuild

log = logging.getLogger(__name__)
_NO_METADATA = "there are blobs without metadata"


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    """Own a store for the length of a `with` block, serving its socket.

    Raises `OwnedElsewhere` when another node owns it and `InvalidInput` when a directory is unfit.
    """
    _raise_descriptor_limit()
    with ExitStack() as stack:
        meta = config.home / "meta"
        with _needs_room(config.home):
            directories, absent = _open_directories(config, stack)
            undo_join(config.home)  # of a start that was killed
            if config.cluster is None:
                settle_alone(config.home)
            trust = _trust(meta)
            reason = trust.distrust
            if config.cluster is not None and reason is None:
                refuse_to_join(str(config.home), directories, read_belonging(config.home))
            if reason is not None:
                trust.set_aside()
            stack.callback(undo_join, config.home)
            stack.callback(trust.undo)
            belonging = None
            if config.cluster is not None:
                belonging = settle_in_cluster(config.home, config.cluster)
            elif not (meta / "data.mdb").exists() and _has_blobs(directories):
                reason = reason or _NO_METADATA
            trust.begin(is_rebuilding=belonging is None and reason is not None)
        engine = _open_engine(config, meta, belonging)
        stack.callback(engine.close)
        stack.callback(trust.settle, engine)
        if belonging is None and reason is None and engine.is_new and _has_blobs(directories):
            reason = _NO_METADATA
            trust.begin(is_rebuilding=True)
        node = Node(config, directories, engine)
        node.absent = absent
        if config.cluster is not None:
            await _wait_for_place(engine, config.home)
        if kept := await publish_kept(node):
            log.info("%d files were published that had been closed before a crash", len(kept))
        recover(node)
        if belonging is not None and reason is not None:
            node.notices.append(f"{reason}: finding out what lies here")
            log.warning("%s", node.notices[-1])
        elif reason is not None:
            node.notices.append(await _rebuild(node, reason))
            trust.begin(is_rebuilding=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.reclaim.remove_always)
            nursery.start_soon(_sync_always, node)
            nursery.start_soon(_index_names, node)
            async with (
                _with_tiers(node, kept),
                _with_neighbours(node, engine, belonging),
                _with_prefetch(node),
            ):
                await nursery.start(serve_clients, node)
                trust.served()
                log.info("serving %s", config.home)
                yield node
                nursery.cancel_scope.cancel()
        await node.reclaim.remove_queued()
        node.uses.write()
        node.open_blobs.write()
        await trio.to_thread.run_sync(engine.sync)
        trust.end()


async def _rebuild(node: Node, reason: str) -> str:
    """Give chunk files their names again; what a person is to know of all others."""
    log.warning("%s: rebuilding names from chunk files", reason)
    node.has_lost_names = True
    named, collected = await rebuild(node), await collect_garbage(node)
    log.info("rebuilt %d names; %s", named, collected)
    lost = "all names that were not of chunk files are lost"
    if collected.orphan_blobs:
        lost += f", {collected.orphan_blobs} blobs of {collected.orphan_bytes:,} bytes with them"
    return f"{reason}: {named} chunk files have their names back, {lost}"


@contextmanager
def _needs_room(home: Path) -> Iterator[None]:
    """Say of a full disk what it keeps from being."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(
            f"{escape(os.fsencode(home))}: its disk is full, so that no node can start; free 1 MiB"
        ) from error


def _trust(meta: Path) -> Trust:
    try:
        return Trust(meta)
    except OSError as error:
        subject = error.filename or meta
        raise Unavailable(f"{subject}: the metadata cannot be read: {error.strerror}") from error


def _open_engine(config: Config, meta: Path, belonging: Belonging | None) -> LmdbEngine:
    """The metadata of a node for itself, or of one of many."""
    uid, gid = os.geteuid(), os.getegid()
    if belonging is None:
        return LmdbEngine.open(meta, root_uid=uid, root_gid=gid)
    from kvfs.meta.primary import Refused  # only nodes of a cluster need its client
    from kvfs.meta.redis import RedisEngine

    assert config.cluster is not None
    try:
        return RedisEngine.join(
            meta,
            config.cluster.metadata,
            config.cluster.name,
            belonging.node_id,
            root_uid=uid,
            root_gid=gid,
        )
    except Unavailable as error:
        raise Unavailable(
            f"{error}; see that a server runs at {belonging.metadata} and takes connections from"
            " this machine, or name another one with --join or in [cluster]"
        ) from error
    except InvalidInput as error:
        if not isinstance(error.__cause__, Refused) or "user" not in error.reason:
            raise
        raise InvalidInput(
            error.subject,
            f"{error.reason}; write redis://USER:PASSWORD@HOST:6379 with what the server knows, or"
            " let it allow what docs/cluster.md lists",
        ) from error


async def _wait_for_place(engine: LmdbEngine, home: Path) -> None:
    """Return when no node of another place is a member under this one's id, which would lose what
    it has not finished. Raises `Unavailable` when it stays."""
    from kvfs.meta.members import TAKEN
    from kvfs.meta.redis import RedisEngine

    assert isinstance(engine, RedisEngine)
    end_s = trio.current_time() + 2 * CLUSTER_LEASE_S
    while engine.is_taken(str(home), boot_id()):
        if trio.current_time() > end_s:
            raise Unavailable(TAKEN)
        await trio.sleep(CLUSTER_RENEW_S)


@asynccontextmanager
async def _with_tiers(node: Node, published: Sequence[Inode]) -> AsyncIterator[None]:
    """Use the tiers of the configuration for the length of a `with` block, where there are some;
    they hear first of what was published without them."""
    if not node.config.tiers:
        yield
        return
    from kvfs.tiering.tiering import Tiering  # numpy and threads that most nodes never need

    tiering = Tiering(node)
    async with tiering.running():
        for inode in published:
            tiering.behind.published(inode)
        tiering.behind.settle()
        yield


@asynccontextmanager
async def _with_neighbours(
    node: Node, engine: LmdbEngine, belonging: Belonging | None
) -> AsyncIterator[None]:
    """Be a member of the cluster for the length of a `with` block, where there is one."""
    if belonging is None:
        yield
        return
    from kvfs.cluster.joined import Cluster
    from kvfs.cluster.search import Search
    from kvfs.meta.redis import RedisEngine

    assert isinstance(engine, RedisEngine) and node.config.cluster is not None
    engine.absent = {i for i, directory in enumerate(node.directories) if directory is None}
    async with Cluster(node, engine, node.config.cluster).running(), trio.open_nursery() as nursery:
        with _needs_room(node.config.home):
            confirm_join(node.config.home, belonging)
        await nursery.start(Search(node, engine, belonging).run)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _with_prefetch(node: Node) -> AsyncIterator[None]:
    """Bring files here ahead of their readers for the length of a `with` block, where there is
    anything to bring them from."""
    if node.config.cluster is None and not node.config.tiers:
        yield
        return
    from kvfs.prefetch.runner import Prefetcher

    async with trio.open_nursery() as nursery:
        await nursery.start(Prefetcher(node, node.config.prefetch).run)
        yield
        nursery.cancel_scope.cancel()


def recover(node: Node) -> None:
    """Finish what a dead node left: files renamed but not published, blobs to remove, staging, and
    blobs that somebody could write to."""
    left = node.meta.recover()
    for digest, index in left.intended:
        directory = node.directories[index] if index < len(node.directories) else None
        blob = node.meta.blobs([digest])[0]
        if directory is not None and (blob is None or blob.directory != index):
            path = directory.trash(digest)
            if path is not None:
                os.unlink(path)
    renewed = []
    for digest, index in left.open_blobs:
        directory = node.directories[index] if index < len(node.directories) else None
        if directory is None:
            continue  # until its disk is back
        if not _renew(directory, digest):
            node.contents.quarantine(
                digest, "it was written to after it was stored, when its node had died"
            )
        renewed.append(digest)
    node.meta.bury([*(digest for digest, _ in left.intended), *renewed])
    node.reclaim.reap()
    staged = sum(d.purge_staging() for d in node.directories if d is not None)
    if left.dropped_inodes or staged or left.intended or left.doomed:
        log.info(
            "recovered: %d unfinished files dropped, %d staging files removed",
            left.dropped_inodes,
            staged,
        )


def _renew(directory: BlobDirectory, digest: bytes) -> bool:
    """See to it that nobody can write to a blob any more: where somebody still has its file open
    for that, a copy takes its place. False when the bytes are not those of the digest, or cannot be
    read or copied."""
    try:
        source = directory.open_blob(digest)
    except FileNotFoundError:
        return True  # lost, which the next open will see
    try:
        if may_have_writer(source):
            return _put_copy(directory, digest, source)
        return digest_file(source) == digest
    except (OSError, Corrupt) as error:
        log.warning("blob %s cannot be read or copied: %s", digest.hex(), error)
        return False
    finally:
        os.close(source)


def _put_copy(directory: BlobDirectory, digest: bytes, source: int) -> bool:
    """Put a copy of an open file in a blob's place; False when it is not that blob."""
    staged = directory.stage()
    try:
        copy_bytes(source, staged.fd, os.fstat(source).st_size)
        is_right = digest_file(staged.fd) == digest
        if is_right:
            directory.adopt(staged.name, digest)
        return is_right
    finally:
        os.close(staged.fd)
        directory.discard(staged.name)


def _open_directories(
    config: Config, stack: ExitStack
) -> tuple[list[BlobDirectory | None], list[str]]:
    """Take all directories of the store, in the order in which its metadata counts them; and what
    is to be said of those that are missing.

    The first directory remembers the others and their limits, so that a start that names only the
    first finds all. One that is missing (a disk not mounted) is None: its blobs are misses until it
    is back. It is not made again: that would be on the disk that its own is mounted on.
    """
    home = config.home
    refuse_part(home)
    first = BlobDirectory.open(config.directories[0])
    stack.callback(first.close)
    (home / "meta").mkdir(mode=0o700, exist_ok=True)
    roster = read_roster(home / ROSTER)
    remembered = {known.config.path for known in roster}
    opened = {first.store_id: first}
    for item in config.directories[1:]:
        if item.path in remembered and not (item.path / STORE_MARK).exists():
            continue
        directory = BlobDirectory.open(item)
        stack.callback(directory.close)
        opened[directory.store_id] = directory
    named = {directory.path for directory in opened.values()}
    order: list[BlobDirectory | None] = []
    absent = []
    for known in roster:
        back = opened.pop(known.store_id, None)
        if back is None:
            found = _reopen(known, named)
            if isinstance(found, str):
                log.warning("%s", found)
                absent.append(found)
            else:
                back = found
                stack.callback(back.close)
        order.append(back)
    order += opened.values()
    if order[0] is None or order[0].path != home:
        raise InvalidInput(
            str(home), "is not the first directory of this store; name that one first"
        )
    for part in order[1:]:
        if part is not None:
            mark_part(part, order[0])
    write_roster(
        home / ROSTER,
        [Known(d.store_id, d.config) if d is not None else roster[i] for i, d in enumerate(order)],
    )
    return order, absent


def _reopen(known: Known, named: Container[Path]) -> BlobDirectory | str:
    """A directory that an earlier start named, with the limits that it had then, if it is still
    there and still the same; else what became of it. `named`: those that are open already."""
    path = known.config.path
    shown = escape(os.fsencode(path))
    if not (path / STORE_MARK).exists():
        if has_lost_mark(path):
            cause = f"has lost its {STORE_MARK}, which kvfs init {shown} makes again"
        elif path.exists():
            cause = "is empty: is its disk mounted?"
        else:
            cause = "is not there"
        return f"{shown} {cause}; what lies in it is missing until it is back"
    if path not in named:
        directory = BlobDirectory.open(known.config)
        if directory.store_id == known.store_id:
            return directory
        directory.close()
    return f"{shown} now holds another store; what lay in the old one is missing"


def _has_blobs(directories: Sequence[BlobDirectory | None]) -> bool:
    return any(directory is not None and directory.has_blobs() for directory in directories)


async def _sync_always(node: Node) -> None:
    """Bound what a crash of the machine may lose; and do what could not be written before."""
    while True:
        await trio.sleep(META_SYNC_INTERVAL_S)
        node.uses.write()
        node.open_blobs.write()
        try:
            await trio.to_thread.run_sync(node.meta.sync)
        except KvfsError as error:  # not the end: the next time it may do
            log.warning("%s", error)
        while node.orphans.retry():
            await trio.lowlevel.checkpoint()


async def _index_names(node: Node) -> None:
    """Make look-ups fast, which are right without, in steps between everything else."""
    try:
        while node.meta.index_more():
            await trio.sleep(0)
    except Corrupt as error:
        log.error("look-ups stay slow: %s", error)


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
