"""The open files of a mount, without the mount: who tests plays the kernel's part."""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from kvfs.meta.contract import ROOT_INO, Inode
from kvfs.node import Node
from mount.handles import OpenFiles
from mount.passthrough import BackingIds


@asynccontextmanager
async def opened(node: Node, *, why_not: str | None = None) -> AsyncIterator[OpenFiles]:
    """The open files of a mount that the kernel serves, but for `why_not`."""
    files = OpenFiles(node, lambda number: None, lambda number: False, lambda: False)
    files.backing = BackingIds(-1, why_not, ioctl=lambda fd, request, argument: 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.run)
        yield files
        nursery.cancel_scope.cancel()
    files.close()


def create_empty(node: Node, files: OpenFiles, name: bytes, flags: int = 0) -> tuple[int, Inode]:
    """A new file that root has open for writing only; its handle."""

    def make() -> Inode:
        return node.meta.make(ROOT_INO, name, stat.S_IFREG | 0o600, 0, 0, node.now_ns())

    made, inode = files.create(make, os.O_WRONLY | os.O_CREAT | flags, is_root=True)
    return made.fh, inode
