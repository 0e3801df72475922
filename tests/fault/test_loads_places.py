"""Loads from several places at once: what each gives, and what its failures cost."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_bridge.plan import RequestLoad, plan_load
from kvfs.errors import QueueFull, TierTrouble
from kvfs.located import ToldTiers
from kvfs.reader import configured
from kvfs.settings.words import TierConfig, TierKind
from kvfs.tiers.directory import DirectoryTier
from kvfs.tiers.handed import HandedFile, HandedTier
from kvfs.transfer.runner import Transfer
from tests.bridge import GEOMETRY, HASHES, PLACE, WAIT_S, Bench
from tests.processes import wait_until
from tests.tiers import LIMITS, open_directory

Read = Callable[..., bool]

CHUNKS = 7
TARGETS = list(range(9, 15))  # blocks for the first three chunks


class Places(Bench):
    """A node with a tier under number 3, and chunks in the store."""

    def __init__(self, path: Path, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.path = path
        self.tier = open_directory(path, TierKind.SHARED)
        config = TierConfig("scratch", TierKind.SHARED, LIMITS, path=path)
        self.node.tiers_told = ToldTiers(1, {3: config})
        self.save(*range(CHUNKS), block_ids=(1, 2))
        assert self.saver.flush(WAIT_S)

    def put(self, *chunks: int, is_here: bool) -> None:
        """Have chunks in the tier, and in the store as well or not."""
        for chunk in chunks:
            path = self.path_of(chunk)
            content = self.node.files[path]
            self.tier.put(self.node.digests[path], memoryview(content), len(content))
            self.tell(chunk, is_here=is_here)

    def tell(self, chunk: int, *, is_here: bool) -> None:
        """Have the node say that the tier has a chunk."""
        self.node.tiers_of[self.path_of(chunk)] = (3,)
        if not is_here:
            self.node.only_in_tiers.add(self.path_of(chunk))

    def path_of(self, chunk: int) -> bytes:
        return super().path(chunk)

    def blob(self, chunk: int) -> Path:
        name = self.node.digests[self.path_of(chunk)].hex()
        return self.path / "blobs" / name[:2] / name[2:4] / name

    def load_all(self, request: str = "r") -> None:
        """Each chunk into the same two blocks: they are alike."""
        chunks = plan_load(GEOMETRY, HASHES, {0: [9, 10] * CHUNKS}, 0, CHUNKS * 32)
        self.loader.submit(PLACE, RequestLoad(request, chunks), None)

    def open_tier(self) -> None:
        """Have the engine meet the tier, which it opens beside a load."""
        self.load_all()
        assert self.outcome().is_whole
        wait_until(lambda: self.loader._places._configured.are_open([3]) == (3,), WAIT_S)
        self.counts()

    def is_loaded(self) -> bool:
        blocks = self.memory.blocks()
        return blocks[9:11] == blocks[1:3]

    def close(self) -> None:
        super().close()
        self.tier.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Places]:
    bench = Places(tmp_path / "scratch")
    yield bench
    bench.close()


def test_what_only_a_tier_has_is_read_from_there(bench: Places) -> None:
    bench.put(*range(CHUNKS), is_here=False)
    bench.load_all()
    assert bench.outcome().is_whole and bench.is_loaded()
    counts = bench.counts()
    size_bytes = len(bench.node.files[bench.path_of(0)])
    assert counts["read_bytes.scratch"] == counts["loaded_bytes"] == CHUNKS * size_bytes
    assert counts["reads.scratch"] >= CHUNKS
    assert "bring" not in bench.node.calls


def test_chunks_come_from_the_store_and_from_a_tier_at_the_same_time(
    bench: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(*range(2, CHUNKS), is_here=True)
    bench.put(1, is_here=False)  # and the first only in the store
    bench.open_tier()
    here, there = threading.Event(), threading.Event()

    def when_both(own: threading.Event, other: threading.Event, read: Read) -> Read:
        def wait_and_read(*arguments: object) -> bool:
            own.set()
            return other.wait(WAIT_S) and read(*arguments)

        return wait_and_read

    monkeypatch.setattr(HandedTier, "_read", when_both(here, there, HandedTier._read))
    apart = when_both(there, here, DirectoryTier._read_apart)
    monkeypatch.setattr(DirectoryTier, "_read_apart", apart)
    bench.load_all()
    assert bench.outcome().is_whole and bench.is_loaded()
    counts = bench.counts()
    assert counts["read_bytes.scratch"] > 0 and counts["read_bytes.store"] > 0


def test_a_tier_that_freezes_costs_no_chunk(bench: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(*range(CHUNKS), is_here=True)
    bench.open_tier()
    frozen, read = threading.Event(), DirectoryTier._read_apart
    thaw = threading.Event()

    def freeze(*arguments: object) -> bool:
        frozen.set()
        assert thaw.wait(2 * WAIT_S), "it was waited for"
        return read(*arguments)  # type: ignore[arg-type]

    def read_when_frozen(*arguments: object) -> bool:
        return frozen.wait(WAIT_S) and read_here(*arguments)  # type: ignore[arg-type]

    read_here = HandedTier._read
    monkeypatch.setattr(HandedTier, "_read", read_when_frozen)
    monkeypatch.setattr(DirectoryTier, "_read_apart", freeze)
    try:
        bench.load_all()
        assert bench.outcome().is_whole and bench.is_loaded()
    finally:
        thaw.set()


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        (last,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def test_wrong_bytes_of_a_tier_are_read_from_the_store_instead(
    bench: Places, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch (had|gave) wrong bytes")
    bench.put(*range(CHUNKS), is_here=True)
    bench.open_tier()
    for chunk in range(CHUNKS):
        spoil(bench.blob(chunk))
    bench.load_all()
    assert bench.outcome().is_whole and bench.is_loaded()
    assert not bench.node.reported  # the store's copy is blameless


def test_wrong_bytes_that_only_a_tier_has_never_come_into_a_block(
    bench: Places, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch (had|gave) wrong bytes")
    bench.put(0, 1, 2, is_here=False)
    spoil(bench.blob(1))
    before = bench.memory.blocks()
    bench.load("r", TARGETS)
    outcome = bench.outcome()
    assert outcome.failed_blocks == set(TARGETS[2:])
    assert outcome.suspects == {HASHES[3]}
    assert bench.memory.blocks()[9:13] == [*before[1:3], *before[11:13]]
    digest = bench.node.digests[bench.path_of(1)]
    wait_until(lambda: bench.node.gone == [(3, digest)])
    assert not bench.blob(1).exists()  # the tier has put it aside


def test_what_a_tier_has_no_more_the_node_may_still_bring(bench: Places) -> None:
    bench.put(0, 2, is_here=False)
    bench.tell(1, is_here=False)

    def bring(name: str) -> None:
        if name == "bring":
            bench.node.only_in_tiers.clear()

    bench.node.before = bring
    bench.load("r", TARGETS)
    assert bench.outcome().is_whole
    wait_until(lambda: bench.node.gone == [(3, bench.node.digests[bench.path_of(1)])])


def test_what_the_node_takes_long_to_bring_is_asked_for_again_and_loses_nothing(
    bench: Places,
) -> None:
    bench.put(0, 2, is_here=False)
    bench.tell(1, is_here=False)
    late = bench.path_of(1)

    def bring(name: str) -> None:
        if name == "bring":
            bench.node.coming = {late} if bench.node.calls.count("bring") < 2 else set()
            if not bench.node.coming:
                bench.node.only_in_tiers.discard(late)

    bench.node.before = bring
    bench.load("r", TARGETS)
    assert bench.outcome().is_whole
    assert bench.node.calls.count("bring") == 3
    wait_until(lambda: bench.node.gone == [(3, bench.node.digests[late])])


def test_a_tier_that_cannot_be_opened_here_is_said_once_and_not_used(
    bench: Places, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch is not used here: .*tier.json")
    bench.put(0, 1, 2, is_here=True)
    shutil.rmtree(bench.path)
    for request in "ab":
        bench.load(request, TARGETS)
        assert bench.outcome().is_whole
    assert not bench.path.exists()  # nor is it made


def test_a_tier_whose_disk_fails_when_it_is_opened_is_said_and_not_used(
    bench: Places, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch is not used here: .*Input/output error")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(configured, "open_tier", fail)
    bench.put(0, 1, 2, is_here=True)
    bench.load("r", TARGETS)
    assert bench.outcome().is_whole


def test_a_directory_for_which_there_was_no_room_is_read_from_later(
    bench: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tier = Transfer.add_tier

    def refuse(transfer: Transfer, number: int, tier: Any) -> None:
        if isinstance(tier, HandedTier):
            raise QueueFull("tiers", 1, 0)
        add_tier(transfer, number, tier)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "add_tier", refuse)
        bench.load("r", TARGETS)
        assert not bench.outcome().is_whole
    bench.load("s", TARGETS)
    assert bench.outcome().is_whole


def test_a_tier_that_hangs_when_it_is_opened_is_waited_for_once(
    bench: Places, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("tier scratch is not used here: tier scratch: hangs")
    monkeypatch.setattr("kvfs.reader.configured.READER_TIER_OPEN_S", 0.05)
    bench.put(0, 1, 2, is_here=False)
    opening, thaw = threading.Event(), threading.Event()

    def hang(*arguments: object, **options: object) -> None:
        assert not opening.is_set(), "once is enough"
        opening.set()
        assert thaw.wait(2 * WAIT_S), "it was waited for"
        raise TierTrouble("scratch", "hangs")

    monkeypatch.setattr("kvfs.reader.configured.open_tier", hang)
    try:
        for request in "ab":
            bench.load(request, TARGETS)
            assert bench.outcome().failed_blocks == set(TARGETS)
        assert opening.is_set()
        assert bench.counts()["failed_loads.missing"] == 2
    finally:
        thaw.set()
    configured = bench.loader._places._configured
    wait_until(lambda: not configured._known[3].is_opening)


def test_a_node_that_comes_back_with_another_tier_under_a_number_is_believed(
    bench: Places, tmp_path: Path
) -> None:
    bench.put(0, 1, 2, is_here=False)
    bench.load("a", TARGETS)
    assert bench.outcome().is_whole
    moved = tmp_path / "moved"
    bench.path.rename(moved)
    (config,) = bench.node.tiers_told.tiers.values()
    other = replace(config, name="moved", path=moved)
    bench.node.tiers_told = ToldTiers(2, {3: other})
    bench.counts()
    bench.load("b", TARGETS)
    assert bench.outcome().is_whole
    assert bench.counts()["reads.moved"] >= 3
    assert bench.node.calls.count("tiers") == 2


def test_descriptors_are_closed_when_nobody_reads_them(bench: Places) -> None:
    tier = HandedTier("store", LIMITS, lambda digest: None)
    path = bench.path_of(0)
    file = bench.node.bring([path], 0.0)[0][0]
    assert file is not None
    handed: list[HandedFile] = [tier.hand(file.digest, file.size_bytes, file.fd)]
    buffer = memoryview(bytearray(file.size_bytes))
    assert tier.read_into(file.digest, 0, buffer)
    assert tier.has([file.digest, bytes(16)]) == [file.size_bytes, None]
    assert not tier.read_into(file.digest, 1, buffer)  # it is not so long
    tier.take_back(handed[0])
    assert not tier.read_into(file.digest, 0, buffer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.close()
