"""A cluster for the length of a `with` block: a Redis server and kvfs mounts, each in a network
namespace of its own, their files in one directory. What exercises and benchmarks share.

The mounts are seen from everywhere on the machine; only their sockets live in the namespaces.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.net_rig import Host, network
from scripts.redis_rig import RedisServer

ROOT = Path(__file__).parent.parent
_SHIFTED = ROOT / "scripts/shifted_clock.py"
REDIS_PORT = 6379
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0


def command_in(host: Host) -> tuple[str, ...]:
    """What runs a command in a host's network, and leaves it the machine's mounts."""
    return ("nsenter", f"--net=/run/netns/{host.namespace}")


@dataclass(slots=True)
class Node:
    """One kvfs mount."""

    host: Host
    directory: Path
    url: str
    options: Sequence[str] = ()
    ahead_s: int = 0  # of the right time, from the next start on
    process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def start(self) -> None:
        """Mount, and wait until it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.mountpoint)
        program = [os.fspath(_SHIFTED), str(self.ahead_s)] if self.ahead_s else ["-m", "kvfs"]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *command_in(self.host), sys.executable, *program, "mount",
                    os.fspath(self.mountpoint), "--store", os.fspath(self.store), "--join",
                    self.url, "--foreground", *self.options,
                ],
                cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip
        end_s = time.monotonic() + START_DEADLINE_S
        while not os.path.ismount(self.mountpoint):
            if self.process.poll() is not None or time.monotonic() > end_s:
                said = (self.directory / "log").read_text(errors="replace")
                raise RuntimeError(f"{self.directory.name} does not mount:\n{said[-3000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it as an operator does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)  # a stopped one does not end
            self.process.terminate()
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_DEADLINE_S)
            self.process = None
        self.clear()

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_DEADLINE_S)
            self.process = None

    def clear(self) -> None:
        """Take away what a killed mount left."""
        subprocess.run(
            ["umount", "--lazy", os.fspath(self.mountpoint)], check=False, capture_output=True
        )


@dataclass(frozen=True, slots=True)
class Rig:
    """A running cluster."""

    server: RedisServer
    nodes: tuple[Node, ...]


@contextmanager
def cluster(count: int, base: Path, *options: str, keeps: bool = False) -> Iterator[Rig]:
    """So many nodes on one server, in `base`, which `keeps` its names when it is killed. Needs
    root."""
    with network(count + 1) as net:
        host = net.hosts[0]
        prefix = command_in(host)
        server = RedisServer(base / "redis", REDIS_PORT, host.address, prefix, keeps=keeps)
        nodes = tuple(
            Node(host, base / f"node{index}", server.url, options)
            for index, host in enumerate(net.hosts[1:])
        )
        try:
            server.start()
            for node in nodes:
                node.start()
            yield Rig(server, nodes)
        finally:
            for node in nodes:
                node.stop()
            server.kill()
