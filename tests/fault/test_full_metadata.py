"""Metadata that cannot be written for a while (a full disk): what nobody waits for comes later."""

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pyfuse3
import pytest
import trio

from kvfs.config import LINGER_S, META_SYNC_INTERVAL_S
from kvfs.errors import OutOfSpace
from kvfs.life import running
from kvfs.meta.contract import ROOT_INO, Inode
from kvfs.node import Node
from kvfs.settings.words import Config, DirectoryConfig
from mount.lingering import Lingering
from mount.operations import Operations
from mount.view import View
from tests.conftest import StartMount
from tests.disks import small_disk
from tests.processes import wait_until

FILE = 0o100644


@pytest.fixture(autouse=True)
def _warnings(allow_warnings: list[str]) -> None:
    allow_warnings += ["keep their room", "full", "cannot be published"]


class FullDisk:
    """Makes calls of a node's metadata fail, as long as it is full."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self._monkeypatch = monkeypatch
        self._meta = node.meta

    def refuse(self, *names: str) -> None:
        for name in names:
            self._monkeypatch.setattr(self._meta, name, self._wrapped(getattr(self._meta, name)))

    def _wrapped(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            if self.is_full:
                raise OutOfSpace("full")
            return call(*arguments, **options)

        return wrapped


@asynccontextmanager
async def a_node(path: Path) -> AsyncIterator[Node]:
    async with running(Config((DirectoryConfig(path / "store", min_free=0),))) as node:
        yield node


async def publish(node: Node, name: bytes, data: bytes) -> Inode:
    inode = node.meta.make(ROOT_INO, name, FILE, 0, 0, node.now_ns())
    stage = node.stage()
    os.pwrite(stage.fd, data, 0)
    published = await node.publish_stage(stage, inode.ino, node.now_ns())
    os.close(stage.fd)
    return published


async def test_who_lets_a_file_go_is_not_told_and_it_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node:
        disk = FullDisk(node, monkeypatch)
        inode = await publish(node, b"a", b"bytes")
        node.hold(inode.ino)
        node.unlink(ROOT_INO, b"a")
        disk.refuse("forget")
        node.release(inode.ino)
        assert node.meta.inode(inode.ino) is not None
        disk.is_full = False
        with trio.fail_after(10 * META_SYNC_INTERVAL_S):  # a background task does it
            while node.meta.inode(inode.ino) is not None:
                await trio.sleep(0.01)
        assert list((tmp_path / "store" / "blobs").glob("*/*/*")) == []


@pytest.mark.parametrize("failing", ["forget", "bury", "doomed"])
async def test_a_name_that_has_gone_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async with a_node(tmp_path) as node:
        inode = await publish(node, b"a", b"bytes")
        disk = FullDisk(node, monkeypatch)
        disk.refuse(failing)
        node.unlink(ROOT_INO, b"a")
        disk.is_full = False
        assert not node.orphans.retry()
        assert node.meta.inode(inode.ino) is None
        assert node.meta.usage().allocated_bytes[0] == 0


async def test_a_publication_that_was_made_is_told_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node:
        disk = FullDisk(node, monkeypatch)
        disk.refuse("bury")
        inode = await publish(node, b"a", b"bytes")
        stage = node.stage()
        os.pwrite(stage.fd, b"newer", 0)
        newer = await node.publish_stage(stage, inode.ino, node.now_ns())  # dooms the old blob
        os.close(stage.fd)
        assert node.meta.inode(inode.ino) == newer
        disk.is_full = False


async def test_a_file_that_was_held_again_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node:
        disk = FullDisk(node, monkeypatch)
        inode, other = await publish(node, b"a", b"bytes"), await publish(node, b"b", b"other")
        disk.refuse("forget")
        node.unlink(ROOT_INO, b"a")
        node.unlink(ROOT_INO, b"b")
        node.hold(inode.ino)
        disk.is_full = False
        assert not node.orphans.retry()
        assert node.meta.inode(other.ino) is None
        assert node.meta.inode(inode.ino) is not None
        node.release(inode.ino)
        assert node.meta.inode(inode.ino) is None


async def test_the_mount_outlives_a_forget_and_a_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node, trio.open_nursery() as nursery:
        disk = FullDisk(node, monkeypatch)
        operations = Operations(node, View(node))
        lingering: Lingering = operations.lingering
        inodes = [await publish(node, b"%d" % i, b"bytes %d" % i) for i in range(3)]
        nursery.start_soon(lingering.run)
        disk.refuse("forget")
        for number, inode in enumerate(inodes):
            lingering.keep(inode.ino)
            node.unlink(ROOT_INO, b"%d" % number)
        await operations.forget([(inodes[0].ino, 1), (inodes[1].ino, 1)])
        await trio.sleep(LINGER_S + 0.1)  # the timer's turn: the nursery still runs after it
        node._release_spare()
        disk.is_full = False
        assert not node.orphans.retry()
        assert [node.meta.inode(inode.ino) for inode in inodes] == [None] * 3
        nursery.cancel_scope.cancel()


async def test_a_fault_in_one_forget_spares_the_mount_and_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings += ["forget"]
    async with a_node(tmp_path) as node:
        operations = Operations(node, View(node))
        seen = []

        def drop(ino: int) -> None:
            seen.append(ino)
            raise RuntimeError("a bug")

        monkeypatch.setattr(operations.lingering, "drop", drop)
        await operations.forget([(7, 1), (8, 1)])
        assert seen == [7, 8]


async def test_a_file_that_nobody_published_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node:
        disk = FullDisk(node, monkeypatch)
        operations = Operations(node, View(node))
        opened, inode = operations.files.create(
            lambda: node.meta.make(ROOT_INO, b"a", FILE, 0, 0, node.now_ns()),
            os.O_WRONLY,
            is_root=True,
        )
        disk.refuse("publish", "intend", "unlink_all", "forget")
        with pytest.raises(OutOfSpace):
            await operations.files.flush(opened.fh)
        await operations.files.release(opened.fh)
        assert node.meta.lookup(ROOT_INO, b"a") is not None
        disk.is_full = False
        assert not node.orphans.retry()
        assert node.meta.inode(inode.ino) is None
        assert node.meta.lookup(ROOT_INO, b"a") is None
        assert operations.files.describe()["open_in_python"] == 0


async def test_a_mknod_without_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    async with a_node(tmp_path) as node:
        operations = Operations(node, View(node))
        FullDisk(node, monkeypatch).refuse("intend")
        asked = SimpleNamespace(uid=0, gid=0, pid=1)
        with pytest.raises(pyfuse3.FUSEError, check=lambda error: error.errno == errno.ENOSPC):
            await operations.mknod(ROOT_INO, b"a", FILE, 0, asked)  # type: ignore[arg-type]  # what it uses of a request
        assert operations.files.describe()["open_in_python"] == 0
        assert node.meta.lookup(ROOT_INO, b"a") is None
        assert os.listdir(tmp_path / "store" / "staging") == []
        monkeypatch.undo()


async def test_a_full_disk_keeps_nobody_from_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node(tmp_path) as node:
        inode = await publish(node, b"a", b"bytes")
        FullDisk(node, monkeypatch).refuse("restamp")
        fd = await node.open_content(inode.ino)
        assert os.pread(fd, 100, 0) == b"bytes"
        os.close(fd)
        monkeypatch.undo()


# On a real mount ----------------------------------------------------------------------------------
@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with small_disk(tmp_path / "disk", "16m") as path:
        yield path


def fill(disk: Path) -> Path:
    """Leave no page of a disk free."""
    junk = disk / "junk"
    with open(junk, "wb", buffering=0) as file:
        for size_bytes in (1 << 20, 4096):
            try:
                while file.write(b"x" * size_bytes) == size_bytes:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return junk


def test_a_mount_outlives_a_full_disk(start_mount: StartMount, disk: Path) -> None:
    store = disk / "store"
    mount = start_mount(store, config="min_free = 0\n", allow="no room|keep their room|No space")
    for number in range(200):
        (mount.mountpoint / f"f{number}").write_bytes(b"%d" % number * 3000)
    readers = [os.open(mount.mountpoint / f"f{number}", os.O_RDONLY) for number in range(200)]
    junk = fill(disk)
    for number, reader in enumerate(readers):
        assert os.read(reader, 10_000) == b"%d" % number * 3000
        try:
            os.unlink(mount.mountpoint / f"f{number}")
        except OSError as error:
            assert error.errno == errno.ENOSPC
        os.close(reader)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC):
        for number in range(100_000):
            os.mknod(mount.mountpoint / f"made-{number}")
    made = [name for name in os.listdir(mount.mountpoint) if name.startswith("made")]
    assert len(made) == number  # what failed left nothing
    Path("/proc/sys/vm/drop_caches").write_text("2")  # the kernel forgets what it knows
    junk.unlink()
    for name in [*made, *(f"f{number}" for number in range(200))]:
        (mount.mountpoint / name).unlink(missing_ok=True)
    (mount.mountpoint / "new").write_bytes(b"new")
    assert sorted(os.listdir(mount.mountpoint)) == [".kvfs", "new"]
    wait_until(lambda: len(list((store / "blobs").glob("*/*/*"))) == 1)
