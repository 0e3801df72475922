"""Slow work over a whole store, done in small steps so that the node goes on serving meanwhile."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import trio

from kvfs.blob_files import Foreign
from kvfs.blobs import BlobDirectory
from kvfs.chunk import ChunkHeader, chunk_info
from kvfs.errors import Corrupt, InvalidInput, NamespaceError, Unavailable
from kvfs.meta.contract import Publication
from kvfs.names import chunk_path, escape, namespace_path
from kvfs.node import Node
from kvfs.stored import allocated_bytes, read_header

log = logging.getLogger(__name__)

_STEP = 16  # names given back before everyone else has a turn


@dataclass(frozen=True, slots=True)
class Collected:
    """What `collect_garbage` removed."""

    staging_files: int
    orphan_blobs: int
    orphan_bytes: int
    foreign_names: int = 0  # that were put into staging by hand before the node began
    left: tuple[str, ...] = ()  # paths of what is not ours to remove; some of them
    left_count: int = 0


async def collect_garbage(node: Node) -> Collected:
    """Remove staging files of dead runs and blobs that no metadata knows; never a live writer's.
    Of what no node made it takes what was in staging before the node began, but no directory with
    content, and tells the rest. Waits for other work of this kind; raises `Unavailable` while the
    node looks for its own files."""
    _refuse_in_search(node)
    async with node.upkeep_lock:
        return await collect_garbage_locked(node)


def _refuse_in_search(node: Node) -> None:
    """A search lasts as long as a disk or the metadata server is away: nobody waits for it."""
    if node.is_searching:
        raise Unavailable(
            f"{escape(os.fsencode(node.config.home))}: the node still looks for its own files; try"
            " again later"
        )


async def collect_garbage_locked(node: Node) -> Collected:
    """As `collect_garbage`, for who holds `Node.upkeep_lock`."""
    staging = orphans = orphan_bytes = foreign = 0
    left = Foreign()
    for index, directory in enumerate(node.directories):
        if directory is None:
            continue
        staging += await trio.to_thread.run_sync(directory.purge_staging)
        foreign += await trio.to_thread.run_sync(directory.purge_foreign, left)
        batches = directory.scan(left)
        while batch := await trio.to_thread.run_sync(next_batch, batches):
            for digest, size_bytes in unknown_blobs(node, index, batch):
                # Once more: it may have been published while others were removed.
                is_orphan = unknown_blobs(node, index, [(digest, size_bytes)])
                if is_orphan and await _remove(directory, digest):
                    orphans += 1
                    orphan_bytes += size_bytes
    return Collected(staging, orphans, orphan_bytes, foreign, tuple(left.paths), left.count)


async def _remove(directory: BlobDirectory, digest: bytes) -> bool:
    """Remove a blob, taking its file out of the way before anyone else has a turn."""
    try:
        path = directory.trash(digest)
        if path is not None:
            await trio.to_thread.run_sync(os.unlink, path)
    except OSError as error:
        log.warning("blob %s cannot be removed: %s", digest.hex(), error.strerror)
        return False
    return path is not None


def unknown_blobs(
    node: Node, index: int, blobs: Sequence[tuple[bytes, int]]
) -> list[tuple[bytes, int]]:
    """Those blobs of a directory that no metadata knows to lie there."""
    known = node.meta.blobs([digest for digest, _ in blobs])
    return [
        item
        for item, blob in zip(blobs, known, strict=True)
        if blob is None or blob.directory != index
    ]


async def rebuild(node: Node) -> int:
    """Give chunk files that lost their metadata their names back, from their headers, here and in
    tiers; how many.

    Only names are rebuilt here: bytes are checked when they are read, like all others. Names that
    exist are newer, and stay as they are. Blobs that no header names stay for `collect_garbage`.
    Waits and raises as `collect_garbage`.
    """
    _refuse_in_search(node)
    rebuilt = 0
    async with node.upkeep_lock:
        for index, directory in enumerate(node.directories):
            if directory is None:
                continue
            batches = directory.scan()
            while batch := await trio.to_thread.run_sync(next_batch, batches):
                rebuilt += await name_chunks(node, index, batch)
        if node.tiering is not None:
            rebuilt += await node.tiering.rebuild_locked()
    return rebuilt


async def name_chunks(node: Node, index: int, blobs: Sequence[tuple[bytes, int]]) -> int:
    """As `rebuild`, of some blobs of a directory, for who holds `Node.upkeep_lock`."""
    directory = node.directories[index]
    assert directory is not None
    known = node.meta.blobs([digest for digest, _ in blobs])
    lost = [item for item, blob in zip(blobs, known, strict=True) if blob is None]
    found = await trio.to_thread.run_sync(_read_publications, directory, index, lost)
    named = 0
    for count, publication in enumerate(found, 1):
        try:
            # Unless it was stored meanwhile, perhaps under a name of somebody's choice.
            if node.meta.blobs([publication.digest])[0] is None:
                named += node.publisher.publish_found(publication)
        except NamespaceError as error:
            log.warning("%s: %s", os.fsdecode(publication.path), error)
        if count % _STEP == 0:
            await trio.lowlevel.checkpoint()
    return named


def next_batch(batches: Iterator[list[tuple[bytes, int]]]) -> list[tuple[bytes, int]]:
    """The next blobs of a scan, none at its end. Blocks."""
    return next((batch for batch in batches if batch), [])


def _read_publications(
    directory: BlobDirectory, index: int, blobs: list[tuple[bytes, int]]
) -> list[Publication]:
    publications = []
    for digest, size_bytes in blobs:
        try:
            fd = directory.open_blob(digest)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("blob %s cannot be read: %s", digest.hex(), error.strerror)
            continue
        try:
            status = os.fstat(fd)
            header = read_header(fd, size_bytes)
            publications.append(
                Publication(
                    digest=digest,
                    size_bytes=size_bytes,
                    allocated_bytes=allocated_bytes(status),
                    directory=index,
                    mtime_ns=status.st_mtime_ns,
                    path=path_of(header),
                    uid=os.geteuid(),
                    gid=os.getegid(),
                    chunk=chunk_info(header),
                )
            )
        except (Corrupt, InvalidInput) as error:
            log.info("blob %s is no chunk: %s", digest.hex(), error)
        except OSError as error:
            log.warning("blob %s cannot be read: %s", digest.hex(), error.strerror)
        finally:
            os.close(fd)
    return publications


def path_of(header: ChunkHeader) -> bytes:
    """Where a chunk file belongs."""
    return chunk_path(namespace_path(header.model, header.fingerprint), header.key)
