"""The tier that tests and benchmarks spoil: its bucket lets through what it should, its faults are
those that were asked for."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.config import KIB
from kvfs.digest import digest_of
from kvfs.errors import TierStalled
from kvfs.settings.words import TierKind
from kvfs.tiers.contract import WritableTier
from scripts.tier_rig import RigTier, TokenBucket
from tests.contract.tier_suite import WritableTierSuite
from tests.tiers import open_directory


def test_a_bucket_lets_its_rate_through() -> None:
    bucket = TokenBucket(1000.0, 100.0, 0.0)
    assert bucket.take(100, 0.0) == 0.0
    assert bucket.take(50, 0.0) == pytest.approx(0.05)
    assert bucket.take(50, 0.05) == 0.0
    assert bucket.take(100, 10.0) == 0.0  # a pause saves up one burst, not more
    assert bucket.take(1, 10.0) == pytest.approx(0.001)


def test_over_a_long_time_a_bucket_is_exact() -> None:
    bucket, now_s, passed = TokenBucket(5000.0, 64.0, 0.0), 0.0, 0
    while now_s < 100.0:
        wait_s = bucket.take(64, now_s)
        assert wait_s is not None
        now_s += wait_s
        passed += 64 * (wait_s == 0.0)
    assert passed == pytest.approx(500_000, rel=0.001)


def test_more_than_a_burst_makes_the_next_one_wait() -> None:
    bucket = TokenBucket(1000.0, 100.0, 0.0)
    assert bucket.take(1100, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(1.1)


def test_a_rate_that_changes_counts_from_then_on() -> None:
    bucket = TokenBucket(1000.0, 100.0, 0.0)
    assert bucket.take(100, 0.0) == 0.0
    bucket.set_rate(0.0, 0.05)
    assert bucket.take(50, 1.0) == 0.0
    assert bucket.take(50, 1.0) is None
    bucket.set_rate(100.0, 2.0)
    assert bucket.take(50, 2.0) == pytest.approx(0.5)


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[WritableTier]:
    tier = open_directory(tmp_path / "inner", TierKind.NVME)
    yield tier
    tier.close()


def read(tier: RigTier, digest: bytes, deadline_s: float | None = None) -> bytes:
    buffer = bytearray(10_000)
    assert tier.read_into(digest, 0, memoryview(buffer), deadline_s)
    return bytes(buffer)


def test_a_share_of_reads_is_wrong_in_one_byte_and_the_blob_is_not(inner: WritableTier) -> None:
    data = os.urandom(10_000)
    inner.put(digest_of(data), memoryview(data), len(data))
    tier = RigTier(inner, seed=1)
    tier.troubles.corrupt_share = 0.3
    found = [read(tier, digest_of(data)) for _ in range(200)]
    wrong = [bytes(a ^ b for a, b in zip(item, data, strict=True)) for item in found]
    spoiled = [item for item in wrong if any(item)]
    assert 30 < len(spoiled) < 90
    assert all(sum(byte != 0 for byte in item) == 1 for item in spoiled)
    assert inner.recheck(digest_of(data))


def test_a_frozen_tier_ends_calls_at_their_deadline_and_thaws(inner: WritableTier) -> None:
    data = os.urandom(10_000)
    digest = digest_of(data)
    inner.put(digest, memoryview(data), len(data))
    tier = RigTier(inner)
    tier.set_frozen(True)
    for call in (lambda: read(tier, digest, 0.05), lambda: tier.has([digest], 0.05)):
        with pytest.raises(TierStalled):
            call()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read(tier, digest, 20.0)))
    reader.start()
    tier.set_frozen(False)
    reader.join(20)
    assert found == [data]


def test_a_rate_of_nothing_lets_nothing_through(inner: WritableTier) -> None:
    data = os.urandom(10_000)
    inner.put(digest_of(data), memoryview(data), len(data))
    tier = RigTier(inner, bytes_per_s=1.0, burst_bytes=4 * KIB)
    with pytest.raises(TierStalled):
        read(tier, digest_of(data), 0.05)
    tier.set_rate(None)
    assert read(tier, digest_of(data)) == data


class TestRig(WritableTierSuite):
    """What it wraps stays a tier."""

    kind = TierKind.NVME

    @pytest.fixture
    def tier(self, inner: WritableTier) -> Iterator[WritableTier]:
        yield RigTier(inner, bytes_per_s=2.0**34)

    @pytest.fixture
    def spoil(self, tier: WritableTier, tmp_path: Path) -> Callable[[bytes, bytes], None]:
        def spoil(digest: bytes, data: bytes) -> None:
            name = digest.hex()
            (tmp_path / "inner/blobs" / name[:2] / name[2:4] / name).write_bytes(data)

        return spoil
