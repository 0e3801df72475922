"""A tier's directory whose file system hangs: nobody waits longer than they said."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfs.config import MIB, TIER_STUCK_MAX
from kvfs.digest import digest_of
from kvfs.errors import TierStalled, TierTrouble
from kvfs.health import HealthState
from kvfs.settings.words import TierKind, TierLimits
from kvfs.tiers.directory import DirectoryTier
from tests.hanging_files import HangingFiles
from tests.mounts import is_mounted
from tests.processes import wait_until
from tests.tiers import open_directory, path_of, staged

DATA = os.urandom(2 * MIB)
DIGEST = digest_of(DATA)
SHORT_S = 0.3
FEW = TierLimits(reads_max=2, writes_max=2, read_deadline_s=20.0, write_deadline_s=20.0)


@dataclass(frozen=True, slots=True)
class Hanging:
    """A shared tier over FUSE, whose server can be stopped."""

    tier: DirectoryTier
    files: HangingFiles

    @property
    def root(self) -> Path:
        """Where its files are seen all the same."""
        return self.files.root / "tier"

    def stop(self) -> None:
        self.files.stop()

    def go_on(self) -> None:
        self.files.go_on()

    @property
    def busy(self) -> int:
        assert self.tier._threads is not None
        return self.tier._threads.busy


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    with closing(HangingFiles(tmp_path / "root", tmp_path / "mounted")) as files:
        wait_until(lambda: is_mounted(files.mountpoint))
        tier = open_directory(files.mountpoint / "tier", TierKind.SHARED, limits=FEW)
        tier.put(DIGEST, memoryview(DATA), len(DATA))
        yield Hanging(tier, files)
        tier.close()


def test_a_hang_costs_a_reader_its_deadline_and_no_byte_of_its_buffer(hanging: Hanging) -> None:
    buffer = memoryview(bytearray(len(DATA)))
    assert hanging.tier.read_into(DIGEST, 0, buffer) and buffer == DATA
    hanging.stop()
    begin_s = time.monotonic()
    with pytest.raises(TierStalled, match="may hang"):
        hanging.tier.read_into(DIGEST, 0, buffer, SHORT_S)
    assert time.monotonic() - begin_s < 10
    assert hanging.busy == 1
    buffer[:] = bytes(len(DATA))  # the caller's again, for something else
    hanging.go_on()
    wait_until(lambda: hanging.busy == 0)
    assert buffer == bytes(len(DATA))
    assert hanging.tier.read_into(DIGEST, 0, buffer) and buffer == DATA
    assert (hanging.tier.counters.stalls, hanging.tier.counters.in_flight) == (1, 0)


def test_nothing_that_is_asked_of_a_hanging_tier_waits_longer(hanging: Hanging) -> None:
    other = os.urandom(5000)
    hanging.stop()
    calls = (
        lambda: hanging.tier.has([DIGEST], SHORT_S),
        lambda: hanging.tier.capacity(SHORT_S),
        lambda: list(hanging.tier.scan(SHORT_S)),
        lambda: hanging.tier.put(digest_of(other), memoryview(other), 5000, SHORT_S),
        lambda: hanging.tier.remove(DIGEST, SHORT_S),
        lambda: hanging.tier.recheck(DIGEST, SHORT_S),
        lambda: hanging.tier.purge(SHORT_S),
    )
    for call in calls:
        with pytest.raises(TierStalled):
            call()
    hanging.go_on()
    wait_until(lambda: hanging.busy == 0)


def test_the_threads_that_hang_are_few(hanging: Hanging) -> None:
    hanging.stop()
    buffers = [memoryview(bytearray(100)) for _ in range(100)]
    said: list[str] = []
    for buffer in buffers:
        with pytest.raises(TierTrouble) as caught:
            hanging.tier.read_into(DIGEST, 0, buffer, 0.01)
        said.append(str(caught.value))
    most = FEW.reads_max + FEW.writes_max + 4 + TIER_STUCK_MAX
    assert hanging.busy == most
    assert ["hangs" in text for text in said] == [False] * most + [True] * (100 - most)
    hanging.go_on()
    wait_until(lambda: hanging.busy == 0)
    assert hanging.tier.read_into(DIGEST, 0, buffers[0]) and buffers[0] == DATA[:100]


def test_a_silent_tier_is_down_and_comes_back_by_itself(hanging: Hanging) -> None:
    hanging.stop()
    with pytest.raises(TierStalled):
        hanging.tier.has([DIGEST], 1.1)
    assert hanging.tier.health is HealthState.DOWN
    with pytest.raises(TierTrouble, match="left alone"):
        hanging.tier.has([DIGEST], 10)
    assert hanging.tier.counters.refusals == 1
    hanging.go_on()
    wait_until(lambda: hanging.tier.health is HealthState.ON_TRIAL)
    assert hanging.tier.has([DIGEST]) == [len(DATA)]
    assert hanging.tier.health is HealthState.UP


@pytest.mark.parametrize("is_file", [False, True])
def test_what_was_being_put_is_right_or_not_there(
    hanging: Hanging, is_file: bool, tmp_path: Path
) -> None:
    data = bytearray(os.urandom(20 * MIB))
    digest = digest_of(data)
    source: int | memoryview = memoryview(data)
    if is_file:
        (tmp_path / "source").write_bytes(data)
        source = os.open(tmp_path / "source", os.O_RDONLY)
    stopping = threading.Timer(0.005, hanging.stop)
    stopping.start()
    try:
        hanging.tier.put(digest, source, len(data), SHORT_S)
    except TierStalled:
        pass
    stopping.join()
    if isinstance(source, int):
        os.close(source)
    data[:] = bytes(len(data))  # the caller's again, for something else
    hanging.go_on()
    wait_until(lambda: hanging.busy == 0)
    if path_of(hanging.root, digest).exists():
        assert digest_of(path_of(hanging.root, digest).read_bytes()) == digest
    assert staged(hanging.root) == []


def test_a_put_that_finds_no_thread_leaves_no_file_open(hanging: Hanging, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    fd = os.open(tmp_path / "source", os.O_RDONLY)
    hanging.stop()
    most = FEW.reads_max + FEW.writes_max + 4 + TIER_STUCK_MAX
    for _ in range(most):
        with pytest.raises(TierStalled):
            hanging.tier.read_into(DIGEST, 0, memoryview(bytearray(10)), 0.001)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierTrouble, match="hangs"):
        hanging.tier.put(DIGEST, fd, len(DATA))
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
    hanging.go_on()
    wait_until(lambda: hanging.busy == 0)
