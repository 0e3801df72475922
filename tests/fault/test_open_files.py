"""Writes and syncs of open files while a disk fails or others close the same file."""

import errno
import os
import threading

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.config import MIB
from kvfs.node import Node
from tests.open_files import create_empty, opened
from tests.own_node import load

SERVED_BY = pytest.mark.parametrize("why_not", [None, "by Python"], ids=["kernel", "python"])


def fill_disk(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """Have the disk take so much more, and then say that it is full."""
    pwrite = os.pwrite

    def pwrite_some(fd: int, data: memoryview, offset: int) -> int:
        nonlocal room_bytes
        if room_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = pwrite(fd, data[:room_bytes], offset)
        room_bytes -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite_some)


@SERVED_BY
async def test_a_write_that_fails_half_way_makes_no_file_longer(
    node: Node, monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    async with opened(node, why_not=why_not) as files:
        fh, inode = create_empty(node, files, b"a", os.O_DIRECT)
        version = files.versions.get(inode.ino)
        assert version is not None and (version.through is None) == bool(why_not)
        await files.write(fh, 0, b"told" * 1024)
        fill_disk(monkeypatch, 5000)
        with pytest.raises(OSError, match="No space left"):
            await files.write(fh, 4096, b"lost" * 4096)
        fill_disk(monkeypatch, 0)
        with pytest.raises(OSError, match="No space left"):
            await files.write(fh, 0, b"lost")
        monkeypatch.undo()
        assert files.versions.overlay(inode)[0].size_bytes == 4096
        await files.flush(fh)
        await files.release(fh)
        assert load(node, b"a") == b"told" * 1024


async def test_a_write_beside_those_of_the_kernel_holds_up_nobody_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an open with O_DIRECT, as libaio has them under way with no lock of the kernel's."""
    threads = []
    pwrite = os.pwrite

    def note(fd: int, data: memoryview, offset: int) -> int:
        threads.append(threading.current_thread())
        return pwrite(fd, data, offset)

    async with opened(node) as files:
        fh, inode = create_empty(node, files, b"a", os.O_DIRECT)
        monkeypatch.setattr(os, "pwrite", note)
        await files.write(fh, 0, b"alone")
        other = await files.open(inode.ino, os.O_WRONLY, 1, is_root=True)
        await files.write(fh, 0, b"beside")
        for handle in (fh, other.fh):
            await files.flush(handle)
            await files.release(handle)
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False]


class SlowSync:
    """fsync that waits until it is let go on, and notes which files it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.inodes: list[int] = []
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, fd: int) -> None:
        self.begun.set()
        assert self.may_go_on.wait(10)
        self._sync(fd)
        self.inodes.append(os.fstat(fd).st_ino)


@pytest.mark.parametrize("flags", [0, os.O_SYNC])
async def test_a_sync_is_of_its_file_whoever_closes_and_writes_meanwhile(
    node: Node, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    async with opened(node, why_not="by Python") as files:
        fh, inode = create_empty(node, files, b"a")
        version = files.versions.get(inode.ino)
        assert version is not None and version.stage is not None
        fd = version.stage.fd
        file = os.fstat(fd).st_ino
        synchronous = await files.open(inode.ino, os.O_WRONLY | flags, 1, is_root=True)
        slow = SlowSync(monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.write, synchronous.fh, 0, b"first" * 1000)
            if not flags:
                await wait_all_tasks_blocked()
                nursery.start_soon(lambda: files.sync(fh, data_only=False))
            assert await trio.to_thread.run_sync(slow.begun.wait, 10)
            await files.flush(fh)
            await files.write(fh, 0, b"again")
            await node.reclaim.remove_queued()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
            slow.may_go_on.set()
        assert slow.inodes == [file]
        for handle in (synchronous.fh, fh):
            await files.flush(handle)
            await files.release(handle)
        assert load(node, b"a") == b"again" + b"first" * 999


@SERVED_BY
async def test_a_sync_is_also_of_what_another_close_has_published(
    node: Node, monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    async with opened(node, why_not=why_not) as files:
        fh, inode = create_empty(node, files, b"a", os.O_DIRECT)
        await files.write(fh, 0, b"x" * MIB)
        await files.flush(fh)
        version = files.versions.get(inode.ino)
        assert version is not None and version.content is not None
        slow = SlowSync(monkeypatch)
        slow.may_go_on.set()
        await files.sync(fh, data_only=False)
        assert slow.inodes == [os.fstat(version.content.fd).st_ino]
        await files.release(fh)
