"""What a node brings from tiers and other nodes, when one of them hangs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs.config import TIER_FETCH_S
from kvfs.digest import digest_of
from kvfs.meta.contract import Inode
from kvfs.node import Node
from tests.own_node import store


class Source:
    """Of `data`, or of nothing: that hangs."""

    def __init__(self, node: Node, data: bytes | None) -> None:
        self._node, self._data = node, data

    async def bring(self, inodes: Iterable[Inode], priority: int = 0) -> None:
        if self._data is None:
            await trio.sleep_forever()
        else:
            await trio.sleep(1.5)
            store(self._node, b"copy", self._data)

    begin = bring
    bringer = behind = property(lambda self: self)  # as tiers; else as other nodes

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("is_tier_well", [False, True])
async def test_who_hangs_does_not_delay_what_another_has(
    node: Node, autojump_clock: MockClock, *, is_tier_well: bool
) -> None:
    file = replace(store(node, b"f", b"here"), digest=digest_of(b"away"))
    well, hanging = Source(node, b"away"), Source(node, None)
    tier, peers = (well, hanging) if is_tier_well else (hanging, well)
    node.tiering, node.neighbours = tier, peers  # type: ignore[assignment]
    with trio.fail_after(TIER_FETCH_S / 2):
        await node.fetching.fetch([file])
    assert node.is_here([file.digest]) == [True]
