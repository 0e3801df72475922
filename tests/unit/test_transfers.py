"""Saves and loads with a node in memory: what arrives, and what a failure costs."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from gpu_bridge.copies import CpuCopier
from kvfs.chunk import ChunkHeader, digest_tokens, encode_header, verify
from kvfs.config import BRIDGE_OPEN_BATCH, BRIDGE_SAVES_MAX
from kvfs.digest import digest_of
from tests.bridge import (
    HASHES,
    PLACE,
    WAIT_S,
    Bench,
)
from tests.processes import wait_until


class HeldCopier(CpuCopier):
    """Copies when it is let."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def gather(self, *arguments: object) -> None:
        self.began.set()
        self.go_on.wait(WAIT_S)
        super().gather(*arguments)

    def scatter(self, *arguments: object) -> None:
        self.began.set()
        self.go_on.wait(WAIT_S)
        super().scatter(*arguments)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_what_is_saved_is_a_chunk_file_and_comes_back(bench: Bench, tmp_path) -> None:
    bench.save(0, 1)
    assert bench.saver.flush(WAIT_S)
    assert [end.is_stored for end in bench.saver.take_ends()] == [True, True]
    assert sorted(bench.saver.take_settled()) == [0, 1]
    content = bench.node.files[bench.path(1)]
    header = verify(content)
    assert (header.token_start, header.token_ids) == (32, tuple(range(32, 64)))
    info = bench.node.infos[bench.path(1)]
    assert info is not None and info.tokens_digest == digest_tokens(range(32, 64))
    (tmp_path / "chunk.safetensors").write_bytes(content)
    with safe_open(tmp_path / "chunk.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("a"), bench.memory.layers["a"][3:5])

    before = bench.memory.blocks()
    bench.load("r", [9, 10, 11, 12])
    outcome = bench.outcome()
    assert outcome.is_whole and not outcome.suspects
    assert bench.memory.blocks() == [*before[:9], *before[1:5], *before[13:]]
    assert bench.node.calls == ["lookup", "stage", "publish", "locate"]


def test_a_header_with_its_token_ids_is_encoded_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[ChunkHeader] = []

    def encode(header: ChunkHeader) -> bytes:
        encoded.append(header)
        return encode_header(header)

    monkeypatch.setattr("gpu_bridge.saves.encode_header", encode)
    bench.save(0, 1, 2)
    assert bench.saver.flush(WAIT_S)
    assert [header.token_start for header in encoded] == [0, 32, 64]


def test_what_the_store_has_is_not_written_again_unless_it_is_bad(bench: Bench) -> None:
    bench.node.put(bench.path(0), b"x" * 10_000)
    bench.save(0)
    assert bench.saver.flush(WAIT_S)
    assert bench.node.files[bench.path(0)] == b"x" * 10_000
    assert bench.counts()["known_chunks"] == 1
    bench.save(0, is_replacing=True)
    assert bench.saver.flush(WAIT_S)
    verify(bench.node.files[bench.path(0)])


@pytest.mark.parametrize("operation", ["lookup", "stage", "publish"])
def test_a_node_that_goes_away_costs_the_saves(bench: Bench, operation: str) -> None:
    def leave(name: str) -> None:
        bench.node.is_away = name == operation

    bench.node.before = leave
    bench.save(0, 1)
    assert bench.saver.flush(WAIT_S)
    assert {end.is_stored for end in bench.saver.take_ends()} == {False}
    assert bench.counts()["dropped_saves.unavailable"] == 2
    assert not bench.node.files


def test_a_full_store_costs_the_saves(bench: Bench) -> None:
    bench.node.is_full = True
    bench.save(0)
    assert bench.saver.flush(WAIT_S)
    assert bench.counts()["dropped_saves.no_space"] == 1


def test_too_many_saves_are_dropped_and_not_queued(bench: Bench) -> None:
    held = threading.Event()
    bench.node.before = lambda name: held.wait(WAIT_S) and None
    bench.save(*[0] * (BRIDGE_SAVES_MAX + 3), is_replacing=True, block_ids=(1, 2))
    assert len(bench.saver.take_ends()) == 3
    assert bench.counts()["dropped_saves.queue_full"] == 3
    held.set()
    assert bench.saver.flush(WAIT_S)


def test_blocks_that_are_needed_before_they_were_copied_are_given_up(bench: Bench) -> None:
    held = threading.Event()
    bench.node.before = lambda name: held.wait(WAIT_S) and None
    bench.save(0)
    assert not bench.saver.is_settled(0)
    bench.saver.settle([0, 99], deadline_s=0.01)
    assert bench.saver.is_settled(0)
    held.set()
    assert bench.saver.flush(WAIT_S)
    assert not bench.node.files
    assert not bench.node.open_staged
    assert bench.counts()["dropped_saves.fenced"] == 1


def test_a_copy_that_is_under_way_when_its_blocks_are_needed_is_thrown_away(bench: Bench) -> None:
    copier = HeldCopier()
    bench.saver._copier = copier
    bench.save(0)
    assert copier.began.wait(WAIT_S)
    bench.saver.settle([0], deadline_s=0)
    bench.memory.layers["a"].zero_()  # the engine goes on
    copier.go_on.set()
    assert bench.saver.flush(WAIT_S)
    assert not bench.node.files


def test_without_a_slot_a_save_is_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_bridge.saves.BRIDGE_SLOT_DEADLINE_S", 0.01)
    with bench.staging.slot(0), bench.staging.slot(0), bench.staging.slot(0):
        bench.save(0)
        assert bench.saver.flush(WAIT_S)
    assert bench.counts()["dropped_saves.no_slot"] == 1


def test_a_disk_error_costs_the_save(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot write a chunk")

    def fail(fd: int, memory: memoryview, at: int = 0) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gpu_bridge.saves.write_from", fail)
    bench.save(0, 1)
    assert bench.saver.flush(WAIT_S)
    assert bench.counts()["dropped_saves.io_error"] == 2
    assert not bench.node.open_staged


def spoil(bench: Bench, kind: str) -> None:
    """Spoil chunk 1 of 3."""
    path = bench.path(1)
    content = bench.node.files[path]
    digest = digest_of(content)
    match kind:
        case "missing":
            del bench.node.files[path]
        case "flipped":
            bench.node.put(path, content[:-1] + bytes([content[-1] ^ 1]), digest)
        case "cut":
            bench.node.put(path, content[:-4096], digest)
        case "empty":
            bench.node.put(path, b"")
        case "foreign":
            bench.node.put(path, os.urandom(len(content)))
        case "large":
            bench.node.put(path, bytes(bench.staging.slot_bytes + 1))
        case "other chunk":
            bench.node.put(path, bench.node.files[bench.path(0)])


FAILURES = {
    "missing": "missing", "flipped": "corrupt", "cut": "corrupt", "empty": "foreign",
    "foreign": "foreign", "large": "foreign", "other chunk": "foreign",
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_a_bad_chunk_is_a_miss_and_what_came_before_it_stays(
    bench: Bench, kind: str, allow_warnings: list[str]
) -> None:
    allow_warnings += ["a chunk is corrupt", "wrong bytes", "not the chunk that its name promises"]
    bench.save(0, 1, 2)
    assert bench.saver.flush(WAIT_S)
    spoil(bench, kind)
    before = bench.memory.blocks()
    bench.load("r", [9, 10, 11, 12, 13, 14])
    outcome = bench.outcome()
    assert outcome.failed_blocks == {11, 12, 13, 14}
    assert bench.memory.blocks()[:13] == [*before[:9], *before[1:3], *before[11:13]]
    assert bench.counts()[f"failed_loads.{FAILURES[kind]}"] == 1
    is_written_anew = FAILURES[kind] != "missing"
    assert outcome.suspects == ({HASHES[3]} if is_written_anew else set())
    if FAILURES[kind] == "corrupt":
        wait_until(lambda: len(bench.node.reported) == 1, WAIT_S)
    assert bool(bench.node.reported) == (FAILURES[kind] == "corrupt")


def test_a_node_that_is_long_in_reading_a_bad_chunk_again_keeps_no_load_waiting(
    bench: Bench, allow_warnings: list[str]
) -> None:
    allow_warnings += ["a chunk is corrupt", "wrong bytes"]
    bench.save(0, 1, 2)
    assert bench.saver.flush(WAIT_S)
    spoil(bench, "flipped")
    began, held = threading.Event(), threading.Event()

    def read_again(name: str) -> None:
        if name == "report_corrupt":
            began.set()
            held.wait(WAIT_S)

    bench.node.before = read_again
    try:
        for _ in range(2):
            bench.load("r", [9, 10, 11, 12, 13, 14])
            assert bench.outcome().failed_blocks == {11, 12, 13, 14}
        assert began.wait(WAIT_S)
        wait_until(lambda: bench.staging.free == bench.staging.count)
        assert not bench.node.reported
    finally:
        held.set()
    wait_until(lambda: len(bench.node.reported) == 1)  # told once of one blob


def test_a_complaint_that_is_not_answered_costs_a_line_in_the_log(
    bench: Bench, allow_warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = "did not look at corrupt blob 6161: away"
    allow_warnings.append(line)
    bench.node.is_away = True
    bench.complaints.complain(b"aa")
    wait_until(lambda: not bench.complaints._waiting)
    bench.node.is_away = False
    bench.complaints.complain(b"bb")
    wait_until(lambda: bench.node.reported == [b"bb"])
    (message,) = caplog.messages
    assert line in message


def test_a_chunk_of_another_model_or_fingerprint_is_a_miss(
    bench: Bench, allow_warnings: list[str]
) -> None:
    allow_warnings.append("not the chunk that its name promises: chunk: its (model|fingerprint) is")
    bench.save(0)
    assert bench.saver.flush(WAIT_S)
    for place in (replace(PLACE, model="n"), replace(PLACE, fingerprint="1" * 32)):
        bench.load("r", [9, 10], place)
        assert bench.outcome().failed_blocks == {9, 10}


def test_a_node_that_is_away_fails_a_load(bench: Bench) -> None:
    bench.node.is_away = True
    bench.load("r", [9, 10, 11, 12])
    assert bench.outcome().failed_blocks == {9, 10, 11, 12}
    assert bench.counts()["failed_loads.unavailable"] == 2


def test_a_late_load_fails_and_never_writes_afterwards(
    allow_warnings: list[str],
) -> None:
    allow_warnings.append("is given up")
    bench = Bench(deadline_s=0.05)
    bench.save(0)
    assert bench.saver.flush(WAIT_S)
    held = threading.Event()
    bench.node.before = lambda name: held.wait(WAIT_S) and None
    bench.load("r", [9, 10])
    assert bench.outcome().failed_blocks == {9, 10}
    assert bench.counts()["failed_loads.late"] == 1
    before = bench.memory.blocks()
    held.set()
    bench.close()
    assert bench.memory.blocks() == before


def test_a_cancelled_load_ends_when_nothing_is_copied_any_more(bench: Bench) -> None:
    copier = HeldCopier()
    bench.save(0)
    assert bench.saver.flush(WAIT_S)
    bench.loader._copier = copier
    bench.load("r", [9, 10])
    assert copier.began.wait(WAIT_S)
    bench.loader.cancel("r")
    assert bench.loader.take_outcomes() == []
    copier.go_on.set()
    assert bench.outcome().failed_blocks == {9, 10}


def open_memory_files(name: str) -> int:
    """How many descriptors of this process are of the node's files of a name."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
    return count


def test_the_end_in_the_middle_of_a_load_leaves_no_file_open(bench: Bench) -> None:
    before = open_memory_files("chunk")
    copier = HeldCopier()
    bench.save(*range(2 * BRIDGE_OPEN_BATCH), block_ids=(1, 2))
    assert bench.saver.flush(WAIT_S)
    bench.loader._copier = copier
    bench.load("r", [1 + n % 15 for n in range(4 * BRIDGE_OPEN_BATCH)])
    assert copier.began.wait(WAIT_S)
    assert open_memory_files("chunk") > before + 1
    bench.loader.close()
    copier.go_on.set()
    wait_until(lambda: open_memory_files("chunk") == before, WAIT_S)


def test_the_end_in_the_middle_of_a_save_leaves_no_file_open(
    bench: Bench, allow_warnings: list[str]
) -> None:
    allow_warnings.append("10 chunks were not saved")
    before = open_memory_files("staged")
    copier = HeldCopier()
    bench.saver._copier = copier
    bench.save(*range(10), block_ids=(1, 2))
    assert copier.began.wait(WAIT_S)
    assert open_memory_files("staged") > before + 10
    bench.saver.close(0.0)
    copier.go_on.set()
    wait_until(lambda: open_memory_files("staged") == before, WAIT_S)


def test_a_long_request_is_opened_in_batches_and_loaded_whole(bench: Bench) -> None:
    count = 2 * BRIDGE_OPEN_BATCH + 3
    bench.save(*range(count), block_ids=(1, 2))
    assert bench.saver.flush(WAIT_S)
    bench.node.calls.clear()
    bench.load("r", [1 + n % 15 for n in range(2 * count)])
    assert bench.outcome().is_whole
    assert bench.node.calls.count("locate") == 3
    assert bench.counts()["loaded_chunks"] == count
