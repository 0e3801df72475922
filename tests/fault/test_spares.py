"""Stages that are made ahead of who needs them: given once, and none is left."""

import os

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.errors import OutOfSpace
from kvfs.node import Node
from kvfs.stage import Stage
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
