"""Removal in the background: what cannot be unlinked is told, and stops nothing."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock, assert_no_checkpoints, wait_all_tasks_blocked

from kvfs.blobs import BlobDirectory
from kvfs.config import MIB, PAGE_BYTES
from kvfs.errors import OutOfSpace
from kvfs.meta.contract import Blob, MetaEngine, Usage
from kvfs.open_blobs import OpenBlobs
from kvfs.reclaim import Evicted, Reclaim
from kvfs.settings.words import DirectoryConfig
from kvfs.space import Space
from kvfs.stage import Stage

DIGESTS = [bytes([number]) * 16 for number in range(3)]


class Meta:
    """Doomed blobs, each of one MiB."""

    def __init__(self) -> None:
        self.doomed_digests: list[bytes] = []
        self.stored = len(DIGESTS)

    def doomed(self, limit: int) -> list[Blob]:
        return [Blob(digest, MIB, MIB, 0, 0) for digest in self.doomed_digests[:limit]]

    def bury(self, digests: list[bytes]) -> None:
        self.doomed_digests = [d for d in self.doomed_digests if d not in digests]
        self.stored -= len(digests)

    def newest_used_ns(self) -> int:
        return 0

    def usage(self) -> Usage:
        return Usage(0, self.stored, self.stored * MIB, (self.stored * MIB,))


class Bench:
    """A directory with a blob for each digest, and its reclaim."""

    def __init__(self, path: Path) -> None:
        limit = 4 * MIB
        self.directory = BlobDirectory.open(DirectoryConfig(path, max_bytes=limit, min_free=0))
        for digest in DIGESTS:
            staged = self.directory.stage()
            os.write(staged.fd, bytes(MIB))
            os.close(staged.fd)
            self.directory.adopt(staged.name, digest)
        self.meta = Meta()
        self.spare: list[Callable[[], None]] = []
        self.unsettled: list[Callable[[], None]] = []
        self.evicted: list[int] = []
        self.fruitless_steps = 0
        self.open_blobs = OpenBlobs(cast(MetaEngine, self.meta))
        self.space = Space([self.directory], self.meta.usage, path / "none")
        self.reclaim = Reclaim(
            [self.directory],
            self.meta,  # type: ignore[arg-type]  # only what is asked here
            self.space,
            lambda: [release() for release in self.spare] and None,
            self._settle,
            self._evict,
            self._demote,
            self.open_blobs,
        )

    async def _settle(self) -> None:
        for settle in self.unsettled:
            settle()

    async def _demote(self, index: int, short_bytes: int, until_ns: int) -> None:
        """There is no other place."""

    def _evict(self, index: int, short_bytes: int, until_ns: int) -> Evicted:
        self.evicted.append(short_bytes)
        if self.fruitless_steps:
            self.fruitless_steps -= 1
            return Evicted(0, False)
        files = self.doom(1)
        return Evicted(files, not files)

    def doom(self, count: int) -> int:
        """Take blobs away; how many there were."""
        found = DIGESTS[len(DIGESTS) - self.meta.stored :][:count]
        self.meta.doomed_digests += found
        self.reclaim.reap()
        return len(found)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store")
    yield made
    made.directory.close()


async def reclaimed(bench: Bench) -> None:
    """Run the background task until nothing is left in the trash."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.reclaim.remove_always)
        with trio.fail_after(10):
            while bench.space.trash_bytes(0):
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS])
def test_a_file_that_cannot_be_unlinked_is_told_and_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str], code: int
) -> None:
    allow_warnings.append("cannot be removed, the next start will")
    unlink = os.unlink
    failed: list[str] = []

    def fail_once(path: str) -> None:
        if not failed:
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail_once)
    bench.doom(3)
    assert bench.space.trash_bytes(0) == 3 * MIB
    trio.run(reclaimed, bench)
    staging = bench.directory.path / "staging"
    assert [os.fspath(path) for path in staging.iterdir()] == failed
    assert bench.space.used_bytes(0) == bench.directory.overhead_bytes() + MIB  # and still counted
    monkeypatch.undo()
    bench.directory.close()
    reopened = BlobDirectory.open(bench.directory.config)
    assert reopened.purge_staging() == 1
    assert list(staging.iterdir()) == []
    bench.directory = reopened


def test_a_blob_that_cannot_be_taken_out_of_the_way_ends_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be removed, gc may: .*Input/output error")
    trash = bench.directory.trash

    def fail_for_first(digest: bytes) -> str | None:
        if digest == DIGESTS[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return trash(digest)

    monkeypatch.setattr(bench.directory, "trash", fail_for_first)
    assert bench.doom(2) == 2
    assert bench.meta.doomed_digests == []
    trio.run(reclaimed, bench)
    assert bench.space.used_bytes(0) == bench.directory.overhead_bytes() + 2 * MIB  # still counted


def test_a_file_that_is_gone_already_is_fine(bench: Bench) -> None:
    bench.doom(1)
    for path in (bench.directory.path / "staging").iterdir():
        path.unlink()
    trio.run(reclaimed, bench)
    bench.doom(2)
    trio.run(reclaimed, bench)
    assert list((bench.directory.path / "staging").iterdir()) == []  # it went on after the first


def test_room_comes_first_from_what_is_only_kept_for_a_moment(bench: Bench) -> None:
    async def make_room() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.reclaim.remove_always)
            await bench.reclaim.make_room(0, MIB)
            nursery.cancel_scope.cancel()

    bench.spare.append(lambda: bench.doom(1))
    trio.run(make_room)
    assert bench.evicted == []


def test_what_was_closed_may_go_before_there_is_no_room(bench: Bench) -> None:
    async def make_room() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.reclaim.remove_always)
            await bench.reclaim.make_room(0, MIB)
            nursery.cancel_scope.cancel()

    stored, bench.meta.stored = bench.meta.stored, 0  # nothing is published, so nothing may go
    stage = Stage(0, "", -1)
    bench.space.begin_stage(stage)
    bench.space.reserve(stage, stored * MIB)

    def publish() -> None:
        bench.space.end_stage(stage)
        bench.meta.stored = stored

    bench.unsettled.append(publish)
    trio.run(make_room)
    assert len(bench.evicted) == 1


def test_what_was_refused_since_nothing_may_go_is_told_until_there_is_room(bench: Bench) -> None:
    async def make_room() -> None:
        bench.reclaim._evict = lambda index, short_bytes, until_ns: Evicted(0, True)
        with pytest.raises(OutOfSpace, match="unpin"):
            await bench.reclaim.make_room(0, 2 * MIB)
        assert bench.reclaim.refused_bytes(0) == 2 * MIB
        bench.reclaim._evict = bench._evict
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.reclaim.remove_always)
                await bench.reclaim.make_room(0, 2 * MIB)
                nursery.cancel_scope.cancel()
        assert bench.reclaim.refused_bytes(0) == 0

    trio.run(make_room)


def test_who_waits_for_room_does_not_wait_for_a_publication_for_ever(bench: Bench) -> None:
    async def make_room() -> None:
        with pytest.raises(OutOfSpace, match="not even an empty cache"):
            await bench.reclaim.make_room(0, MIB)

    async def hang() -> None:
        await trio.sleep_forever()

    bench.meta.stored = 0
    stage = Stage(0, "", -1)
    bench.space.begin_stage(stage)
    bench.space.reserve(stage, 3 * MIB)
    bench.reclaim._settle = hang
    trio.run(make_room, clock=MockClock(autojump_threshold=0))


def test_what_is_written_counts_once_where_the_disk_limits(tmp_path: Path) -> None:
    directory = BlobDirectory.open(DirectoryConfig(tmp_path, max_bytes=None, min_free=0))
    space = Space([directory], lambda: Usage(0, 0, 0, (0,)), tmp_path / "none")
    disk = {"free": 100 * MIB}
    directory.free_bytes = lambda: disk["free"]  # type: ignore[method-assign]
    staged = directory.stage()
    stage = Stage(0, staged.name, staged.fd)
    space.begin_stage(stage)
    space.reserve(stage, 60 * MIB)
    assert space.room_bytes(0) == 40 * MIB
    os.posix_fallocate(stage.fd, 0, 50 * MIB)
    disk["free"] -= 50 * MIB
    directory.disk_seen_s += 1
    assert space.room_bytes(0) == 40 * MIB
    space.reserve(stage, 5 * MIB)
    assert space.room_bytes(0) == 35 * MIB
    space.end_stage(stage)
    assert space.room_bytes(0) == 50 * MIB
    os.close(stage.fd)
    directory.close()


def test_a_stage_that_is_written_is_looked_at_no_more_until_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = BlobDirectory.open(DirectoryConfig(tmp_path, max_bytes=None, min_free=0))
    space = Space([directory], lambda: Usage(0, 0, 0, (0,)), tmp_path / "none")
    staged = directory.stage()
    stage = Stage(0, staged.name, staged.fd)
    space.begin_stage(stage)
    space.reserve(stage, 60 * MIB)
    os.posix_fallocate(stage.fd, 0, 10 * MIB)
    looks: list[int] = []
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: looks.append(fd) or fstat(fd))

    def unwritten() -> int:
        directory.disk_seen_s += 1
        return directory.free_bytes() - directory.min_free_bytes() - space.room_bytes(0)

    assert unwritten() == 50 * MIB
    space.fit(stage, 10 * MIB)
    assert stage.reserved_bytes == 10 * MIB
    assert unwritten() == 0
    looks.clear()
    assert unwritten() == 0
    assert not looks
    os.ftruncate(stage.fd, 0)
    space.note_cut(stage)
    assert unwritten() == 10 * MIB
    assert looks
    space.end_stage(stage)
    for late in (space.note_cut, lambda stage: space.fit(stage, 0)):
        late(stage)  # by who waited meanwhile
        assert unwritten() == 0
    os.close(stage.fd)
    directory.close()


def test_steps_that_find_nothing_yet_give_everyone_a_turn(bench: Bench) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def make_room() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.reclaim.remove_always)
            nursery.start_soon(count_turns)
            await bench.reclaim.make_room(0, MIB)
            nursery.cancel_scope.cancel()

    bench.fruitless_steps = 20
    trio.run(make_room)
    assert len(bench.evicted) > 20
    assert turns >= 20


def test_room_that_is_there_is_given_at_once_but_past_nobody_who_waits(bench: Bench) -> None:
    async def check() -> None:
        with assert_no_checkpoints():
            await bench.reclaim.make_room(0, MIB // 2)
        has_room = trio.Event()

        async def ask() -> None:
            await bench.reclaim.make_room(0, MIB // 2)
            has_room.set()

        async with trio.open_nursery() as nursery, bench.reclaim._lock:  # as who makes room has
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert not has_room.is_set()
        assert has_room.is_set()

    trio.run(check)


def test_nothing_is_released_where_there_is_room(bench: Bench) -> None:
    bench.spare.append(lambda: pytest.fail("released"))
    trio.run(bench.reclaim.make_room, 0, MIB // 8)
    assert bench.evicted == []


def test_what_cannot_be_unlinked_gives_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be removed")

    def fail(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    async def make_room() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.reclaim.remove_always)
            with trio.fail_after(10), pytest.raises(OutOfSpace, match="nothing is left"):
                await bench.reclaim.make_room(0, 2 * MIB)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(os, "unlink", fail)
    trio.run(make_room)
    monkeypatch.undo()


def test_a_disk_that_does_not_come_to_unlinking_is_out_of_space(
    bench: Bench,
) -> None:
    async def make_room() -> None:
        with pytest.raises(OutOfSpace, match="does not come to removing"):
            await bench.reclaim.make_room(0, MIB)

    bench.doom(2)
    trio.run(make_room, clock=MockClock(autojump_threshold=0))


def test_a_large_file_goes_at_leisure_and_counts_until_then(bench: Bench) -> None:
    path = bench.directory.path / "staging" / "large"
    path.write_bytes(bytes(8 * MIB))
    allocated = path.stat().st_blocks * 512
    before = bench.space.used_bytes(0)
    bench.reclaim.remove(0, str(path), allocated)
    assert path.exists()
    assert bench.space.used_bytes(0) == before + allocated
    trio.run(bench.reclaim.remove_queued)
    assert not path.exists()
    assert bench.space.used_bytes(0) == before


def test_a_small_file_goes_at_once(bench: Bench) -> None:
    path = bench.directory.path / "staging" / "small"
    path.write_bytes(bytes(4096))
    bench.reclaim.remove(0, str(path), 4096)
    assert not path.exists()
    bench.reclaim.remove(0, str(path), 4096)  # gone already
    assert bench.space.trash_bytes(0) == 0


def test_the_end_of_a_large_file_comes_at_leisure(bench: Bench) -> None:
    def opened(size_bytes: int, *, is_linked: bool) -> int:
        path = bench.directory.path / "staging" / "file"
        path.write_bytes(bytes(size_bytes))
        fd = os.open(path, os.O_RDONLY)
        if not is_linked:
            path.unlink()
        return fd

    for size_bytes, is_linked, is_closed in (
        (8 * MIB, True, True),
        (4096, False, True),
        (8 * MIB, False, False),
    ):
        fd = opened(size_bytes, is_linked=is_linked)
        bench.reclaim.close(fd)
        assert is_open(fd) is not is_closed
    waiting = opened(8 * MIB, is_linked=True)
    bench.reclaim.close(waiting)  # what is removed just now may be this very file
    assert is_open(waiting)
    trio.run(bench.reclaim.remove_queued)
    assert not is_open(fd)
    assert not is_open(waiting)


def is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize(
    ("free_at_first", "evicts"),
    [(48, 2), (49, 1), (50, 0), (0, None)],  # None: all that is stored would not do, so it stays
)
def test_room_is_made_where_the_disk_runs_out_of_inodes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, free_at_first: int, evicts: int | None
) -> None:
    look = os.statvfs

    def few_inodes(path: str) -> os.statvfs_result:
        fields = list(look(path))
        gone = len(DIGESTS) - sum(file.is_file() for file in bench.directory.path.rglob("?" * 32))
        fields[5:8] = [1000, free_at_first + gone, free_at_first + gone]  # 5%: 50 stay free
        return os.statvfs_result(fields)

    async def make_room() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.reclaim.remove_always)
            if evicts is None:
                with pytest.raises(OutOfSpace):
                    await bench.reclaim.make_room(0, 1)
            else:
                await bench.reclaim.make_room(0, 1)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(os, "statvfs", few_inodes)
    bench.directory.note_freed()
    trio.run(make_room)
    assert len(bench.evicted) == (evicts or 0)


def test_a_file_system_that_counts_no_inodes_has_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result([*look(path)[:5], 0, 0, 0, *look(path)[8:]])
    )
    bench.directory.note_freed()
    assert bench.space.room_bytes(0) > 0


def make_empty_leaves(directory: BlobDirectory, count: int) -> int:
    """Directories in which blobs may lie; how many there are with those that hold one."""
    directory.make_leaves([(0x8000 + number).to_bytes(2, "big") * 8 for number in range(count)])
    return len(leaves_of(directory))


def leaves_of(directory: BlobDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.glob("blobs/??/??"))


async def make_room(bench: Bench, extra_bytes: int) -> None:
    """As `Reclaim.make_room`, beside the background task."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.reclaim.remove_always)
        await bench.reclaim.make_room(0, extra_bytes)
        nursery.cancel_scope.cancel()


def test_directories_whose_blobs_went_make_room_before_any_blob_goes(bench: Bench) -> None:
    count = make_empty_leaves(bench.directory, 150)
    room_bytes = bench.space.room_bytes(0)
    trio.run(make_room, bench, room_bytes + PAGE_BYTES)
    assert not bench.evicted
    assert leaves_of(bench.directory) == ["00", "01", "02"]
    assert bench.space.room_bytes(0) == room_bytes + (count - 3) * PAGE_BYTES


def test_directories_stay_where_they_take_little(bench: Bench) -> None:
    count = make_empty_leaves(bench.directory, 10)
    trio.run(make_room, bench, bench.space.room_bytes(0) + PAGE_BYTES)
    assert len(bench.evicted) == 1
    assert len(leaves_of(bench.directory)) == count


def test_directories_whose_blobs_went_give_the_disk_its_inodes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, count = os.statvfs, make_empty_leaves(bench.directory, 10)

    def few_inodes(path: str) -> os.statvfs_result:
        fields = list(look(path))
        free = 45 + count - len(leaves_of(bench.directory))
        fields[5:8] = [1000, free, free]  # 5%: 50 stay free
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", few_inodes)
    bench.directory.note_freed()
    trio.run(make_room, bench, PAGE_BYTES)
    assert not bench.evicted
    assert leaves_of(bench.directory) == ["00", "01", "02"]


def test_a_directory_that_was_removed_as_empty_is_made_again(bench: Bench) -> None:
    digest = bytes([9]) * 16
    staged = bench.directory.stage()
    bench.directory.make_leaves([digest])
    while not bench.directory.remove_empty_leaves(1000):
        pass
    assert bench.directory.lacks_leaf(digest)
    os.close(staged.fd)
    bench.directory.adopt(staged.name, digest)
    assert bench.directory.has_blob(digest, 0)
    bench.directory.remove(digest)
    assert not bench.directory.remove_empty_leaves(1)  # there may be others
    assert bench.directory.remove_empty_leaves(1)
    assert leaves_of(bench.directory) == ["00", "01", "02"]


def test_a_directory_that_is_removed_while_it_is_used_stops_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_empty_leaves(bench.directory, 2)
    blobs = bench.directory.path / "blobs"
    found = []
    for batch in bench.directory.scan():
        found += batch
        for leaf in blobs.glob("80/??"):
            leaf.rmdir()
    assert found == [(digest, MIB) for digest in DIGESTS]

    def make_and_lose(path: str, mode: int) -> None:
        raise FileExistsError

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    bench.directory.make_leaves([bytes([9]) * 16])
