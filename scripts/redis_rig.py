"""A real server of Redis's protocol for tests: its own process, in a directory of its own."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

START_S = 10.0


def free_port() -> int:
    """A port of the loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


class RedisServer:
    """One process; `start` may be called again after `stop` or `kill`, with all it had lost."""

    def __init__(self, directory: Path, port: int | None = None, *options: str) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None, "redis-server is missing: run scripts/setup"
        self._process = subprocess.Popen(
            [
                program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", str(self.directory), *self._options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        client = redis.Redis(port=self.port)
        deadline = time.monotonic() + START_S
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.01)
        client.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """A server for the length of a `with` block."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory, None, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
