"""A node that gives nothing, as a tier."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvfs.config import TierLimits
from kvfs.errors import TierStalled, TierTrouble
from kvfs.health import HealthState
from kvfs.tiers.peer import PeerTier
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
