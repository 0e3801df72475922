"""Published files shown as symbolic links to their blobs, where the kernel has no passthrough.

A name shows a regular file while that is open for writing, and a link once it is published and
closed. The kernel takes one inode number for one type, so a link has a number of its own
(`mount.numbers`). It looks a regular file up each time, so that the link shows as soon as the file
is closed; the other way round needs no haste, since a link leads to bytes that were published.

What an open does for a file is done when its link is read: what only another node has is fetched,
the blob is made read-only, its bytes are checked once since the node's start, and the use is noted.
See docs/mount.md for the limits.
"""

import errno
import os
import stat

import pyfuse3

from kvfs.errors import NamespaceError
from kvfs.meta.contract import Inode
from kvfs.node import Node
from mount.attributes import attributes
from mount.handles import OpenFiles
from mount.numbers import is_link, link_of

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class Links:
    """Which files of a mount show as links, and where those lead. With `is_on` False: none."""

    def __init__(self, node: Node, files: OpenFiles, *, is_on: bool) -> None:
        self._node = node
        self._files = files
        self.is_on = is_on

    def shows(self, inode: Inode) -> bool:
        """Whether names show a file as a link now."""
        return (
            self.is_on
            and inode.is_regular
            and inode.is_published
            and self._files.numbers.current(inode.ino) == inode.ino  # no other version is there
            and not self._files.versions.is_written(inode.ino)
        )

    def find(self, number: int) -> Inode | None:
        """The file behind a link's number; None for another number. ESTALE when it is gone."""
        if not is_link(number):
            return None
        inode = self._node.meta.inode(self._files.numbers.ino(number))
        if inode is None or not inode.is_published:
            raise NamespaceError(errno.ESTALE)
        return inode

    def attributes(self, inode: Inode) -> pyfuse3.EntryAttributes:
        """What lstat shows of a link, never kept by the kernel: the file may get new bytes."""
        entry = attributes(inode, link_of(inode.ino), is_changing=True)
        entry.st_mode = stat.S_IFLNK | 0o777
        entry.st_size = len(self._expected_target(inode.digest))
        entry.st_blocks = 0
        return entry

    async def read(self, inode: Inode, thread: int) -> bytes:
        """Where a file's blob lies, once its bytes are here and were checked. Raises `Corrupt`, and
        `NamespaceError` ENOENT for a blob that is gone, ESTALE for a file that changed."""
        self._node.refresh()
        self._check_same(inode)
        await self._node.bring([inode])
        fd = self._node.contents.open_inode(inode)
        if fd is None:
            raise NamespaceError(errno.ENOENT)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & _WRITABLE:  # before the check, so that what is checked stays as it is
                os.fchmod(fd, mode & ~_WRITABLE)
            await self._node.contents.check(inode.digest)
        finally:
            self._node.reclaim.close(fd)
        self._check_same(inode)
        target = self._target(inode.digest)
        if not target:
            raise NamespaceError(errno.ESTALE)
        self._node.touch([inode.ino], self._files.published.reader_of(thread))
        return target

    def _check_same(self, inode: Inode) -> None:
        """ESTALE when a file is gone or has other bytes by now."""
        now = self._node.meta.inode(inode.ino)
        if now is None or now.digest != inode.digest:
            raise NamespaceError(errno.ESTALE)

    def _target(self, digest: bytes) -> bytes:
        """Where a blob lies; empty when it is not here."""
        directory = self._node.contents.directory_of(digest)
        return b"" if directory is None else os.fsencode(directory.blob_path(digest))

    def _expected_target(self, digest: bytes) -> bytes:
        """Where a blob lies, or the first place for one that another node has."""
        first = self._node.directories[0]
        assert first is not None
        return self._target(digest) or os.fsencode(first.blob_path(digest))
