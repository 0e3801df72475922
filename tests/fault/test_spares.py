"""Stages that are made ahead of who needs them: given once, with the blocks that they are likely to
need, and none is left."""

import errno
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.blobs import BlobDirectory
from kvfs.config import MIB
from kvfs.errors import OutOfSpace
from kvfs.meta.lmdb import LmdbEngine
from kvfs.node import Node
from kvfs.settings.words import Config, DirectoryConfig
from kvfs.stage import Stage
from kvfs.stored import allocated_bytes
from mount.spares import SpareStages


def staged(node: Node) -> list[str]:
    return [name for d in node.directories if d for name in os.listdir(d.path / "staging")]


async def made(spares: SpareStages, nursery: trio.Nursery) -> None:
    """Have some made, as after the first file."""
    nursery.start_soon(spares.run)
    spares._node.discard(spares.take())
    await wait_all_tasks_blocked()


async def test_stages_are_given_once_and_are_empty(node: Node) -> None:
    spares = SpareStages(node)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        ahead = len(spares._spares)
        assert ahead > 1
        taken = [spares.take() for _ in range(ahead + 2)]  # the last ones are made at once
        assert len({stage.name for stage in taken}) == len(taken)
        assert len({stage.fd for stage in taken}) == len(taken)
        assert all(os.fstat(stage.fd).st_size == 0 for stage in taken)
        for stage in taken:
            os.write(stage.fd, b"x")
            node.discard(stage)
        nursery.cancel_scope.cancel()


async def test_none_is_left_when_nobody_makes_files(node: Node, autojump_clock: MockClock) -> None:
    spares = SpareStages(node)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        assert staged(node)
        await trio.sleep(5)
        assert not spares._spares
        spares._node.discard(spares.take())
        await wait_all_tasks_blocked()
        assert spares._spares, "it began again"
        nursery.cancel_scope.cancel()
    spares.discard()
    assert not spares._spares


async def test_they_stay_while_files_are_made_now_and_then(
    node: Node, autojump_clock: MockClock
) -> None:
    spares = SpareStages(node)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        ahead = {stage.name for stage in spares._spares}
        for _ in range(3):
            await trio.sleep(0.6)
            stage = spares.take()
            assert stage.name in ahead, "it was made, and thrown away, for nothing"
            node.discard(stage)
        nursery.cancel_scope.cancel()
    spares.discard()


async def test_what_has_lost_its_name_is_not_given(node: Node) -> None:
    spares = SpareStages(node)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        for directory in node.directories:
            assert directory is not None
            for name in os.listdir(directory.path / "staging"):
                os.unlink(directory.path / "staging" / name)
        stage = spares.take()
        assert os.fstat(stage.fd).st_nlink == 1
        node.discard(stage)
        nursery.cancel_scope.cancel()


async def test_a_disk_that_takes_no_file_tells_who_needs_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Stage:
        raise OutOfSpace("no room")

    spares = SpareStages(node)
    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as patch:
            patch.setattr(node, "stage", refuse)
            nursery.start_soon(spares.run)
            for _ in range(3):
                with pytest.raises(OutOfSpace):
                    spares.take()
                await wait_all_tasks_blocked()  # `run` has seen it too, and goes on
        node.discard(spares.take())
        nursery.cancel_scope.cancel()
    spares.discard()


def close_files(spares: SpareStages, sizes: list[int]) -> None:
    for size_bytes in sizes:
        spares.note_closed(size_bytes)


async def test_large_files_find_blocks_that_count_as_taken(node: Node) -> None:
    spares = SpareStages(node)
    close_files(spares, [3 * MIB, 2 * MIB, 5 * MIB, 2 * MIB + 1])
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        await wait_until_blocks(spares)
        for stage in spares._spares:
            status = os.fstat(stage.fd)
            assert status.st_size == 0
            assert allocated_bytes(status) == stage.ahead_bytes == stage.reserved_bytes == 2 * MIB
        held_bytes = sum(node.space.staging_bytes(index) for index in range(2))
        assert held_bytes == len(spares._spares) * 2 * MIB
        spares.discard()
        assert sum(node.space.staging_bytes(index) for index in range(2)) == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "sizes",
    [[2 * MIB] * 3, [2 * MIB, 2 * MIB, 1000, 2 * MIB]],
    ids=["too few to tell", "a small one among them"],
)
async def test_others_find_none(node: Node, sizes: list[int]) -> None:
    spares = SpareStages(node)
    close_files(spares, sizes)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        assert spares._spares
        assert all(allocated_bytes(os.fstat(stage.fd)) == 0 for stage in spares._spares)
        nursery.cancel_scope.cancel()
    spares.discard()


async def test_a_small_store_sets_nothing_aside(tmp_path: Path) -> None:
    configs = (DirectoryConfig(tmp_path / "one", max_bytes=700 * MIB),)
    directory = BlobDirectory.open(configs[0])
    engine = LmdbEngine.open(tmp_path / "one" / "meta")
    node = Node(Config(configs), [directory], engine)
    spares = SpareStages(node)
    close_files(spares, [2 * MIB] * 4)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        assert spares._spares
        assert node.space.staging_bytes(0) == 0
        nursery.cancel_scope.cancel()
    spares.discard()
    engine.close()
    directory.close()


async def test_who_writes_less_than_before_gets_no_blocks_for_more(node: Node) -> None:
    spares = SpareStages(node)
    close_files(spares, [8 * MIB] * 4)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        await wait_until_blocks(spares)
        close_files(spares, [2 * MIB])
        stage = spares.take()
        assert stage.ahead_bytes == 0 == allocated_bytes(os.fstat(stage.fd))
        node.discard(stage)
        nursery.cancel_scope.cancel()
    spares.discard()


@pytest.mark.parametrize("failure", [errno.EOPNOTSUPP, errno.ENOSPC])
async def test_a_disk_that_gives_no_blocks(
    node: Node, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    asked = []

    def refuse(fd: int, size_bytes: int) -> bool:
        asked.append(size_bytes)
        if failure != errno.EOPNOTSUPP:
            raise OSError(failure, os.strerror(failure))
        return False  # as `give_blocks` says it

    monkeypatch.setattr("mount.spares.give_blocks", refuse)
    spares = SpareStages(node)
    close_files(spares, [2 * MIB] * 4)
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        with trio.fail_after(10):
            while not spares._spares:
                await trio.sleep(0.01)
        assert asked
        count = len(asked)
        while spares._spares:
            node.discard(spares.take())
        with trio.fail_after(10):
            while not spares._spares:
                await trio.sleep(0.01)
        if failure == errno.EOPNOTSUPP:
            assert len(asked) == count, "it was told, and asked again"
            assert sum(node.space.staging_bytes(index) for index in range(2)) == 0
        nursery.cancel_scope.cancel()
    spares.discard()
    assert sum(node.space.staging_bytes(index) for index in range(2)) == 0


async def test_no_room_to_set_aside_leaves_no_descriptor(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, asked = node.reserve, []

    async def refuse_the_third(stage: Stage, size_bytes: int) -> None:
        asked.append(stage)
        if len(asked) > 2:
            raise OutOfSpace("no room")
        await reserve(stage, size_bytes)

    monkeypatch.setattr(node, "reserve", refuse_the_third)
    spares = SpareStages(node)
    close_files(spares, [2 * MIB] * 4)
    before = len(os.listdir("/proc/self/fd"))
    async with trio.open_nursery() as nursery:
        await made(spares, nursery)
        assert len(asked) == 3
        assert spares._spares, "they are given all the same"
        nursery.cancel_scope.cancel()
    spares.discard()
    assert len(os.listdir("/proc/self/fd")) == before


async def wait_until_blocks(spares: SpareStages) -> None:
    with trio.fail_after(10):
        while not spares._spares or not all(stage.ahead_bytes for stage in spares._spares):
            await trio.sleep(0.01)
