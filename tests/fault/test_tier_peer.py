"""A node that gives nothing, as a tier."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvfs.digest import digest_of
from kvfs.errors import TierStalled, TierTrouble, Unavailable
from kvfs.health import HealthState
from kvfs.peers.address import Address
from kvfs.peers.messages import Range
from kvfs.remote import RemoteReader
from kvfs.settings.words import TierLimits
from kvfs.tiers.peer import PeerTier, ReferredPeer
from scripts.peer_rig import DirectorySource
from tests.peers import QUICK, SlowSource, asking, serving
from tests.processes import wait_until

LIMITS = TierLimits(reads_max=4, writes_max=1, read_deadline_s=20.0, write_deadline_s=20.0)


def test_a_node_that_went_is_trouble_until_it_is_back(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    data = os.urandom(10_000)
    digest = source.add(data)
    buffer = memoryview(bytearray(10_000))
    with ExitStack() as stack:
        with serving(source, limits=QUICK) as server:
            client = stack.enter_context(asking(server.port, limits=QUICK))
            tier = PeerTier("a-peer", LIMITS, client)
            assert tier.read_into(digest, 0, buffer)
        for _ in range(3):
            with pytest.raises(TierTrouble, match=r"tier a-peer: 127\.0\.0\.1"):
                tier.read_into(digest, 0, buffer)
        assert (tier.health, tier.counters.failures) == (HealthState.DOWN, 3)
        with serving(source, limits=QUICK, port=server.port):
            wait_until(lambda: _reads(tier, digest, buffer) and tier.health is HealthState.UP)
            assert buffer == data


def _reads(tier: PeerTier, digest: bytes, buffer: memoryview) -> bool:
    try:
        return tier.read_into(digest, 0, buffer)
    except TierTrouble:
        return False


def test_a_silent_node_costs_the_deadline(tmp_path: Path) -> None:
    source = SlowSource(tmp_path)
    digest = source.add(b"abc")
    with serving(source) as server, asking(server.port) as client:
        tier = PeerTier("a-peer", LIMITS, client)
        try:
            with pytest.raises(TierStalled):
                tier.has([digest], 0.3)
        finally:
            source.gate.set()
        assert tier.counters.stalls == 1


def test_a_node_that_stops_in_the_middle_is_trouble_for_who_has_its_tickets(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(os.urandom(10_000))
    buffer = memoryview(bytearray(10_000))
    with ExitStack() as stack:
        reader = stack.enter_context(closing(RemoteReader()))
        with serving(source, limits=QUICK) as server:
            client = stack.enter_context(asking(server.port, limits=QUICK))
            tickets = client.tickets([Range(digest, 0, 10_000)] * 2, 10.0)
            tier = PeerTier("a-peer", LIMITS, ReferredPeer(Holding(tickets), reader))
            assert tier.read_into(digest, 0, buffer)
            assert digest_of(buffer) == digest
        with pytest.raises(TierTrouble):
            tier.read_into(digest, 0, buffer)
        assert tier.counters.failures == 1


class Holding:
    """Gives tickets that were fetched before, one after the other."""

    def __init__(self, tickets: tuple[Address, list[bytes | None]]) -> None:
        self._address, self._tickets = tickets

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]:
        return [None] * len(digests)

    def tickets(
        self, ranges: Sequence[Range], deadline_s: float
    ) -> tuple[Address, list[bytes | None]]:
        return self._address, [self._tickets.pop()]


def test_ones_own_node_that_gives_no_tickets_is_trouble_of_the_tier() -> None:
    class NoReferrer:
        def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]:
            raise Unavailable("the node is in no cluster")

        def tickets(
            self, ranges: Sequence[Range], deadline_s: float
        ) -> tuple[Address, list[bytes | None]]:
            raise Unavailable("the node is in no cluster")

    with closing(RemoteReader()) as reader:
        tier = PeerTier("a-peer", LIMITS, ReferredPeer(NoReferrer(), reader))
        for ask in (
            lambda: tier.read_into(digest_of(b""), 0, memoryview(bytearray(1))),
            lambda: tier.has([digest_of(b"")]),
        ):
            with pytest.raises(TierTrouble, match="tier a-peer: the node is in no cluster"):
                ask()
        assert tier.counters.failures == 2
