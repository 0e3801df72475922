"""When closed files are published that need not be at once: policy, waiting, failures."""

import errno
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.config import (
    CLIENT_DEADLINE_S,
    MIB,
    SETTLE_AGE_S,
    SETTLE_BYTES_MAX,
    SETTLE_QUIET_S,
    SETTLE_RETRY_S,
    SETTLE_SEEN_S,
    SETTLE_WAIT_S,
)
from kvfs.errors import NamespaceError, OutOfSpace
from mount.settling import Settling


class Bench:
    """A settling whose publications are noted, and fail or hang as they are told."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.ended: list[int] = []
        self.failures: list[Exception] = []
        self.gate: trio.Event | None = None
        self.end_failures: list[Exception] = []
        self.settling = Settling(self._publish, self._end)

    async def _publish(self, ino: int) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.published.append(ino)

    def _end(self, ino: int) -> None:
        if self.end_failures:
            raise self.end_failures.pop(0)
        self.ended.append(ino)


@pytest.fixture
async def bench(nursery: trio.Nursery) -> AsyncIterator[Bench]:
    made = Bench()
    nursery.start_soon(made.settling.run)
    yield made


async def after(seconds: float) -> None:
    await trio.sleep(seconds)
    await wait_all_tasks_blocked()


async def test_it_waits_for_a_quiet_moment(bench: Bench, autojump_clock: MockClock) -> None:
    bench.settling.put_off(7, MIB)
    await after(SETTLE_QUIET_S / 2)
    bench.settling.note_writer()
    await after(SETTLE_QUIET_S * 0.9)
    assert bench.published == []
    await after(SETTLE_QUIET_S * 0.2)
    assert bench.published == [7]


async def test_it_does_not_wait_for_ever(bench: Bench, autojump_clock: MockClock) -> None:
    bench.settling.put_off(7, MIB)
    for _ in range(int(SETTLE_AGE_S / SETTLE_QUIET_S * 2)):
        assert bench.published == [] or trio.current_time() >= SETTLE_AGE_S
        bench.settling.note_writer()
        await after(SETTLE_QUIET_S / 2)
    await after(SETTLE_QUIET_S / 2)
    assert bench.published == [7]


async def test_who_asks_gets_it_at_once(bench: Bench, autojump_clock: MockClock) -> None:
    for ino in (7, 8, 9):
        bench.settling.put_off(ino, MIB)
    await bench.settling.settle(8)
    assert bench.published == [8]
    assert 8 not in bench.settling
    await bench.settling.settle(8)  # which waits no more
    await bench.settling.settle_all()
    assert sorted(bench.published) == [7, 8, 9]
    assert trio.current_time() == 0


async def test_the_end_of_waiting_is_told_once(bench: Bench, autojump_clock: MockClock) -> None:
    bench.settling.put_off(7, MIB)
    bench.settling.put_off(7, MIB)
    assert (list(bench.settling), bench.ended) == ([7], [])
    await bench.settling.settle(7)
    assert (list(bench.settling), bench.ended) == ([], [7])


async def test_a_file_that_lost_its_name_is_let_go(bench: Bench, autojump_clock: MockClock) -> None:
    bench.settling.put_off(7, MIB)
    bench.settling.forget(7)
    bench.settling.forget(8)  # which does not wait
    await after(SETTLE_AGE_S)
    assert (bench.published, bench.ended) == ([], [7])


async def test_one_that_is_being_published_is_not_let_go_twice(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.gate = trio.Event()
    bench.settling.put_off(7, MIB)
    await after(SETTLE_QUIET_S * 2)
    bench.settling.forget(7)
    assert bench.ended == []
    bench.gate.set()
    await after(0)
    assert bench.ended == [7]


async def test_what_cannot_be_published_waits_on(
    bench: Bench, autojump_clock: MockClock, allow_warnings: list[str]
) -> None:
    allow_warnings.append("inode 7 cannot be published yet: no room")
    bench.failures = [OutOfSpace("no room"), OutOfSpace("no room")]
    bench.settling.put_off(7, MIB)
    with pytest.raises(OutOfSpace, match="no room"):
        await bench.settling.settle(7)
    assert bench.settling.describe() == {
        "unsettled_files": 1,
        "unsettled_bytes": MIB,
        "unsettled_why": "no room",
    }
    await bench.settling.settle_all()  # fails again, and does not wait for what comes later
    assert (bench.published, bench.ended) == ([], [])
    await after(SETTLE_RETRY_S * 1.1)
    assert (bench.published, bench.ended) == ([7], [7])
    assert bench.settling.describe()["unsettled_files"] == 0


async def test_a_fault_of_ours_costs_one_file_and_no_mount(
    bench: Bench, autojump_clock: MockClock, allow_warnings: list[str]
) -> None:
    allow_warnings.append("inode 7 cannot be published yet: 'absent'")
    bench.failures = [KeyError("absent")]
    bench.settling.put_off(7, MIB)
    with pytest.raises(KeyError):
        await bench.settling.settle(7)
    bench.settling.put_off(8, MIB)
    await after(SETTLE_RETRY_S * 1.1)
    assert bench.published == [8, 7]


async def test_a_file_that_cannot_be_let_go_costs_no_mount(
    bench: Bench, autojump_clock: MockClock, allow_warnings: list[str]
) -> None:
    allow_warnings.append("inode 7 could not be let go")
    bench.end_failures = [OSError(errno.EIO, "bad disk")]
    bench.settling.put_off(7, MIB)
    await bench.settling.settle(7)
    bench.settling.put_off(8, MIB)
    await bench.settling.settle_all()
    assert bench.published == [7, 8]
    assert bench.ended == [8]
    assert bench.settling.room_bytes(8) == SETTLE_BYTES_MAX


async def test_a_later_file_does_not_wait_for_one_that_is_tried_again(
    bench: Bench, autojump_clock: MockClock, allow_warnings: list[str]
) -> None:
    allow_warnings.append("inode 7 cannot be published yet: no room")
    bench.failures = [OutOfSpace("no room")]
    bench.settling.put_off(7, MIB)
    await after(SETTLE_QUIET_S * 1.1)
    bench.settling.put_off(8, MIB)
    await after(SETTLE_QUIET_S * 1.1)
    assert bench.published == [8]


async def test_nobody_waits_for_ever(bench: Bench, autojump_clock: MockClock) -> None:
    bench.gate = trio.Event()
    bench.settling.put_off(7, MIB)
    with pytest.raises(NamespaceError) as raised:
        await bench.settling.settle(7)
    assert raised.value.code == errno.ETIMEDOUT
    begin_s = trio.current_time()
    await bench.settling.settle_all()
    assert trio.current_time() - begin_s == pytest.approx(SETTLE_WAIT_S)
    bench.gate.set()
    await after(0)
    assert bench.published == [7]


async def test_a_publication_that_needs_room_does_not_wait_for_itself(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    async def publish(ino: int) -> None:
        await settling.settle_seen()  # as `Reclaim.make_room` does
        published.append(ino)

    published: list[int] = []
    settling = Settling(publish, lambda ino: None)
    nursery.start_soon(settling.run)
    settling.put_off(7, MIB)
    await settling.settle(7)
    assert published == [7]
    assert trio.current_time() == 0


async def test_what_waits_is_bounded(bench: Bench, autojump_clock: MockClock) -> None:
    bench.settling.put_off(7, SETTLE_BYTES_MAX - MIB)
    assert bench.settling.room_bytes(8) == MIB
    assert bench.settling.room_bytes(7) == SETTLE_BYTES_MAX
    bench.settling.put_off(7, SETTLE_BYTES_MAX)  # closed once more, and longer
    assert bench.settling.room_bytes(8) == 0
    assert bench.settling.room_bytes(7) == SETTLE_BYTES_MAX
    await bench.settling.settle_all()
    assert bench.settling.room_bytes(8) == SETTLE_BYTES_MAX
    assert bench.published == [7]


async def test_who_asks_does_not_have_a_failure_repeated(
    bench: Bench, autojump_clock: MockClock, allow_warnings: list[str]
) -> None:
    allow_warnings.append("inode 7 cannot be published yet: no room")
    bench.failures = [OutOfSpace("no room")]
    bench.settling.put_off(7, MIB)
    await bench.settling.settle_seen()
    bench.settling.put_off(8, MIB)
    await bench.settling.settle_seen()
    assert bench.published == [8]
    await after(SETTLE_RETRY_S * 1.1)
    assert bench.published == [8, 7]


async def test_one_alone_waits_for_a_disk_that_hangs(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.gate = trio.Event()
    bench.settling.put_off(7, MIB)
    begin_s = trio.current_time()
    await bench.settling.settle_seen()
    assert trio.current_time() - begin_s == pytest.approx(SETTLE_SEEN_S)
    assert SETTLE_SEEN_S < CLIENT_DEADLINE_S
    await bench.settling.settle_seen()
    assert trio.current_time() - begin_s == pytest.approx(SETTLE_SEEN_S)
    bench.gate.set()
    await after(0)
    bench.settling.put_off(8, MIB)
    await bench.settling.settle_seen()  # the disk is back
    assert bench.published == [7, 8]
