"""Chunk files that came through the mount, or got another name there: engines publish theirs with
what they are, of these it has to be found."""

import logging
import os
from collections.abc import Callable

import trio

from kvfs.chunk import chunk_info
from kvfs.errors import Corrupt, KvfsError
from kvfs.meta.contract import ChunkInfo, Inode, MetaEngine
from kvfs.names import CHUNK_SUFFIX, chunk_path, namespace_path, parse_chunk_path
from kvfs.stored import read_header

log = logging.getLogger(__name__)


class ChunkFiles:
    """`open_inode` gives a descriptor of a published file, which `close` takes back; None: a
    miss."""

    def __init__(
        self,
        engine: MetaEngine,
        open_inode: Callable[[Inode], int | None],
        close: Callable[[int], None],
    ) -> None:
        self._meta = engine
        self._open_inode = open_inode
        self._close = close

    async def index(self, inode: Inode) -> None:
        """Have a file in the tree of prefixes as far as its header says what its name says: engines
        take it for a miss else. Never fails, since what gave the file its name has happened."""
        if not (inode.is_regular and inode.is_published):
            return
        try:
            info = await self._find(inode)
            now = self._meta.inode(inode.ino)
            if now is None or now.digest != inode.digest:
                return  # it has other content by now, which is looked at as well
            known = self._meta.chunk(inode.ino)
            if info is None and known is not None:
                self._meta.drop_chunk(inode.ino)
            elif info is not None and info != known:
                self._meta.set_chunk(inode.ino, info)
        except (KvfsError, OSError) as error:
            log.warning("inode %d: its header cannot be read: %s", inode.ino, error)

    async def _find(self, inode: Inode) -> ChunkInfo | None:
        """What a file is as a chunk, by its header and one of its names; None for no chunk."""
        if not self._places(inode.ino):
            return None
        fd = self._open_inode(inode)
        if fd is None:
            return self._meta.chunk(inode.ino)
        try:
            header = await trio.to_thread.run_sync(read_header, fd, inode.size_bytes)
        except Corrupt as error:
            log.info("inode %d is no chunk file: %s", inode.ino, error.reason)
            return None
        finally:
            self._close(fd)
        said = namespace_path(header.model, header.fingerprint), header.key
        if said in self._places(inode.ino):  # which may have changed meanwhile
            return chunk_info(header)
        log.info("inode %d is by its header %s", inode.ino, os.fsdecode(chunk_path(*said)))
        return None

    def _places(self, ino: int) -> set[tuple[bytes, str]]:
        """Namespace and key of a file, by each of its names that is a chunk's."""
        if not any(name.endswith(CHUNK_SUFFIX) for _, name in self._meta.names_of(ino)):
            return set()  # without a walk to the root for each name
        parsed = map(parse_chunk_path, self._meta.paths_of(ino))
        return {found for found in parsed if found is not None}
