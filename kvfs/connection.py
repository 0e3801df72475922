"""A client's connection to its node: one request at a time, and the descriptors with its reply.

Whoever fails in the middle of a request must close it: the reply would be taken for the next one's.
"""

import array
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs.address import node_address
from kvfs.config import DESCRIPTORS_PER_MESSAGE_MAX
from kvfs.errors import Unavailable
from kvfs.wire import PROTOCOL, FrameDecoder, Reply, Request, decode_reply, encode_request

_RECEIVE_BYTES = 256 * 1024
_SEND_BUFFER_BYTES = 1024 * 1024
_TIMEOUT_S_MIN = 0.001  # zero would mean not to wait at all


class Connection:
    """Connects and greets when it is made. Deadlines are times of `time.monotonic`; OSError and
    `Unavailable` say that the node did not answer, or not in time."""

    def __init__(self, store: Path, end_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._decoder = FrameDecoder()
        self._number = 0
        try:
            # Room for a whole batch, so that it is sent in one go.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            self._wait_until(end_s)
            with node_address(store) as address:
                self._socket.connect(address)
            reply, _ = self.exchange(self.encode("hello", [PROTOCOL]), end_s)
            if reply.error is not None:
                raise reply.error
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """Make an exchange that waits on another thread fail."""
        with contextlib.suppress(OSError):  # closed meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def has_ended(self) -> bool:
        """Whether the node has closed it, between two requests."""
        self._socket.settimeout(0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def encode(self, operation: str, arguments: Sequence[Any]) -> bytes:
        """The next request, to be exchanged. Raises `InvalidInput` for one that no node accepts;
        nothing was sent then, and the connection is as it was."""
        frame = encode_request(Request(self._number + 1, operation, list(arguments)))
        self._number += 1
        return frame

    def exchange(self, frame: bytes, end_s: float) -> tuple[Reply, list[int]]:
        """Send what `encode` gave; the reply, and its descriptors, which are the caller's."""
        self._wait_until(end_s)
        self._socket.sendall(frame)
        descriptors: list[int] = []
        try:
            reply = self._receive(end_s, descriptors)
            if reply.number != self._number or reply.descriptors != len(descriptors):
                raise Unavailable("its reply does not fit the request")
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise
        return reply, descriptors

    def _receive(self, end_s: float, descriptors: list[int]) -> Reply:
        room = socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE_MAX * array.array("i").itemsize)
        while True:
            self._wait_until(end_s)
            data, ancillary, _, _ = self._socket.recvmsg(
                _RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
                    descriptors += received
            if not data:
                raise Unavailable("it closed the connection")
            for value in self._decoder.feed(data):
                return decode_reply(value)

    def _wait_until(self, end_s: float) -> None:
        self._socket.settimeout(max(_TIMEOUT_S_MIN, end_s - time.monotonic()))
