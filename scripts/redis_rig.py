"""A real server of Redis's protocol: its own process, in a directory of its own. What tests and the
rig of a cluster share."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
_PING_S = 5.0


def free_port() -> int:
    """A port of the loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


class RedisServer:
    """One process. `start` may be called again after `kill`; what it held is lost then, unless it
    `keeps` it. `prefix`, before a command, runs it where the server is to be."""

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        *,
        keeps: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.url = f"redis://{address}:{self.port}"
        self._directory = directory
        self._address = address
        self._prefix = prefix
        self._keeps = keeps
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("redis-server is missing: run scripts/setup cluster")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [
                *self._prefix, program, "--port", str(self.port), "--bind", self._address,
                "--protected-mode", "no", "--save", "",
                "--appendonly", "yes" if self._keeps else "no", "--dir", os.fspath(self._directory),
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("redis-server does not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        ping = ["redis-cli", "-h", self._address, "-p", str(self.port), "ping"]
        done = subprocess.run(
            [*self._prefix, *ping], check=False, capture_output=True, timeout=_PING_S
        )
        return done.stdout == b"PONG\n"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wipe(self) -> None:
        """Take away what it has kept, while it does not run."""
        assert self._process is None
        shutil.rmtree(self._directory)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """A server for the length of a `with` block."""
    server = RedisServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
