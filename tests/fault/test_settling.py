"""Files that were closed and wait to be published, while others come and go or their disk fails.
The kernel's part is played by the tests: it writes into the stage, and gives a number for it."""

import errno
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.config import MIB
from kvfs.meta.contract import ROOT_INO, Inode
from kvfs.node import Node
from mount.handles import OpenFiles
from mount.passthrough import BackingIds

DATA = b"closed" * (MIB // 2)
WRITE = os.O_WRONLY | os.O_CREAT


@asynccontextmanager
async def opened(node: Node) -> AsyncIterator[OpenFiles]:
    """The open files of a mount that the kernel serves."""
    files = OpenFiles(node, lambda number: None, lambda number: False)
    files.backing = BackingIds(-1, None, ioctl=lambda fd, request, argument: 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.run)
        yield files
        nursery.cancel_scope.cancel()
    files.close()


def create(node: Node, files: OpenFiles, name: bytes = b"a") -> tuple[int, Inode]:
    """A new file with `DATA`; its handle."""

    def make() -> Inode:
        return node.meta.make(ROOT_INO, name, stat.S_IFREG | 0o600, 0, 0, node.now_ns())

    made, inode = files.create(make, WRITE, is_root=True)
    version = files.versions.get(inode.ino)
    assert version is not None and version.through is not None
    os.pwrite(version.through.stage.fd, DATA, 0)
    return made.fh, inode


def load(node: Node, name: bytes) -> bytes:
    """All bytes of a published file."""
    (inode,) = node.meta.resolve([name])
    assert inode is not None
    fd = node.contents.open_inode(inode)
    assert fd is not None
    with os.fdopen(fd, "rb") as file:
        return file.read()


async def close(files: OpenFiles, fh: int) -> None:
    await files.flush(fh)
    await files.release(fh)


async def test_who_came_before_a_close_goes_after_it(node: Node) -> None:
    async with opened(node) as files:
        fh, inode = create(node, files)
        version = files.versions.get(inode.ino)
        assert version is not None
        async with trio.open_nursery() as nursery:
            async with version.lock:  # as a close has, that waits for room
                nursery.start_soon(files.truncate, inode.ino, None, MIB, 1)
                await wait_all_tasks_blocked()
                assert await files._keep(version)
            await files.release(fh)
        await files.settling.settle_all()
        assert node.meta.inode(inode.ino).is_published  # type: ignore[union-attr]  # is there
        assert load(node, b"a") == DATA[:MIB]
        assert files.versions.get(inode.ino) is None


async def test_a_disk_that_removes_nothing_stops_no_publication(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be removed")

    def refuse(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    async with opened(node) as files:
        fh, inode = create(node, files)
        await close(files, fh)
        gone_fh, gone = create(node, files, b"gone")
        await close(files, gone_fh)
        monkeypatch.setattr(os, "unlink", refuse)
        node.unlink(ROOT_INO, b"gone")
        await files.settling.settle_all()
        monkeypatch.undo()
        assert load(node, b"a") == DATA
        assert files.versions.get(inode.ino) is None and files.versions.get(gone.ino) is None
        assert node.meta.inode(gone.ino) is None


async def test_an_overwritten_file_names_what_it_replaces(node: Node) -> None:
    async with opened(node) as files:
        fh, inode = create(node, files)
        await close(files, fh)
        await files.settling.settle_all()
        first = node.meta.inode(inode.ino)
        assert first is not None
        again = await files.open(inode.ino, os.O_WRONLY | os.O_TRUNC, 1, is_root=True)
        version = files.versions.get(inode.ino)
        assert version is not None and version.through is not None
        os.pwrite(version.through.stage.fd, DATA[::-1], 0)
        await close(files, again.fh)
        kept = version.through.kept
        assert kept is not None and kept.replaces == first.digest
        await files.settling.settle_all()
        assert load(node, b"a") == DATA[::-1]
