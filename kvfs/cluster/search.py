"""Finding out what a node of a cluster has, when its database does not know: it has just joined
with files of its own, or has lost what it knew. The names and the files that hold a digest are on
the server, so that most of it is found there; the node serves all the while.

`Node.upkeep_lock` is held throughout, and `Node.is_searching`: gc takes nothing before all is
found, and is refused meanwhile, since a search may last as long as a disk or the server is away.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import trio

from kvfs.belonging import Belonging, aside_of, write_belonging
from kvfs.blobs import BlobDirectory
from kvfs.cluster.adoption import adopt, remove_aside
from kvfs.config import (
    CLUSTER_SEARCH_RETRY_S,
    CLUSTER_SWEEP_PAUSE_S,
    RECHECK_STEP,
    SEARCH_BLOBS,
)
from kvfs.errors import KvfsError
from kvfs.meta.contract import Publication
from kvfs.meta.redis import RedisEngine
from kvfs.node import Node
from kvfs.stored import allocated_bytes
from kvfs.upkeep import collect_garbage_locked, name_chunks, next_batch, unknown_blobs

log = logging.getLogger(__name__)


class Search:
    """What a start leaves to be done; `run` does it. Each part may be cut short, and begins again
    then at the next start."""

    def __init__(self, node: Node, engine: RedisEngine, belonging: Belonging) -> None:
        self._node = node
        self._engine = engine
        self._home: Path = node.config.home
        self._belonging = belonging
        self._is_whole = None not in node.directories

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once gc is refused."""
        async with self._node.upkeep_lock:
            self._node.is_searching = True
            task_status.started()
            told: type[Exception] | None = None
            while True:
                try:
                    await self._run()
                except (KvfsError, OSError) as error:  # ends no node: its other files are served
                    if told is not type(error):
                        log.warning("own files are not all found yet, trying again: %s", error)
                    told = type(error)
                    await trio.sleep(CLUSTER_SEARCH_RETRY_S)
                else:
                    break
            self._node.is_searching = False

    async def _run(self) -> None:
        await self._adopt_names()
        if not self._belonging.is_searched:
            await self._find_blobs()
        if self._belonging.former_ids and self._is_whole:
            await self._end_former()

    async def _adopt_names(self) -> None:
        read_ahead = self._engine.read_holders_ahead
        for aside in aside_of(self._home):
            if await adopt(self._node, aside, read_ahead) and self._is_whole:
                await trio.to_thread.run_sync(remove_aside, aside)

    async def _find_blobs(self) -> None:
        copies = named = 0
        for index, directory in enumerate(self._node.directories):
            if directory is None:
                continue
            batches = directory.scan()
            while batch := await trio.to_thread.run_sync(_next_blobs, batches):
                copies += await self._find_copies(index, directory, batch)
                named += await name_chunks(self._node, index, batch)
        collected = await collect_garbage_locked(self._node)
        if copies or named or collected.orphan_blobs:
            log.info("found %d copies and %d chunk files; %s", copies, named, collected)
        if self._is_whole:  # else once more when its disk is back
            self._note(replace(self._belonging, is_searched=True))

    async def _find_copies(
        self, index: int, directory: BlobDirectory, blobs: list[tuple[bytes, int]]
    ) -> int:
        """Those of some blobs that files of the cluster hold are copies of this node."""
        unknown = unknown_blobs(self._node, index, blobs)
        found = await trio.to_thread.run_sync(_look_at, index, directory, unknown)
        count = 0
        while found:
            step, found = found[:RECHECK_STEP], found[RECHECK_STEP:]
            known = self._node.meta.blobs([one.digest for one in step])
            step = [one for one, blob in zip(step, known, strict=True) if blob is None]
            count += sum(self._engine.add_found(step, self._belonging.former_ids))
            await trio.lowlevel.checkpoint()
        return count

    async def _end_former(self) -> None:
        """What this node had under another id, and has not found, is lost: it is said of that id
        no more that it has it."""
        former, cursor, ended = self._belonging.former_ids, b"0", 0
        for node_id in former:  # nobody is left who would finish it
            while (names := self._engine.drop_loose(node_id, if_gone=False)) is not None:
                for parent, name, ino in names:
                    self._node.notify(parent, name, ino)
                await trio.lowlevel.checkpoint()
        while True:
            cursor, digests = self._engine.digests_of(former, cursor)
            ended += len(digests)
            while digests:
                step, digests = digests[:RECHECK_STEP], digests[RECHECK_STEP:]
                self._node.drop_lost(self._engine.end_nodes(former, step, self._node.now_ns()))
                await trio.lowlevel.checkpoint()
            if cursor == b"0":
                break
            await trio.sleep(CLUSTER_SWEEP_PAUSE_S)
        log.info("%d files that this node had are lost here", ended)
        self._note(replace(self._belonging, former_ids=()))

    def _note(self, belonging: Belonging) -> None:
        write_belonging(self._home, belonging)
        self._belonging = belonging


def _next_blobs(batches: Iterator[list[tuple[bytes, int]]]) -> list[tuple[bytes, int]]:
    """The next blobs of a scan, of several directories, since most have one or two. Blocks."""
    blobs: list[tuple[bytes, int]] = []
    while len(blobs) < SEARCH_BLOBS and (batch := next_batch(batches)):
        blobs += batch
    return blobs


def _look_at(
    index: int, directory: BlobDirectory, blobs: list[tuple[bytes, int]]
) -> list[Publication]:
    """Blobs as they lie there. Blocks."""
    found = []
    for digest, size_bytes in blobs:
        try:
            status = os.lstat(directory.blob_path(digest))
        except OSError as error:
            log.info("blob %s cannot be looked at: %s", digest.hex(), error.strerror)
            continue
        found.append(Publication(digest, size_bytes, allocated_bytes(status), index, 0))
    return found
