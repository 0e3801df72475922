"""The queue of copies to tiers: its bound, and whom it waits for. A node in this process."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from kvfs import checks
from kvfs.digest import digest_of
from kvfs.node import Node
from kvfs.settings.words import TIER_LIMITS, TierConfig, TierKind
from kvfs.tiering import behind
from kvfs.tiering.copying import Copier
from kvfs.tiering.reads import Reads
from kvfs.tiering.tiering import Tiering
from kvfs.tiers import sources
from kvfs.tiers.directory import DirectoryTier
from tests.own_node import fail_with, load, store

DEADLINE_S = 20.0


@asynccontextmanager
async def tiering(node: Node, path: Path, max_bytes: int | None = None) -> AsyncIterator[Tiering]:
    limits = TIER_LIMITS[TierKind.NVME]
    config = TierConfig("disk", TierKind.NVME, limits, path=path, min_free=0, max_bytes=max_bytes)
    node.config = replace(node.config, tiers=(config,))
    used = Tiering(node)
    async with used.running():
        yield used


async def until(tiers: Tiering, waiting: int) -> None:
    with trio.fail_after(DEADLINE_S):
        while tiers.behind.waiting != waiting:
            await trio.sleep(0.01)


def held(node: Node, number: int) -> bool:
    return bool(node.meta.tier_masks([digest_of(b"%d" % number)])[0])


async def test_what_finds_no_room_in_the_queue_is_counted_and_forgotten(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("disk cannot be opened")
    monkeypatch.setattr(behind, "BEHIND_WAITING_MAX", 3)
    async with tiering(node, tmp_path / "not" / "there") as tiers:
        for number in (0, 1, 1, 2, 3, 4):
            store(node, b"f%d" % number, b"%d" % number)
        assert (tiers.behind.waiting, tiers.behind.dropped_files) == (3, 2)
        assert set(node.meta.promised(b"", 9)) == {digest_of(b"%d" % n) for n in range(3)}


async def test_what_could_not_be_copied_makes_room_for_what_is_new(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("disk cannot be opened")
    monkeypatch.setattr(behind, "BEHIND_WAITING_MAX", 2)
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", 0.0)
    async with tiering(node, tmp_path / "not" / "there") as tiers:
        store(node, b"f0", b"0")
        store(node, b"f1", b"1")
        with trio.fail_after(DEADLINE_S):
            while len(tiers.behind._put_off) < 2:
                await trio.sleep(0.01)
        store(node, b"f2", b"2")
        assert (tiers.behind.waiting, tiers.behind.dropped_files) == (2, 1)
        assert digest_of(b"2") in node.meta.promised(b"", 9)
        (tmp_path / "not").mkdir()
        await until(tiers, 0)
    assert [held(node, number) for number in range(3)].count(True) == 2 and held(node, 2)


async def test_copies_wait_for_reads(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", 0.0)
    monkeypatch.setattr(behind, "BEHIND_YIELD_S", DEADLINE_S)
    were_quiet: list[bool] = []
    copy = Copier.copy

    async def note_and_copy(self: Copier, *arguments: Any) -> bool:
        were_quiet.append(tiers.reads.is_quiet)
        return await copy(self, *arguments)

    monkeypatch.setattr(Copier, "copy", note_and_copy)
    async with tiering(node, tmp_path / "tier") as tiers:
        with tiers.reads.under_way():
            store(node, b"f0", b"0")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert (tiers.behind.waiting, held(node, 0)) == (1, False)
        await until(tiers, 0)
        assert held(node, 0)
    assert were_quiet == [True]


async def test_a_blob_with_other_bytes_than_its_digest_is_put_nowhere(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("its bytes changed")
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", 0.0)
    async with tiering(node, tmp_path / "tier") as tiers:
        store(node, b"bad", b"bytes", digest=digest_of(b"BYTES"))
        await until(tiers, 0)
        assert not any(file.is_file() for file in (tmp_path / "tier" / "blobs").rglob("*"))
        assert load(node, b"bad") is None
        assert node.meta.promised(b"", 9) == []


async def test_quiet_is_when_nobody_reads_and_nobody_has_just_begun(
    autojump_clock: trio.testing.MockClock,
) -> None:
    reads = Reads()
    assert reads.is_quiet
    reads.note_use()
    assert not reads.is_quiet
    assert await reads.wait_quiet(10)
    with reads.under_way(), reads.under_way():
        assert not await reads.wait_quiet(10)

    async def read() -> None:
        with reads.under_way():
            await trio.sleep(3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        began_s = trio.current_time()
        assert await reads.wait_quiet(10)
        assert trio.current_time() - began_s == pytest.approx(3)


async def test_a_blob_that_the_disk_cannot_read_keeps_its_names(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be read")
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", 0.0)
    monkeypatch.setattr(behind, "BEHIND_AGAIN_S", 0.05)
    is_broken = [True]

    def fails(*_: object) -> bool:
        return is_broken[0]

    read = fail_with(errno.EIO, fails, sources.read_into)
    monkeypatch.setattr(sources, "read_into", read)
    monkeypatch.setattr(checks, "digest_file", fail_with(errno.EIO, fails, checks.digest_file))
    async with tiering(node, tmp_path / "tier") as tiers:
        store(node, b"f0", b"0")
        with trio.fail_after(DEADLINE_S):
            while not node.counters.unreadable_blobs:
                await trio.sleep(0.01)
        assert load(node, b"f0") == b"0"
        is_broken[0] = False
        await until(tiers, 0)
        assert held(node, 0)


async def test_a_tier_with_a_limit_holds_no_more_however_many_come_at_once(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("no tier takes blob")
    counts: list[int] = []
    put = DirectoryTier.put

    def count(self: DirectoryTier, *arguments: Any) -> None:
        put(self, *arguments)
        counts.append(len([file for file in self.path.rglob("blobs/*/*/*") if file.is_file()]))

    monkeypatch.setattr(DirectoryTier, "put", count)
    monkeypatch.setattr(behind, "BEHIND_SETTLE_S", 0.0)
    async with tiering(node, tmp_path / "tier", max_bytes=3) as tiers:
        for number in range(2):
            store(node, b"f%d" % number, b"%d" % number)
        await until(tiers, 0)
        monkeypatch.setattr(behind, "BEHIND_SETTLE_S", DEADLINE_S)
        for number in range(2, 9):
            store(node, b"f%d" % number, b"%d" % number)
        digests = [digest_of(b"%d" % number) for number in range(9)]
        await tiers.demote(digests, tiers.holdings.held(digests))
        assert [held(node, number) for number in range(2)] == [True, True]  # leave with the others
        assert [held(node, number) for number in range(9)].count(True) == 3
        assert max(counts) <= 3 and tiers.behind.demoted_files == 1


async def test_what_has_gone_before_it_was_demoted_is_not_counted(
    node: Node, tmp_path: Path
) -> None:
    async with tiering(node, tmp_path / "tier") as tiers:
        await tiers.demote([digest_of(b"gone")], ())
        assert tiers.behind.demoted_files == 0
