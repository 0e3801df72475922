"""An object store that fails, is slow, hangs, or breaks off: a proxy between obstore and a real
server of its protocol."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from kvfs.config import MIB, TIER_TROUBLE_ROW
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, TierStalled, TierTrouble
from kvfs.health import HealthState
from kvfs.home import TIER_MARK
from kvfs.settings.words import TierConfig, TierKind, TierLimits
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.object import ObjectTier
from scripts.s3_rig import BUCKET, CREDENTIALS, SECRET, Faults, FaultyProxy, S3Server
from tests.processes import wait_until
from tests.tiers import LIMITS, open_s3

DATA = os.urandom(3 * MIB + 17)
DIGEST = digest_of(DATA)
SHORT_S = 0.5


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def tier(proxy: FaultyProxy, tmp_path: Path) -> Iterator[WritableTier]:
    tier = open_s3(proxy.port, tmp_path.name)
    tier.put(DIGEST, memoryview(DATA), len(DATA))
    yield tier
    tier.close()


def fresh() -> memoryview:
    return memoryview(bytearray(len(DATA)))


def read(tier: WritableTier) -> bytes | None:
    buffer = fresh()
    return bytes(buffer) if tier.read_into(DIGEST, 0, buffer) else None


@pytest.mark.parametrize("status", [400, 403, 429, 500, 503])
def test_a_refusal_is_trouble_once_and_tells_no_secret(
    tier: WritableTier, proxy: FaultyProxy, status: int
) -> None:
    proxy.faults = Faults(status=status)
    asked = proxy.requests
    other = os.urandom(1000)
    for call in (
        lambda: read(tier),
        lambda: tier.put(digest_of(other), memoryview(other), 1000),
    ):
        with pytest.raises(TierTrouble) as caught:
            call()
        assert not isinstance(caught.value, TierStalled)
        said = str(caught.value)
        assert said.startswith("tier a-bucket: ") and SECRET not in said and len(said) < 400
    assert proxy.requests == asked + 2  # nothing is tried again here
    proxy.faults = Faults()
    assert read(tier) == DATA
    assert tier.has([digest_of(other)]) == [None]


def test_a_store_that_fails_is_down_and_comes_back_by_itself(
    tier: WritableTier, proxy: FaultyProxy
) -> None:
    proxy.faults = Faults(status=500)
    for _ in range(3):
        with pytest.raises(TierTrouble, match="500"):
            tier.has([DIGEST] * 5)
    assert tier.health is HealthState.DOWN
    asked = proxy.requests
    with pytest.raises(TierTrouble, match="left alone"):
        tier.has([DIGEST])
    assert proxy.requests == asked
    proxy.faults = Faults()
    wait_until(lambda: tier.health is HealthState.ON_TRIAL)
    assert tier.has([DIGEST]) == [len(DATA)]
    assert tier.health is HealthState.UP


@pytest.mark.parametrize(
    "faults",
    [Faults(silent=True), Faults(stall_after=2 * MIB), Faults(bytes_per_s=200_000)],
    ids=["silent", "stalled", "slow"],
)
def test_who_waits_leaves_at_its_deadline_and_so_does_the_connection(
    tier: WritableTier, proxy: FaultyProxy, faults: Faults
) -> None:
    proxy.faults = faults
    buffer = fresh()
    threads, hung_up = threading.active_count(), proxy.hung_up
    begin_s = time.monotonic()
    with pytest.raises(TierStalled):
        tier.read_into(DIGEST, 0, buffer, SHORT_S)
    assert time.monotonic() - begin_s < 10
    buffer[:] = bytes(len(DATA))  # the caller's again, for something else
    wait_until(lambda: proxy.hung_up == hung_up + 1)
    assert buffer == bytes(len(DATA))
    proxy.faults = Faults()
    assert read(tier) == DATA
    wait_until(lambda: threading.active_count() <= threads)
    assert (tier.counters.stalls, tier.counters.in_flight) == (1, 0)


@pytest.mark.parametrize(
    "faults",
    [Faults(refuse=True), Faults(reset_after=0), Faults(reset_after=MIB)],
    ids=["at once", "before the answer", "in the middle"],
)
def test_a_connection_that_breaks_is_trouble(
    tier: WritableTier, proxy: FaultyProxy, faults: Faults
) -> None:
    proxy.faults = faults
    begin_s = time.monotonic()
    with pytest.raises(TierTrouble) as caught:
        read(tier)
    assert not isinstance(caught.value, TierStalled)
    assert time.monotonic() - begin_s < 10
    proxy.faults = Faults()
    assert read(tier) == DATA


def test_wrong_bytes_on_the_way_cost_no_blob(tier: WritableTier, proxy: FaultyProxy) -> None:
    proxy.faults = Faults(corrupt_at=1000)
    found = read(tier)
    assert found is not None and digest_of(found) != DIGEST
    proxy.faults = Faults()
    assert tier.recheck(DIGEST)
    assert read(tier) == DATA


@pytest.mark.parametrize("faults", [Faults(silent=True), Faults(refuse=True)])
def test_a_put_that_fails_leaves_nothing_and_no_wait(
    tier: WritableTier, proxy: FaultyProxy, faults: Faults
) -> None:
    data = os.urandom(MIB)
    proxy.faults = faults
    with pytest.raises(TierTrouble):
        tier.put(digest_of(data), memoryview(data), len(data), SHORT_S)
    with pytest.raises(TierTrouble):
        tier.remove(DIGEST, SHORT_S)
    with pytest.raises(TierTrouble):
        list(tier.scan(SHORT_S))
    proxy.faults = Faults()
    wait_until(lambda: tier.health is not HealthState.DOWN)
    assert tier.has([digest_of(data), DIGEST]) == [None, len(DATA)]


def test_a_server_that_is_not_there_is_trouble(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tier = open_s3(port, "x")
    for call in (lambda: read(tier), lambda: tier.has([DIGEST]), lambda: list(tier.scan())):
        with pytest.raises(TierTrouble):
            call()
    tier.close()


def test_closing_ends_what_waits_and_what_comes_later(
    tier: WritableTier, proxy: FaultyProxy
) -> None:
    proxy.faults = Faults(silent=True)
    asked = proxy.requests
    said: list[str] = []

    def work() -> None:
        try:
            read(tier)
        except TierTrouble as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: proxy.requests == asked + 1)
    tier.close()
    thread.join(20)
    assert said == ["tier a-bucket: is closed"]
    with pytest.raises(TierTrouble, match="is closed"):
        read(tier)
    with pytest.raises(TierTrouble, match="is closed"):
        tier.has([DIGEST])


def test_objects_of_others_are_passed_over(s3_server: S3Server, tmp_path: Path) -> None:
    tier = open_s3(s3_server.port, tmp_path.name)
    store = plain_store(s3_server, tmp_path.name)
    for name in ("blobs/readme", "blobs/aa/bb/aabb", f"other/{DIGEST.hex()}"):
        obstore.put(store, name, b"x")
    digests = {digest_of(bytes([number])) for number in range(20)}
    for number in range(20):
        tier.put(digest_of(bytes([number])), memoryview(bytes([number])), 1)
    assert {digest for batch in tier.scan() for digest, _ in batch} == digests
    tier.close()


def plain_store(s3_server: S3Server, prefix: str) -> S3Store:
    return S3Store.from_url(
        f"s3://{BUCKET}/{prefix}",
        endpoint=f"http://127.0.0.1:{s3_server.port}",
        client_options={"allow_http": True},
    )


def test_another_bucket_or_server_misses_nothing_and_takes_nothing(
    s3_server: S3Server, tier: WritableTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.tiers.object_mark.OBJECT_MARK_S", 0.0)
    store = plain_store(s3_server, tmp_path.name)
    mark = bytes(obstore.get(store, TIER_MARK).bytes())
    assert mark == b'{"version": 1}\n'
    name = f"blobs/{DIGEST.hex()[:2]}/{DIGEST.hex()[2:4]}/{DIGEST.hex()}"
    obstore.delete(store, [name, TIER_MARK])
    for call in (
        lambda: read(tier),
        lambda: tier.has([DIGEST]),
        lambda: list(tier.scan()),
        lambda: tier.put(DIGEST, memoryview(DATA), len(DATA)),
    ):
        wait_until(lambda: tier.health is not HealthState.DOWN)
        with pytest.raises(TierTrouble, match=r"tier\.json is gone"):
            call()
    obstore.put(store, TIER_MARK, mark)  # the right one is back, without the blob
    wait_until(lambda: tier.health is not HealthState.DOWN)
    assert tier.has([DIGEST]) == [None]
    assert read(tier) is None
    tier.put(DIGEST, memoryview(DATA), len(DATA))
    assert read(tier) == DATA


def test_a_bucket_without_a_mark_gets_one_when_it_is_first_used(
    s3_server: S3Server, tier: WritableTier, proxy: FaultyProxy, tmp_path: Path
) -> None:
    store = plain_store(s3_server, tmp_path.name)
    obstore.delete(store, TIER_MARK)
    again = open_s3(proxy.port, tmp_path.name)
    assert read(again) == DATA
    assert again.has([bytes(16), DIGEST]) == [None, len(DATA)]
    assert obstore.head(store, TIER_MARK)["size"] > 0
    again.close()


def test_a_mark_is_made_anew_before_rules_of_its_bucket_remove_it(
    s3_server: S3Server, tier: WritableTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plain_store(s3_server, tmp_path.name)
    obstore.put(store, TIER_MARK, b"old")
    monkeypatch.setattr("kvfs.tiers.object_mark.OBJECT_MARK_S", 0.0)
    tier.put(DIGEST, memoryview(DATA), len(DATA))
    assert bytes(obstore.get(store, TIER_MARK).bytes()) == b"old"
    monkeypatch.setattr("kvfs.tiers.object_mark.OBJECT_MARK_OLD_S", -60.0)
    tier.put(DIGEST, memoryview(DATA), len(DATA))
    assert bytes(obstore.get(store, TIER_MARK).bytes()) == b'{"version": 1}\n'


def test_who_only_reads_makes_no_mark(s3_server: S3Server, tmp_path: Path) -> None:
    limits = TierLimits(1, 1, 10.0, 10.0)
    config = TierConfig(
        "x", TierKind.OBJECT, limits, url=f"s3://{BUCKET}/{tmp_path.name}",
        endpoint=f"http://127.0.0.1:{s3_server.port}",
    )  # fmt: skip
    tier = ObjectTier(config, must_exist=True)
    assert tier.has([DIGEST]) == [None]
    with pytest.raises(FileNotFoundError):
        obstore.head(plain_store(s3_server, tmp_path.name), TIER_MARK)
    tier.close()


def test_a_place_that_obstore_does_not_know_is_refused() -> None:
    config = TierConfig("odd", TierKind.OBJECT, LIMITS, url="nonsense://place")
    with pytest.raises(InvalidInput, match="tier odd: cannot be opened"):
        ObjectTier(config)


def test_the_stores_of_other_providers_open_without_asking_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    limits = TierLimits(1, 1, 1.0, 1.0)
    for url, endpoint in (
        ("gs://bucket/prefix", ""),
        ("az://account/container/prefix", "http://127.0.0.1:1/account"),
        ("s3://bucket/prefix", ""),
    ):
        tier = ObjectTier(TierConfig("x", TierKind.OBJECT, limits, url=url, endpoint=endpoint))
        tier.close()
        assert (tier.counters.questions, tier.counters.failures) == (0, 0)


def test_puts_that_only_fail_are_trouble_also_while_questions_are_answered(
    tier: WritableTier, proxy: FaultyProxy
) -> None:
    for _ in range(TIER_TROUBLE_ROW):
        assert tier.trouble == ""
        proxy.faults = Faults(status=403)
        with pytest.raises(TierTrouble):
            tier.put(DIGEST, memoryview(DATA), len(DATA))
        proxy.faults = Faults()
        for _ in range(10):
            assert tier.has([DIGEST]) == [len(DATA)]
    assert tier.health is HealthState.UP and "privileges" in tier.trouble
    tier.put(DIGEST, memoryview(DATA), len(DATA))
    assert tier.trouble == ""
