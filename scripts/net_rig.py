#!/usr/bin/env python3
"""Hosts on one network, as network namespaces: veth pairs and a bridge, removed at the end.

usage: net_rig.py [--hosts 2] [--mbit N] -- COMMAND...

Runs a command in the first host, as a check that the machine can do it; root only. `{0}`, `{1}`
and so on in it are the hosts' addresses.

    with network(2) as net:
        net.limit(10_000)                       # Mbit/s, on what each host sends
        subprocess.run([*net.hosts[0].prefix, "ping", "-c1", net.hosts[1].address])
        net.hosts[1].set_up(False)              # the cable is out

The bridge lies in a namespace of its own, so nothing of the machine's own network is touched.
Names are the process's own; a script that calls `clean_up_on_sigterm` leaves nothing after SIGTERM
either.
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)

COMMAND_DEADLINE_S = 20.0
_HOSTS_MAX = 100
_networks = itertools.count()  # of this process, which may have several
_LATENCY_MS = 20  # the longest that a packet waits for the rate
_BURST_BYTES_MIN = 256 * 1024


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with an address. `prefix` before a command runs it there."""

    namespace: str
    switch: str  # the namespace of the bridge
    port: str  # the bridge's end of its cable
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def set_up(self, is_up: bool) -> None:
        """Put the cable in, or take it out, at the bridge's end."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if is_up else "down")

    def set_joined(self, is_joined: bool) -> None:
        """Let its packets through to the others, or to nobody: the link stays up."""
        master = ("master", "bridge") if is_joined else ("nomaster",)
        _run("ip", "-n", self.switch, "link", "set", self.port, *master)

    def limit(self, mbit: int | None) -> None:
        """Bound what the host sends, and what it is sent; None for no bound."""
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.port)):
            _run("ip", "netns", "exec", namespace, *_tbf(device, mbit))


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts, in the order of their addresses."""

    hosts: tuple[Host, ...]

    def limit(self, mbit: int | None) -> None:
        for host in self.hosts:
            host.limit(mbit)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many hosts that reach each other, and nobody else. Needs root."""
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    assert 0 < count <= _HOSTS_MAX
    stem = f"kvfs{os.getpid()}n{next(_networks)}"
    switch = f"{stem}s"
    names = [switch, *(f"{stem}h{index}" for index in range(count))]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        yield Network(tuple(_plug_in(switch, name, index) for index, name in enumerate(names[1:])))
    finally:
        for name in reversed(names):
            _remove(name)


def _plug_in(switch: str, namespace: str, index: int) -> Host:
    port, address = f"port{index}", f"10.99.0.{index + 1}"
    _run(
        "ip", "-n", switch, "link", "add", port, "type", "veth",
        "peer", "name", "eth0", "netns", namespace,
    )  # fmt: skip
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    return Host(namespace, switch, port, address)


def _tbf(device: str, mbit: int | None) -> list[str]:
    if mbit is None:
        return ["tc", "qdisc", "replace", "dev", device, "root", "pfifo_fast"]
    # A bucket for 4 ms: timers are not finer than that everywhere.
    burst_bytes = max(_BURST_BYTES_MIN, mbit * 1_000_000 // 8 // 250)
    return [
        "tc", "qdisc", "replace", "dev", device, "root", "tbf",
        "rate", f"{mbit}mbit", "burst", str(burst_bytes), "latency", f"{_LATENCY_MS}ms",
    ]  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove(namespace: str) -> None:
    """A namespace goes with its devices; whoever still runs in it keeps an empty one."""
    subprocess.run(
        ["ip", "netns", "delete", namespace],
        check=False,  # it may not have been made
        capture_output=True,
        timeout=COMMAND_DEADLINE_S,
    )


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=int, help="bound each cable")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with network(options.hosts) as net:
        net.limit(options.mbit)
        command = [_fill(word, net.hosts) for word in options.command]
        return subprocess.run([*net.hosts[0].prefix, *command], check=False).returncode


def _fill(word: str, hosts: Sequence[Host]) -> str:
    for index, host in enumerate(hosts):
        word = word.replace(f"{{{index}}}", host.address)
    return word


if __name__ == "__main__":
    sys.exit(main())
