"""A server of S3's protocol on loopback (moto's, from `.envs/s3`), and a faulty proxy before it.

The server is a process of its own, gone with `close`. It checks no signatures.
"""

import re
import socket
import struct
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".envs/s3/bin/python"
BUCKET = "kvfs-test"
SECRET = "secret-of-the-rig"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "rig", "AWS_SECRET_ACCESS_KEY": SECRET}
START_DEADLINE_S = 60.0
_RUNNING = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_PIECE_BYTES = 16 * 1024


class S3Server:
    """Started, and with an empty bucket, when it is made. RuntimeError with its log otherwise;
    `PYTHON` is there when it was set up."""

    def __init__(self, log: Path) -> None:
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            self.port = self._wait_running(log)
            self.make_bucket(BUCKET)
        except BaseException:
            self.close()
            raise

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=START_DEADLINE_S):
            pass

    def close(self) -> None:
        self._process.kill()
        self._process.wait(START_DEADLINE_S)

    def _wait_running(self, log: Path) -> int:
        end_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if match := _RUNNING.search(log.read_text(errors="replace")):
                return int(match[1])
            time.sleep(0.05)
        raise RuntimeError(f"no S3 server: {log.read_text(errors='replace')[-2000:]}")


@dataclass(slots=True)
class Faults:
    """What the proxy does with the requests that come from now on."""

    status: int | None = None  # answer so, without asking the server
    refuse: bool = False  # hang up at once
    silent: bool = False  # take the request, and never answer
    bytes_per_s: float | None = None  # of an answer
    reset_after: int | None = None  # bytes of an answer, then end the connection hard
    stall_after: int | None = None  # bytes of an answer, then nothing
    corrupt_at: int | None = None  # flip a byte of an answer, from its end


class FaultyProxy:
    """Between a client and a server on loopback: one request a connection, each on a thread."""

    def __init__(self, server_port: int) -> None:
        self.faults = Faults()
        self.requests = 0
        self.hung_up = 0  # clients that went in the middle of an answer
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="s3-proxy", daemon=True).start()

    def __enter__(self) -> "FaultyProxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has gone
                    pass

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self.requests += 1
            self._open.add(client)
        try:
            with client:
                self._answer(client, self.faults)
        except OSError:
            with self._lock:
                self.hung_up += 1
        finally:
            with self._lock:
                self._open.discard(client)

    def _answer(self, client: socket.socket, faults: Faults) -> None:
        if faults.refuse:
            _end_hard(client)
            return
        request = _read_request(client)
        if request is None:
            return
        if faults.silent:
            self._wait_gone(client)
        elif faults.status is not None:
            body = f"<Error><Code>SlowDown</Code><Message>{SECRET}</Message></Error>".encode()
            head = f"HTTP/1.1 {faults.status} Said\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        else:
            with socket.create_connection(("127.0.0.1", self._server_port), 30) as server:
                server.sendall(request)
                self._relay(server, client, faults)

    def _relay(self, server: socket.socket, client: socket.socket, faults: Faults) -> None:
        answer = b""
        while piece := server.recv(1 << 20):
            answer += piece
        if faults.corrupt_at is not None:
            spoiled = bytearray(answer)
            spoiled[-1 - faults.corrupt_at] ^= 0xFF
            answer = bytes(spoiled)
        sent = 0
        while sent < len(answer):
            if faults.reset_after is not None and sent >= faults.reset_after:
                _end_hard(client)
                return
            if faults.stall_after is not None and sent >= faults.stall_after:
                self._wait_gone(client)
                return
            piece = answer[sent : sent + _PIECE_BYTES]
            client.sendall(piece)
            sent += len(piece)
            if faults.bytes_per_s is not None and self._closed.wait(
                len(piece) / faults.bytes_per_s
            ):
                return

    def _wait_gone(self, client: socket.socket) -> None:
        """Return when the client hangs up."""
        if client.recv(1) == b"":
            with self._lock:
                self.hung_up += 1


def _read_request(client: socket.socket) -> bytes | None:
    """A whole request, made the last of its connection; None when there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(1 << 20)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    match = _LENGTH.search(head)
    missing = (int(match[1]) if match else 0) - len(body)
    pieces = [head, b"\r\nConnection: close\r\n\r\n", body]
    while missing > 0:
        piece = client.recv(min(missing, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _end_hard(client: socket.socket) -> None:
    """Close with a reset, not an end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
