"""Files that were closed and wait to be published, while others come and go or their disk fails.
The kernel's part is played by the tests: it writes into the stage, and gives a number for it."""

import errno
import io
import os
import re
import threading
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.blobs import BlobDirectory
from kvfs.client import Client
from kvfs.config import MIB
from kvfs.errors import OutOfSpace
from kvfs.kept import Kept
from kvfs.meta.contract import ROOT_INO, Inode, Published
from kvfs.node import Node
from kvfs.shell.locate import Place
from kvfs.shell.session import Session
from kvfs.shell.status import status
from kvfs.status import status_of
from mount import settling
from mount.handles import OpenFiles
from tests.fake_client import FakeClient
from tests.open_files import create_empty, opened
from tests.own_node import load

DATA = b"closed" * (MIB // 2)


def create(node: Node, files: OpenFiles, name: bytes = b"a") -> tuple[int, Inode]:
    """A new file with `DATA`; its handle."""
    made, inode = create_empty(node, files, name)
    version = files.versions.get(inode.ino)
    assert version is not None and version.through is not None
    os.pwrite(version.through.stage.fd, DATA, 0)
    return made, inode


def status_text(node: Node) -> str:
    """What `kvfs status` prints of a node."""

    class StatusClient(FakeClient):
        def status(self) -> dict[str, Any]:
            return status_of(node)

    out = io.StringIO()
    place = Place(node.config.home, ())
    assert status(Session(cast(Client, StatusClient()), place, out, False, node.now_ns())) == 0
    return out.getvalue()


def staged(node: Node) -> list[str]:
    return [name for d in node.directories if d for name in os.listdir(d.path / "staging")]


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


async def test_who_closes_at_once_leaves_no_more_to_wait_than_may(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "SETTLE_BYTES_MAX", 2 * len(DATA))
    names = [b"a", b"b", b"c"]
    async with opened(node) as files:
        handles = [create(node, files, name)[0] for name in names]
        async with trio.open_nursery() as nursery:
            for fh in handles:
                nursery.start_soon(files.flush, fh)
        assert files.settling.room_bytes(0) == 0
        for fh in handles:
            await files.release(fh)
        await files.settling.settle_all()
    assert [load(node, name) for name in names] == [DATA] * 3


async def test_a_file_that_is_closed_again_waits_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it takes of what may wait, it does not take it twice."""
    monkeypatch.setattr(settling, "SETTLE_BYTES_MAX", len(DATA) + MIB)
    async with opened(node) as files:
        fh, inode = create(node, files)
        await files.flush(fh)
        await close(files, fh)
        assert not node.meta.inode(inode.ino).is_published  # type: ignore[union-attr]  # is there
        await files.settling.settle_all()
    assert load(node, b"a") == DATA


async def test_a_file_that_has_waited_has_no_other_writer_for_that(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy, beside a file that somebody else may write to, would need as much room again."""
    monkeypatch.setattr(settling, "SETTLE_BYTES_MAX", len(DATA))
    async with opened(node) as files:
        monkeypatch.setattr(files, "_is_view_open", lambda: True)
        fh, inode = create(node, files)
        await files.flush(fh)
        through = files.versions.get(inode.ino).through  # type: ignore[union-attr]  # is open
        os.pwrite(through.stage.fd, b"more", len(DATA))  # too much to wait
        await files.flush(fh)
        assert through.stage.adopted_as
        await files.release(fh)
        await files.settling.settle_all()
    assert load(node, b"a") == DATA + b"more"


async def test_what_is_still_written_to_is_not_taken_away(node: Node) -> None:
    """To rename its file would wait for a write, which may wait for this process."""
    async with opened(node) as files:
        fh, inode = create(node, files)
        await files.flush(fh)
        through = files.versions.get(inode.ino).through  # type: ignore[union-attr]  # is open
        await files.settling.settle_all()
        directory = node.directories[through.stage.directory]
        assert directory is not None and through.stage.adopted_as
        old = directory.blob_path(through.stage.adopted_as)
        os.pwrite(through.stage.fd, b"more", len(DATA))
        await files.flush(fh)
        assert load(node, b"a") == DATA + b"more"
        assert os.path.exists(old)
        await files.release(fh)
        assert not os.path.exists(old)
    assert node.meta.usage().blobs == 1


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


async def test_metadata_that_is_full_for_a_moment_costs_no_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be published yet: full")
    publish = node.meta.publish

    def refuse(*arguments: object) -> list[Published]:
        raise OutOfSpace("full")

    async with opened(node) as files:
        fh, inode = create(node, files)
        await close(files, fh)
        monkeypatch.setattr(node.meta, "publish", refuse)
        with pytest.raises(OutOfSpace):
            await files.settle(inode.ino)
        node.describe_mount = files.describe
        warning = r"^warning +1 closed file \(3 MiB\) not stored yet, .*: full$"
        assert re.search(warning, status_text(node), re.M)
        monkeypatch.setattr(node.meta, "publish", publish)
        await files.settle(inode.ino)
        assert load(node, b"a") == DATA
        assert "warning" not in status_text(node)
    await node.reclaim.remove_queued()
    assert staged(node) == []
    for index in range(len(node.directories)):
        assert (node.space.staging_bytes(index), node.space.trash_bytes(index)) == (0, 0)


async def test_a_mount_that_ends_leaves_it_to_the_next_start(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings += ["cannot be published yet: full", "is left to the next start"]

    def refuse(*arguments: object) -> list[Published]:
        raise OutOfSpace("full")

    async with opened(node) as files:
        fh, inode = create(node, files)
        await close(files, fh)
        monkeypatch.setattr(node.meta, "publish", refuse)
        await files.settling.settle_all()
    kept = [Kept.parse(name) for name in staged(node)]
    assert [found.ino for found in kept if found is not None] == [inode.ino]


async def test_what_is_removed_while_its_digest_is_made(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()
    prepare = BlobDirectory.prepare

    def prepare_slowly(directory: BlobDirectory, fd: int) -> bytes:
        begun.set()
        assert ended.wait(10)
        return prepare(directory, fd)

    monkeypatch.setattr(BlobDirectory, "prepare", prepare_slowly)
    async with opened(node) as files:
        fh, inode = create(node, files)
        await close(files, fh)
        assert await trio.to_thread.run_sync(begun.wait, 10)
        node.unlink(ROOT_INO, b"a")
        ended.set()
        await files.settling.settle_all()
        assert files.versions.get(inode.ino) is None
        assert files.describe()["unsettled_files"] == 0
    assert node.meta.inode(inode.ino) is None
    await node.reclaim.remove_queued()
    assert staged(node) == []
    assert node.meta.usage().blobs == 0
