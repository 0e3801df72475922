"""The bytes of published versions: opened once for all who have a version open.

A file that only another node has is open when its first bytes are here, and is read while the rest
comes. What was read of a fetch that fails is of no use: all reads of that version fail from then
on, and the next open gets a new one, with pages of its own.
"""

import errno

from kvfs.arriving import Arriving
from kvfs.errors import NamespaceError
from kvfs.node import Node
from mount.content import OpenBytes
from mount.locks import Held
from mount.readers import Readers
from mount.stages import Version


class PublishedBytes:
    """The one place that chooses how reads of published bytes are served."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._readers = Readers()

    async def open(self, version: Version, thread: int = 0) -> OpenBytes:
        """The version's bytes, of a blob after its digest was checked. `thread`: that opens it, if
        it is known. ESTALE when the blob has gone for a newer one."""
        if version.content is not None:
            return version.content
        async with Held(version.lock):
            if version.content is None:
                opened = await self._open_blob(version, thread)
                close = self._node.reclaim.close
                if isinstance(opened, int):
                    version.content = OpenBytes(opened, close)
                else:
                    version.was_arriving = True
                    version.content = OpenBytes(opened.open(), close, opened)
            return version.content

    async def _open_blob(self, version: Version, thread: int) -> int | Arriving:
        """A descriptor of the version's blob, or what comes to be that."""
        inode = self._node.meta.inode(version.ino)
        if inode is None or inode.digest != version.digest:
            raise NamespaceError(errno.ESTALE)
        try:
            return await self._node.begin_content(version.ino, self.reader_of(thread))
        except NamespaceError as error:
            now = self._node.meta.inode(version.ino)
            if now is not None and now.nlink and now.digest == version.digest:
                raise  # no node of the cluster has its bytes
            raise NamespaceError(errno.ESTALE) from error

    def reader_of(self, thread: int) -> int | None:
        """A number for who reads, if it is known and somebody asks for it."""
        return self._readers.process_of(thread) if self._node.hears_uses else None
