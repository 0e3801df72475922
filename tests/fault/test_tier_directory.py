"""A tier's directory that fills up, is damaged, is not mounted, or is used by many."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.config import GIB, MIB
from kvfs.digest import digest_of
from kvfs.errors import Corrupt, InvalidInput, OutOfSpace, TierStalled, TierTrouble
from kvfs.health import HealthState
from kvfs.home import TIER_MARK
from kvfs.settings.sizes import Share
from kvfs.settings.words import DirectoryConfig, TierKind, TierLimits
from kvfs.tiers import directory as directories
from kvfs.tiers.directory import DirectoryTier
from tests.disks import small_disk
from tests.tiers import on_tmpfs, open_directory, path_of, staged

ROOT = Path(__file__).parents[2]
DATA = os.urandom(2 * MIB)
DIGEST = digest_of(DATA)
SHORT_S = 0.3
FEW = TierLimits(reads_max=2, writes_max=2, read_deadline_s=20.0, write_deadline_s=20.0)


def put(tier: DirectoryTier, data: bytes = DATA) -> bytes:
    digest = digest_of(data)
    tier.put(digest, memoryview(data), len(data))
    return digest


# Not the directory that it should be --------------------------------------------------------------
@pytest.mark.parametrize("kind", [TierKind.NVME, TierKind.SHARED])
def test_a_file_system_that_is_not_mounted_gives_no_misses(tmp_path: Path, kind: TierKind) -> None:
    tier = open_directory(tmp_path / "tier", kind)
    put(tier)
    (tmp_path / "tier").rename(tmp_path / "elsewhere")
    (tmp_path / "tier").mkdir()
    buffer = memoryview(bytearray(10))
    for call in (
        lambda: tier.read_into(DIGEST, 0, buffer),
        lambda: tier.has([DIGEST]),
        lambda: tier.remove(DIGEST),
    ):
        with pytest.raises(TierTrouble, match="is it mounted"):
            call()
    assert tier.health is HealthState.DOWN
    (tmp_path / "tier").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "tier")
    assert tier.read_into(DIGEST, 0, buffer)
    tier.close()


def test_an_unmounted_tier_is_not_written_to(tmp_path: Path) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.SHARED)
    (tmp_path / "tier").rename(tmp_path / "elsewhere")
    (tmp_path / "tier").mkdir()
    with pytest.raises(TierTrouble, match="staging"):
        put(tier)
    assert os.listdir(tmp_path / "tier") == []
    tier.close()


def test_what_is_no_tiers_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    BlobDirectory.open(DirectoryConfig(tmp_path / "store")).close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter").write_text("dear")
    (tmp_path / "file").write_text("")
    lost = open_directory(tmp_path / "lost", TierKind.NVME)
    put(lost)
    (tmp_path / "lost" / TIER_MARK).unlink()
    newer = tmp_path / "newer"
    open_directory(newer, TierKind.NVME)
    (newer / TIER_MARK).write_text(json.dumps({"version": 2}))
    for name, kind, said in (
        ("store", TierKind.NVME, "a store's own directory"),
        ("full", TierKind.SHARED, "holds other files .letter."),
        ("file", TierKind.NVME, "cannot be a tier"),
        ("none/deep", TierKind.SHARED, "cannot be made"),
        ("lost", TierKind.NVME, "has lost its tier.json"),
        ("newer", TierKind.NVME, "is of version 2"),
        ("memory", TierKind.MEMORY, "not in memory"),
    ):
        with pytest.raises(InvalidInput, match=said):
            open_directory(tmp_path / name, kind)
    assert os.listdir(tmp_path / "full") == ["letter"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"version": ', "is no JSON object"),
        (b"\xff\xfe", "is no JSON object"),
        (b"[1]", "is no JSON object"),
        (b"{}", "has no version"),
    ],
)
def test_a_broken_mark_says_what_to_write_and_that_helps(
    content: bytes, said: str, tmp_path: Path
) -> None:
    open_directory(tmp_path / "tier", TierKind.NVME).close()
    mark = tmp_path / "tier" / TIER_MARK
    mark.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"{TIER_MARK}: {said}") as refused:
        open_directory(tmp_path / "tier", TierKind.NVME)
    assert mark.read_bytes() == content
    mark.write_text(refused.value.reason.partition("write ")[2].removesuffix(" into it"))
    open_directory(tmp_path / "tier", TierKind.NVME).close()


def test_a_tier_becomes_no_store(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    put(open_directory(root, TierKind.NVME))
    before = sorted(os.listdir(root))
    with pytest.raises(InvalidInput, match="is a tier"):
        BlobDirectory.open(DirectoryConfig(root))
    said = subprocess.run(
        [sys.executable, "-m", "kvfs", "init", root], capture_output=True, cwd=ROOT, timeout=60
    )
    assert said.returncode == 2 and b"is not empty" in said.stderr
    assert sorted(os.listdir(root)) == before


def test_many_may_make_a_tier_at_the_same_time(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            tier = open_directory(tmp_path / "tier", TierKind.SHARED, node_id=f"node{number}")
            put(tier)
            tier.close()
        except BaseException as error:  # noqa: BLE001  (told below)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert path_of(tmp_path / "tier", DIGEST).read_bytes() == DATA
    assert sorted(os.listdir(tmp_path / "tier")) == ["blobs", "quarantine", "staging", TIER_MARK]
    assert staged(tmp_path / "tier") == []


# Damage and full disks ----------------------------------------------------------------------------
def test_what_is_no_file_in_a_blobs_place_is_a_miss(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("in the way of a blob")
    tier = open_directory(tmp_path / "tier", TierKind.NVME)
    put(tier)
    path = path_of(tmp_path / "tier", DIGEST)
    buffer = memoryview(bytearray(10))
    (tmp_path / "other").write_bytes(DATA)
    for make in (
        lambda: os.mkfifo(path),
        lambda: os.symlink(tmp_path / "other", path),
        lambda: os.mkdir(path),
    ):
        path.unlink()
        make()
        assert not tier.read_into(DIGEST, 0, buffer)
        assert tier.has([DIGEST]) == [None]
        put(tier)
        assert tier.read_into(DIGEST, 0, buffer) and buffer == DATA[:10]


def test_what_is_no_file_is_set_aside_where_a_blob_is_removed(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("in the way of a blob")
    tier = open_directory(tmp_path / "tier", TierKind.NVME)
    put(tier)
    path = path_of(tmp_path / "tier", DIGEST)
    path.unlink()
    for number, make in enumerate((os.mkfifo, lambda place: os.symlink("x", place), os.mkdir)):
        make(path)
        was = os.lstat(path).st_ino
        tier.remove(DIGEST)
        assert not os.path.lexists(path)
        kept = [os.lstat(item).st_ino for item in (tmp_path / "tier" / "quarantine").iterdir()]
        assert was in kept and len(kept) == number + 1
    assert tier.health is HealthState.UP


def test_a_full_disk_is_told_as_such_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small", "4m") as small:
        tier = open_directory(small / "tier", TierKind.MEMORY, min_free=0)
        put(tier)
        large = os.urandom(3 * MIB)
        with pytest.raises(OutOfSpace, match="that must stay free"):
            put(tier, large)
        with monkeypatch.context() as patch:  # another took the room just now
            patch.setattr(tier, "_check_room", lambda size_bytes: None)
            with pytest.raises(OutOfSpace, match="No space"):
                put(tier, large)
        assert staged(small / "tier") == [] and tier.has([digest_of(large)]) == [None]
        assert (tier.health, tier.counters.failures) == (HealthState.UP, 0)
        tier.remove(DIGEST)
        put(tier, large)
        tier.close()


@pytest.mark.parametrize("min_free", [1024 * GIB * 1024, Share(1.0)])
def test_what_must_stay_free_stays_free(tmp_path: Path, min_free: object) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.NVME, min_free=min_free)
    with pytest.raises(OutOfSpace, match="must stay free"):
        put(tier)
    assert tier.has([DIGEST]) == [None]


@pytest.mark.parametrize("kind", [TierKind.NVME, TierKind.SHARED])
def test_a_disk_that_cannot_read_is_trouble(
    tmp_path: Path, kind: TierKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_directory(tmp_path / "tier", kind)
    put(tier)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error", "the disk")

    buffer = memoryview(bytearray(10))
    with monkeypatch.context() as patch:
        patch.setattr(directories, "read_into", fail)
        for _ in range(3):
            with pytest.raises(TierTrouble, match=f"tier a-{kind}: the disk: Input/output error"):
                tier.read_into(DIGEST, 0, buffer)
    assert (tier.health, tier.counters.failures) == (HealthState.DOWN, 3)
    assert tier.read_into(DIGEST, 0, buffer)
    tier.close()


def test_a_blob_removed_by_another_node_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.SHARED)
    put(tier)

    def stale(*_: object, **__: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(directories, "read_into", stale)
    assert not tier.read_into(DIGEST, 0, memoryview(bytearray(10)))
    assert tier.health is HealthState.UP
    tier.close()


def test_wrong_bytes_go_to_the_quarantine(tmp_path: Path) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.SHARED)
    put(tier)
    path_of(tmp_path / "tier", DIGEST).write_bytes(b"wrong")
    assert not tier.recheck(DIGEST)
    [kept] = (tmp_path / "tier/quarantine").iterdir()
    assert kept.read_bytes() == b"wrong" and kept.name.startswith(DIGEST.hex())
    tier.close()


def test_a_local_call_that_is_late_ends_between_two_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.NVME)
    data = os.urandom(20 * MIB)
    digest = put(tier, data)
    late = threading.Event()
    preadv = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        late.wait(0.2)
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow)
        with pytest.raises(TierStalled):
            tier.read_into(digest, 0, memoryview(bytearray(len(data))), 0.1)
    (tmp_path / "source").write_bytes(data)
    fd = os.open(tmp_path / "source", os.O_RDONLY)
    tier.remove(digest)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow)
        with pytest.raises(TierStalled):
            tier.put(digest, fd, len(data), 0.1)
    os.close(fd)
    assert tier.has([digest]) == [None] and staged(tmp_path / "tier") == []


def test_a_source_that_is_none_is_no_fault_of_the_tier(tmp_path: Path) -> None:
    tier = open_directory(tmp_path / "tier", TierKind.NVME)
    with pytest.raises(InvalidInput, match="none to read"):
        tier.put(DIGEST, 10_000, len(DATA))
    with pytest.raises(Corrupt, match="cannot be read"):
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            tier.put(DIGEST, fd, len(DATA))
        finally:
            os.close(fd)
    assert tier.counters.failures == 0


# Puts that never ended ----------------------------------------------------------------------------
PUTTING = """
import os, sys
from pathlib import Path
from kvfs.settings.words import TierKind
from kvfs.digest import digest_of
from tests.tiers import on_tmpfs, open_directory, path_of, staged

tier = open_directory(Path(sys.argv[1]), TierKind.SHARED, node_id="killed")
print("begins", flush=True)
while True:
    data = os.urandom(12 << 20)
    tier.put(digest_of(data), memoryview(data), len(data))
    print("put", flush=True)
"""


def test_a_killed_node_leaves_whole_blobs_and_staging_that_is_purged_when_it_is_old(
    tmp_path: Path,
) -> None:
    root = tmp_path / "tier"
    for count in (1, 2, 3):
        command = [sys.executable, "-c", PUTTING, root]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begins\n"
            assert [process.stdout.readline() for _ in range(count)] == [b"put\n"] * count
            process.kill()
    tier = open_directory(root, TierKind.SHARED)
    found = [item for batch in tier.scan() for item in batch]
    assert len(found) >= 6
    for digest, size in found:
        data = path_of(root, digest).read_bytes()
        assert (digest_of(data), len(data)) == (digest, size)
    (root / "staging/killed.0.1").write_bytes(b"half")
    assert tier.purge() == 0
    for name in staged(root):
        os.utime(root / "staging" / name, (1.0, 1.0))
    (root / "staging/working.0.1").write_bytes(b"now")
    assert tier.purge() >= 1
    assert staged(root) == ["working.0.1"]
    tier.close()


def test_a_tier_in_memory_is_one(tmp_path: Path) -> None:
    with on_tmpfs() as path:
        tier = open_directory(path, TierKind.MEMORY)
        put(tier)
        assert tier.has([DIGEST]) == [len(DATA)]
        tier.close()
