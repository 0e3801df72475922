"""A blob on its way here, from peers that give it, refuse, die or lie."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.cluster import arrival
from kvfs.cluster.arrival import Arrival, Ways
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient

SIZE_BYTES = 12 * MIB + 77
CONTENT = os.urandom(SIZE_BYTES)
DIGEST = digest_of(CONTENT)
DEADLINE_S = 30.0


class Peer:
    """Stands in for a client of a node that has `content`. `gives` says of each read whether it
    does; `gate`: reads wait for it."""

    def __init__(
        self,
        address: str,
        content: bytes = CONTENT,
        gives: Callable[[int], bool] = lambda offset: True,
    ) -> None:
        self.address = address
        self.content = content
        self.gives = gives
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[tuple[int, int]] = []
        self.silences: list[float | None] = []

    def read_into(
        self,
        digest: bytes,
        offset: int,
        buffer: memoryview,
        deadline_s: float,
        silence_s: float | None,
    ) -> bool:
        assert self.gate.wait(DEADLINE_S)
        self.silences.append(silence_s)
        if not self.gives(offset):
            raise Unavailable("gone")
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.content[offset : offset + len(buffer)]
        return True


class Ground:
    """Peers, and a file that a fetch fills."""

    def __init__(self, path: Path) -> None:
        self.peers: list[Peer] = []
        self.asked_again = 0
        self.on_ask: Callable[[], None] = lambda: None
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)

    def start(
        self, *peers: Peer, doubted: set[PeerClient] | None = None, size_bytes: int = SIZE_BYTES
    ) -> Arrival:
        self.peers = list(peers)
        ways = Ways(
            self._whom_to_ask, self._ask_again, trio.CapacityLimiter(8), trio.CapacityLimiter(2)
        )
        return Arrival(DIGEST, size_bytes, ways, doubted)

    def _whom_to_ask(self, digest: bytes) -> Sequence[PeerClient]:
        return self.peers  # type: ignore[return-value]  # only what an arrival uses

    async def _ask_again(self) -> None:
        self.asked_again += 1
        self.on_ask()

    async def fill(self, fetch: Arrival) -> bool:
        with trio.fail_after(DEADLINE_S):
            is_right = await fetch.fill(self.fd)
        if is_right:
            assert os.pread(self.fd, SIZE_BYTES + 1, 0) == CONTENT
        fetch.end()
        return is_right


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = Ground(tmp_path / "stage")
    yield made
    os.close(made.fd)


def spoilt() -> bytes:
    wrong = bytearray(CONTENT)
    wrong[7 * MIB] ^= 1
    return bytes(wrong)


def all_of(*peers: Peer) -> list[tuple[int, int]]:
    return sorted(read for peer in peers for read in peer.reads)


async def test_every_byte_is_fetched_once_from_all_who_have_it(ground: Ground) -> None:
    peers = Peer("a"), Peer("b")
    assert await ground.fill(ground.start(*peers))
    at = 0
    for offset, length in all_of(*peers):
        assert offset == at
        at += length
    assert at == SIZE_BYTES
    assert all(peer.reads for peer in peers)


async def test_who_fails_is_replaced_and_asked_for_nothing_more(ground: Ground) -> None:
    a, b = Peer("a", gives=lambda offset: offset < 5 * MIB), Peer("b")
    assert await ground.fill(ground.start(a, b))
    assert sum(length for _, length in all_of(a, b)) == SIZE_BYTES
    assert None not in a.silences  # it would have been left for the other one


async def test_the_only_one_is_waited_for_longer_and_tried_again(ground: Ground) -> None:
    failures = iter([True] * 3)
    a = Peer("a", gives=lambda offset: not next(failures, False))
    assert await ground.fill(ground.start(a))
    assert set(a.silences) == {None}
    assert ground.asked_again > 0


async def test_who_has_it_by_now_is_found(ground: Ground) -> None:
    a, b = Peer("a", gives=lambda offset: False), Peer("b")
    ground.on_ask = lambda: ground.peers.append(b)
    assert await ground.fill(ground.start(a))
    assert sum(length for _, length in b.reads) == SIZE_BYTES


async def test_nobody_left_is_the_end_for_all_who_wait(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "CLUSTER_HOLDER_WAIT_S", 0.1)
    a = Peer("a", gives=lambda offset: offset < 2 * MIB)
    fetch = ground.start(a)
    told = []

    async def read(begin: int) -> None:
        try:
            await fetch.wait(begin, begin + 100)
        except Unavailable:
            told.append(begin)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, 8 * MIB)
        nursery.start_soon(read, SIZE_BYTES - 10)
        await trio.testing.wait_all_tasks_blocked()
        assert not await ground.fill(fetch)
    assert sorted(told) == [8 * MIB, SIZE_BYTES - 10]
    assert fetch.has_failed and fetch.has_ended and not fetch.is_whole
    with pytest.raises(Unavailable):
        await fetch.wait(0, 100)  # also what had come
    with pytest.raises(Unavailable):
        fetch.open()


async def test_a_reader_waits_for_its_range_only_and_has_its_own_descriptor(
    ground: Ground,
) -> None:
    a = Peer("a")
    fetch = ground.start(a)
    async with trio.open_nursery() as nursery:
        a.gate.clear()
        nursery.start_soon(ground.fill, fetch)
        await trio.testing.wait_all_tasks_blocked()
        a.gate.set()
        with trio.fail_after(DEADLINE_S):
            await fetch.wait_begun()
            fd = fetch.open()
            await fetch.wait(3 * MIB, 3 * MIB + 100)
        assert os.pread(fd, 100, 3 * MIB) == CONTENT[3 * MIB : 3 * MIB + 100]
    assert fetch.is_whole
    assert os.pread(fd, SIZE_BYTES, 0) == CONTENT
    os.close(fd)


async def test_wrong_bytes_that_nobody_read_are_fetched_from_others(
    ground: Ground, allow_warnings: list[str]
) -> None:
    allow_warnings.append("wrong bytes from")
    bad, good = Peer("bad", spoilt()), Peer("good")
    fetch = ground.start(bad, good)
    assert await ground.fill(fetch)
    assert not fetch.was_wrong
    assert fetch.doubted <= {bad}  # type: ignore[comparison-overlap]  # it stands in for a client


async def test_who_gave_wrong_bytes_is_not_asked_again(ground: Ground) -> None:
    bad, good = Peer("bad", spoilt()), Peer("good")
    doubted: set[PeerClient] = {bad}  # type: ignore[arg-type]  # it stands in for a client
    assert await ground.fill(ground.start(bad, good, doubted=doubted))
    assert not bad.reads


async def test_wrong_bytes_that_a_reader_has_seen_are_the_end(
    ground: Ground, allow_warnings: list[str]
) -> None:
    allow_warnings.append("wrong bytes from")
    bad = Peer("bad", spoilt())
    fetch = ground.start(bad)
    seen = 0

    async def read_all() -> None:
        nonlocal seen
        with pytest.raises(Unavailable):
            for begin in range(0, SIZE_BYTES, MIB):
                await fetch.wait(begin, begin + MIB)
                seen += min(MIB, SIZE_BYTES - begin)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_all)
        await trio.testing.wait_all_tasks_blocked()
        assert not await ground.fill(fetch)
    assert seen < SIZE_BYTES
    assert fetch.was_wrong and fetch.has_failed
    assert fetch.doubted == {bad}


async def test_a_reader_does_not_wait_for_ever(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "CLUSTER_READ_S", 0.05)
    fetch = ground.start(Peer("a"))
    with pytest.raises(Unavailable):
        await fetch.wait(0, 10)  # nobody fetches
    assert await ground.fill(fetch)


async def test_nothing_at_all_is_fetched_from_nobody(ground: Ground) -> None:
    ways = ground.start()._ways
    fetch = Arrival(digest_of(b""), 0, ways, None)
    with trio.fail_after(DEADLINE_S):
        assert await fetch.fill(ground.fd)
    fetch.end()
    assert fetch.is_whole


async def test_who_is_waited_for_after_another_has_failed_gives_the_rest(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pull finds nobody while the other is still fetching from the only one who gives."""
    monkeypatch.setattr(arrival, "CLUSTER_HOLDER_WAIT_S", 0.0)
    monkeypatch.setattr(arrival, "CLUSTER_RENEW_S", 0.02)
    refuses = iter([False, True])
    a = Peer("a", gives=lambda offset: not next(refuses, False))
    ground.on_ask = lambda: a.gate.set() if ground.asked_again > 3 else None
    fetch = ground.start(a)
    a.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ground.fill, fetch)
        await trio.testing.wait_all_tasks_blocked()
        a.gate.set()
    assert fetch.is_whole
