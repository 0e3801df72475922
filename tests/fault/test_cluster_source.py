"""What a node gives its peers: checked before parts of it go out, and to the end once begun."""

import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from kvfs.cluster import source as source_module
from kvfs.cluster.hints import Hints
from kvfs.cluster.source import NodeSource
from kvfs.config import MIB, SERVED_FILES_MAX
from kvfs.errors import Corrupt, Unavailable
from kvfs.node import Node
from tests.own_node import blob_path, store

Result = TypeVar("Result")


async def source_of(node: Node, nursery: trio.Nursery) -> NodeSource:
    source = NodeSource(node, Hints(node), trio.lowlevel.current_trio_token())
    await nursery.start(source.run)
    return source


async def ask(question: Callable[[bytes], Result], digest: bytes) -> Result:
    """As a thread of the peers' server does."""
    return await trio.to_thread.run_sync(question, digest)


def read_and_close(fd: int | None) -> bytes:
    assert fd is not None
    try:
        return os.pread(fd, MIB, 0)
    finally:
        os.close(fd)


async def test_a_blob_is_read_once_before_parts_of_it_go_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = store(node, b"file", b"right")
    checks = []
    check = node.contents.check

    async def counted(digest: bytes) -> None:
        checks.append(digest)
        await check(digest)

    monkeypatch.setattr(node.contents, "check", counted)
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        for _ in range(3):
            await ask(source.check, inode.digest)
        await ask(source.check, bytes(16))  # which is not here
        nursery.cancel_scope.cancel()
    assert checks == [inode.digest]


async def test_a_spoilt_blob_is_given_to_nobody(node: Node, allow_warnings: list[str]) -> None:
    allow_warnings.append("its bytes changed since they were stored")
    inode = store(node, b"file", b"right")
    blob_path(node, inode.digest).write_bytes(b"wrong")
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        assert read_and_close(await ask(source.open, inode.digest)) == b"wrong"  # its reader checks
        with pytest.raises(Corrupt):
            await ask(source.check, inode.digest)
        assert await ask(source.open, inode.digest) is None
        nursery.cancel_scope.cancel()
    assert node.meta.resolve([b"file"]) == [None]
    assert node.counters.corrupt_blobs == 1


async def test_a_peer_waits_for_no_long_check(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = store(node, b"file", b"right")
    started = 0

    async def slow(digest: bytes) -> None:
        nonlocal started
        started += 1
        await trio.sleep_forever()

    monkeypatch.setattr(node.contents, "check", slow)
    monkeypatch.setattr(source_module, "PEER_CHECK_WAIT_S", 0.01)
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        for _ in range(2):
            await ask(source.check, inode.digest)
        nursery.cancel_scope.cancel()
    assert started == 1
    with pytest.raises(Unavailable):
        await ask(source.check, inode.digest)


async def test_what_a_peer_reads_is_there_to_its_end(node: Node) -> None:
    inode = store(node, b"file", b"right")
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        assert read_and_close(await ask(source.open, inode.digest)) == b"right"
        node.drop_files([inode.ino])
        assert node.meta.blobs([inode.digest]) == [None]
        assert await trio.to_thread.run_sync(source.sizes, [inode.digest]) == [5]
        assert read_and_close(await ask(source.open, inode.digest)) == b"right"
        node._release_spare()  # the room is needed
        assert await trio.to_thread.run_sync(source.sizes, [inode.digest]) == [None]
        assert await ask(source.open, inode.digest) is None
        nursery.cancel_scope.cancel()


async def test_what_nobody_reads_any_more_is_let_go(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "SERVED_S", 0.02)
    inode = store(node, b"file", b"right")
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        read_and_close(await ask(source.open, inode.digest))
        node.drop_files([inode.ino])
        with trio.fail_after(20):
            while await trio.to_thread.run_sync(source.sizes, [inode.digest]) != [None]:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_few_files_are_kept_open(node: Node) -> None:
    inodes = [store(node, b"file%d" % n, b"%d" % n) for n in range(SERVED_FILES_MAX + 2)]
    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        for inode in inodes:
            read_and_close(await ask(source.open, inode.digest))
        node.drop_files([inode.ino for inode in inodes])
        sizes = await trio.to_thread.run_sync(source.sizes, [inode.digest for inode in inodes])
        assert sizes.count(None) == 2
        nursery.cancel_scope.cancel()


async def test_a_spoilt_blob_that_keeps_its_names_ends_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings += ["cannot be checked for a peer", "quarantined"]
    inode = store(node, b"file", b"right")
    blob_path(node, inode.digest).write_bytes(b"wrong")

    def is_away(*words: object) -> None:
        raise Unavailable("the metadata server does not answer")

    async with trio.open_nursery() as nursery:
        source = await source_of(node, nursery)
        monkeypatch.setattr(node.meta, "lose", is_away)
        with pytest.raises(Corrupt):
            await ask(source.check, inode.digest)
        monkeypatch.undo()
        other = store(node, b"other", b"right too")
        await ask(source.check, other.digest)
        nursery.cancel_scope.cancel()
