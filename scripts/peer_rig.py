#!/usr/bin/env python3
"""A peer server over a directory of blobs, or a client, each in a process of its own.

usage: peer_rig.py --directory DIR [--address 127.0.0.1:0] [--pair FILE --known FILE] [--insecure]
       peer_rig.py --ask ADDRESS

A blob is a file named after its digest in hex. When the server serves, it prints its port; SIGTERM
ends it. The client, without keys, reads lines `digest size deadline_s`, and answers each with a
line of JSON: how long it took, the digest of what came, and the error.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.digest import digest_of  # noqa: E402  (path first)
from kvfs.errors import InvalidInput, Unavailable  # noqa: E402
from kvfs.peers.client import PeerClient  # noqa: E402
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

    def check(self, digest: bytes) -> None:
        """Nothing spoils its blobs."""

    def hinted(self, digests: Sequence[bytes], *, spare_only: bool) -> None:
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What became of a read: `digest` is that of the bytes that came, "" for a miss or an error."""

    spent_s: float
    digest: str = ""
    error: str = ""


class AskerProcess:
    """`peer_rig.py --ask` as a process; `prefix` is put before its command."""

    def __init__(self, address: str, *, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, "--ask", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "AskerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, digest: bytes, size: int, deadline_s: float) -> None:
        """Let it read a blob, and wait for nothing."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{digest.hex()} {size} {deadline_s}\n")
        self._process.stdin.flush()

    def finish(self, deadline_s: float) -> Asked:
        """What became of the read that was begun. RuntimeError when it does not end in time."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("the client does not answer")
        return Asked(**json.loads(line))

    def read(self, digest: bytes, size: int, deadline_s: float) -> Asked:
        self.begin(digest, size, deadline_s)
        return self.finish(deadline_s + START_DEADLINE_S)


def ask_always(address: str) -> None:
    client = PeerClient(address, None, None, CLIENT_ID, CLUSTER)
    for line in sys.stdin:
        digest, size, deadline_s = line.split()
        buffer = memoryview(bytearray(int(size)))
        begin_s = time.monotonic()
        found, error = "", ""
        try:
            if client.read_into(bytes.fromhex(digest), 0, buffer, float(deadline_s)):
                found = digest_of(buffer).hex()
        except Unavailable as unavailable:
            error = str(unavailable)
        asked = Asked(time.monotonic() - begin_s, found, error)
        print(json.dumps(asdict(asked)), flush=True)


def load_keys(options: argparse.Namespace) -> Keys | None:
    if options.pair is None:
        return None
    known = load_known(options.known) if options.known is not None else {}
    return Keys(load_pair(options.pair), known)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, help="serve the blobs in it")
    parser.add_argument("--ask", metavar="ADDRESS", help="be a client of this server")
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--pair", type=Path, help="the server's key pair, made when missing")
    parser.add_argument("--known", type=Path, help="public keys of those whom it serves")
    parser.add_argument("--insecure", action="store_true", help="serve anyone, without keys")
    options = parser.parse_args()
    if options.ask:
        ask_always(options.ask)
        return
    if options.directory is None:
        parser.error("give --directory or --ask")
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
