"""Peers on a network whose cables are pulled; its hosts are namespaces."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.config import MIB
from scripts.net_rig import Network, network
from scripts.peer_rig import AskerProcess, DirectorySource, PeerProcess
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root, ip and tc for network namespaces",
)


@pytest.fixture
def net() -> Iterator[Network]:
    with network(2) as made:
        yield made


def _namespaces(pid: int) -> list[str]:
    """Those that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"kvfs{pid}")]


def test_a_cable_that_is_pulled_costs_one_error_in_time(net: Network, tmp_path: Path) -> None:
    net.limit(1000)
    source = DirectorySource(tmp_path)
    data = os.urandom(100_000)
    small = source.add(data)
    large = source.add(bytes(512 * MIB))  # four seconds of the cable
    server, other = net.hosts
    peer = PeerProcess(
        tmp_path, ["--insecure"], address=f"{server.address}:0", prefix=server.prefix
    )
    try:
        with AskerProcess(f"{server.address}:{peer.port}", prefix=other.prefix) as asker:
            assert asker.read(small, len(data), DEADLINE_S).digest == small.hex()
            asker.begin(large, 512 * MIB, 60)
            wait_until(lambda: _sent_bytes(server.namespace) > 20 * MIB)
            server.set_up(False)
            began_s = time.monotonic()
            broken = asker.finish(60)
            # It counts as stalled when nothing moves for five seconds; twice that at most.
            assert broken.error and time.monotonic() - began_s < 15
            refused = asker.read(small, len(data), DEADLINE_S)
            assert refused.error and refused.spent_s < DEADLINE_S
            server.set_up(True)
            wait_until(lambda: asker.read(small, len(data), DEADLINE_S).digest == small.hex(), 60)
    finally:
        peer.kill()


def _sent_bytes(namespace: str) -> int:
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"],
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if "eth0:" in line]
    return int(line.split(":")[1].split()[8])


def test_a_rate_is_kept(net: Network, tmp_path: Path) -> None:
    net.limit(200)
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(20 * MIB))
    server, other = net.hosts
    peer = PeerProcess(
        tmp_path, ["--insecure"], address=f"{server.address}:0", prefix=server.prefix
    )
    try:
        with AskerProcess(f"{server.address}:{peer.port}", prefix=other.prefix) as asker:
            asked = asker.read(digest, 20 * MIB, DEADLINE_S)
            assert asked.digest == digest.hex()
            assert asked.spent_s > 20 * MIB * 8 / 200e6 * 0.8
    finally:
        peer.kill()


def test_nothing_is_left_of_a_network_whose_script_is_ended() -> None:
    command = [sys.executable, "scripts/net_rig.py", "--", "sleep", "60"]
    with subprocess.Popen(command, cwd=ROOT) as rig:
        try:
            wait_until(lambda: len(_namespaces(rig.pid)) == 3)
        finally:
            rig.send_signal(signal.SIGTERM)
            rig.wait(DEADLINE_S)
    assert rig.returncode == 143
    assert _namespaces(rig.pid) == []
