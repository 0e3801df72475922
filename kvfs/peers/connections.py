"""The TCP connections below a server's channels: counted, watched, and cut where they ask too much.

zmq has no bound for how many connections it accepts, nor for the parts of one message, which it
gathers before it shows any. So each connection's own counters are asked of the kernel: what it
received since it last showed a message is what zmq keeps of it. One that is cut ends as if its
client had hung up.

The descriptors are zmq's, and may be closed at any moment. So each is duplicated for a look, and is
taken for what it was only if the kernel's cookie of its socket is the same.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvfs.config import PeerLimits

_SO_COOKIE = 57
_COOKIE_BYTES = 8
_INFO_BYTES = 136  # struct tcp_info up to tcpi_bytes_received, which is its last field here
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Connection:
    cookie: bytes
    shown_bytes: int = 0  # received when it last showed a message


class Connections:
    """Those that were accepted on one port and have not ended. For one thread."""

    def __init__(self, limits: PeerLimits, port: int) -> None:
        self._limits = limits
        self._port = port
        self._by_fd: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def note_accepted(self, fd: int) -> None:
        """A connection that is one too many is cut at once."""
        with _borrowed(fd) as found:
            if found is None or found.getsockname()[1] != self._port:
                return  # it has ended already, and the number is another's
            self._by_fd[fd] = _Connection(_cookie(found))
            if len(self._by_fd) > self._limits.connections_max:
                _cut(found)

    def note_closed(self, fd: int) -> None:
        self._by_fd.pop(fd, None)

    def note_message(self, fd: int) -> None:
        """It has shown a message, and with it all that it had received before."""
        connection = self._by_fd.get(fd)
        if connection is None:
            return
        with _borrowed(fd) as found:
            if found is not None and _cookie(found) == connection.cookie:
                connection.shown_bytes = _received_bytes(found)

    def cut_hoarders(self) -> int:
        """Cut those of which zmq keeps more than `unshown_bytes_max`; how many."""
        cut = 0
        for fd, connection in self._by_fd.items():
            with _borrowed(fd) as found:
                if found is None or _cookie(found) != connection.cookie:
                    continue
                kept_bytes = _received_bytes(found) - connection.shown_bytes
                if kept_bytes > self._limits.unshown_bytes_max:
                    _cut(found)
                    cut += 1
        return cut


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A socket for a descriptor of zmq's, for a moment; None when there is none by now. What the
    block does with one that ends meanwhile fails in silence."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # no socket any more
        os.close(copy)
        yield None
        return
    with found:
        try:
            yield found
        except OSError:  # it has ended
            pass


def _cut(connection: socket.socket) -> None:
    """Let zmq see its end, and the client a reset: it would go on sending for a while else."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    connection.shutdown(socket.SHUT_RDWR)


def _cookie(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)


def _received_bytes(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
