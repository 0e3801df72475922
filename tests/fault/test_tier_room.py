"""Last copies that leave a tier, and tiers that hang or fail while they are looked through: a node
in this process."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from kvfs.digest import digest_of
from kvfs.errors import TierTrouble
from kvfs.node import Node
from kvfs.settings.words import TIER_LIMITS, TierConfig, TierKind
from kvfs.tiering import behind, scan
from kvfs.tiering.tiering import Tiering
from kvfs.tiers.contract import Capacity
from kvfs.tiers.directory import DirectoryTier
from tests.own_node import load, store

DEADLINE_S = 20.0


def config(path: Path, kind: TierKind, max_bytes: int | None = None) -> TierConfig:
    limits = TIER_LIMITS[kind]
    return TierConfig(path.name, kind, limits, path=path, min_free=0, max_bytes=max_bytes)


@asynccontextmanager
async def tiering(node: Node, *tiers: TierConfig) -> AsyncIterator[Tiering]:
    node.config = replace(node.config, tiers=tiers)
    used = Tiering(node)
    async with used.running():
        yield used


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        while not condition():
            await trio.sleep(0.01)


@pytest.mark.parametrize("kind", [TierKind.NVME, TierKind.SHARED])
async def test_a_last_copy_goes_to_the_tier_that_has_room_and_a_name_only_when_none_has(
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allow_warnings: list[str],
    kind: TierKind,
) -> None:
    allow_warnings.append("no other one takes blob")
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", DEADLINE_S)
    small, other = config(tmp_path / "small", kind, 2), config(tmp_path / "other", kind, 3)
    async with tiering(node, small, other) as tiers:
        inos = []
        for number in range(6):
            inode = store(node, b"f%d" % number, b"%d" % number)
            inos.append(inode.ino)
            assert await tiers.copier.copy(inode.digest, 1)  # by a rule: to the first that takes it
            assert tiers.give_up([inode.digest]) == [inode.digest]
        names = [node.meta.inode(ino) is not None for ino in inos]
        assert names.count(True) == 5 and tiers.room.moved_blobs >= 3
        (lost,) = (number for number in range(6) if not names[number])
        left = [inode for ino in inos if (inode := node.meta.inode(ino)) is not None]
        await tiers.bringer.bring(left)
        found = [load(node, b"f%d" % number) for number in range(6)]
        assert found == [None if n == lost else b"%d" % n for n in range(6)]


async def test_a_last_copy_is_put_where_it_stays(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", DEADLINE_S)
    small = config(tmp_path / "small", TierKind.NVME, 9)
    async with tiering(node, small, config(tmp_path / "large", TierKind.NVME)) as tiers:
        digest = store(node, b"f", b"0").digest
        await tiers.demote([digest], ())
        (mask,) = tiers.holdings.masks([digest])
        assert tiers.holdings.numbers_of(mask) == (tiers.tiers[1].number,)


async def test_a_tier_that_failed_while_it_was_looked_through_is_soon_looked_through_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "TIER_SCAN_AGAIN_S", 0.0)
    look, failures = DirectoryTier.scan, [TierTrouble("tier", "a hiccup")]

    def fail_once(self: DirectoryTier) -> Iterator[list[tuple[bytes, int]]]:
        if failures:
            raise failures.pop()
        return look(self)

    monkeypatch.setattr(DirectoryTier, "scan", fail_once)
    digest = digest_of(b"there before")
    tier = config(tmp_path / "tier", TierKind.NVME)
    before = DirectoryTier(tier, "other")
    before.put(digest, memoryview(b"there before"), 12)
    before.close()
    async with tiering(node, tier) as tiers:
        await until(lambda: bool(tiers.holdings.masks([digest])[0]))
        assert not failures


async def test_a_tier_that_hangs_does_not_keep_others_from_being_looked_at(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, purge, capacity = threading.Event(), DirectoryTier.purge, DirectoryTier.capacity

    def purge_or_hang(self: DirectoryTier) -> int:
        assert self.name == "good" or go_on.wait(DEADLINE_S)
        return purge(self)

    def capacity_or_hang(self: DirectoryTier) -> Capacity | None:
        assert self.name == "good" or go_on.wait(DEADLINE_S)
        return capacity(self)

    monkeypatch.setattr(DirectoryTier, "purge", purge_or_hang)
    monkeypatch.setattr(DirectoryTier, "capacity", capacity_or_hang)
    bad, good = (config(tmp_path / name, TierKind.NVME) for name in ("bad", "good"))
    try:
        async with tiering(node, bad, good) as tiers:
            await until(lambda: tiers.tiers[1].capacity is not None)
            assert tiers.tiers[0].capacity is None
    finally:
        go_on.set()
