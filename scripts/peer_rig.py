#!/usr/bin/env python3
"""A peer server over a directory of blobs, in a process of its own: what tests and benches share.

usage: peer_rig.py --directory DIR [--address 127.0.0.1:0] [--pair FILE --known FILE] [--insecure]

A blob is a file named after its digest in hex. When it serves, it prints its port; SIGTERM ends it.
"""

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.digest import digest_of  # noqa: E402  (path first)
from kvfs.errors import InvalidInput  # noqa: E402
from kvfs.peers.keys import Keys, load_known, load_pair  # noqa: E402
from kvfs.peers.messages import Health  # noqa: E402
from kvfs.peers.server import PeerServer  # noqa: E402

CLUSTER = "rig"
SERVER_ID = b"server of a rig!"
CLIENT_ID = b"client of a rig!"
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0


class DirectorySource:
    """Blobs in a directory, each named after its digest in hex."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hints: list[bytes] = []
        self._start_s = time.monotonic()

    def add(self, data: bytes | bytearray | memoryview) -> bytes:
        """Store a blob; its digest."""
        digest = digest_of(data)
        (self.directory / digest.hex()).write_bytes(data)
        return digest

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        return [self._size(digest) for digest in digests]

    def _size(self, digest: bytes) -> int | None:
        try:
            return os.stat(self.directory / digest.hex()).st_size
        except FileNotFoundError:
            return None

    def open(self, digest: bytes) -> int | None:
        try:
            return os.open(self.directory / digest.hex(), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def hinted(self, digests: Sequence[bytes]) -> None:
        self.hints += digests

    def health(self) -> Health:
        status = os.statvfs(self.directory)
        free_bytes = status.f_bavail * status.f_frsize
        return Health(free_bytes, 0.0, time.monotonic() - self._start_s)


class PeerProcess:
    """`peer_rig.py` as a process; `prefix` is put before its command (`ip netns exec NAME`)."""

    def __init__(
        self,
        directory: Path,
        words: Sequence[str] = (),
        *,
        address: str = "127.0.0.1:0",
        prefix: Sequence[str] = (),
    ) -> None:
        command = [*prefix, sys.executable, __file__, "--directory", str(directory)]
        self._process = subprocess.Popen(
            [*command, "--address", address, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            self.port = self._read_port()
        except BaseException:
            self.kill()
            raise

    def _read_port(self) -> int:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], START_DEADLINE_S)
        line = output.readline() if ready else b""
        if not line.strip().isdigit():
            raise RuntimeError(f"the peer server does not start; it said {line!r}")
        return int(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def freeze(self) -> None:
        """SIGSTOP: connected, and silent."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, frozen or not."""
        self._process.kill()
        self._finish()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        try:
            return self._finish()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _finish(self) -> int:
        code = self._process.wait(STOP_DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


def load_keys(options: argparse.Namespace) -> Keys | None:
    if options.pair is None:
        return None
    known = load_known(options.known) if options.known is not None else {}
    return Keys(load_pair(options.pair), known)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--pair", type=Path, help="the server's key pair, made when missing")
    parser.add_argument("--known", type=Path, help="public keys of those whom it serves")
    parser.add_argument("--insecure", action="store_true", help="serve anyone, without keys")
    options = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    source = DirectorySource(options.directory)
    try:
        server = PeerServer(
            source,
            options.address,
            SERVER_ID,
            CLUSTER,
            load_keys(options),
            insecure=options.insecure,
        )
    except InvalidInput as error:
        raise SystemExit(str(error)) from error
    server.start()
    print(server.port, flush=True)
    ended.wait()
    server.close()


if __name__ == "__main__":
    main()
