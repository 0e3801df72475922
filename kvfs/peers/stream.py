"""A client's stream of bytes from one peer: tickets out, ranges in. `kvfs.peers.bulk` says more."""

import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum, unique

from kvfs.errors import Unavailable
from kvfs.peers.address import Address
from kvfs.peers.gone import PeerGone, PeerStalled, TicketRefused

HEADER = struct.Struct("<4sB3xQ")  # magic, status, length of what follows
MAGIC = b"KVB1"
_TIMEOUT = struct.Struct("ll")
_TIMEOUT_S_MIN = 0.001  # zero would mean to wait for ever


@unique
class Status(IntEnum):
    """What became of a ticket."""

    HERE = 0  # the range follows
    GONE = 1  # the blob is not here any more, or not so long
    NO_TICKET = 2  # used, expired or made up; the stream ends
    FAILED = 3  # the node could not read it


_STATUSES = frozenset(Status)


def set_timeout(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Let the kernel end what a blocking call waits for: SO_RCVTIMEO or SO_SNDTIMEO."""
    seconds = max(_TIMEOUT_S_MIN, timeout_s)
    whole = int(seconds)
    value = _TIMEOUT.pack(whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, value)


class BulkStream:
    """A client's stream to one peer. One user at a time; who fails on it must close it."""

    def __init__(self, address: Address, progress_s: float, end_s: float) -> None:
        """Connect. `progress_s`: how long to wait without a byte; each user may set its own. Raises
        `PeerGone` when the peer doesn't answer within the deadlines."""
        self._address = address
        self.progress_s = progress_s
        self._aborted = False
        try:
            timeout_s = max(_TIMEOUT_S_MIN, min(progress_s, end_s - time.monotonic()))
            self._socket = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            raise PeerGone(f"{address}: its bulk stream cannot be reached: {error}") from error
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """Make a call that waits on another thread fail."""
        self._aborted = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            pass

    def is_usable(self) -> bool:
        """Whether an idle stream is still open: nothing is to be read from it."""
        try:
            self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send_tickets(self, tickets: Sequence[bytes], end_s: float) -> None:
        """Ask for ranges, to be received in the same order."""
        timeout_s = min(self.progress_s, end_s - time.monotonic())
        set_timeout(self._socket, socket.SO_SNDTIMEO, timeout_s)
        try:
            self._socket.sendall(b"".join(tickets))
        except BlockingIOError:
            raise PeerStalled(f"{self._address}: takes no tickets") from None
        except OSError as error:
            raise self._gone(f"takes no tickets: {error}") from error

    def receive_into(self, buffer: memoryview, end_s: float) -> bool:
        """Receive the next range; whether the peer had it. `buffer` is written to until this
        returns or raises, not later."""
        header = bytearray(HEADER.size)
        self._receive(memoryview(header), end_s)
        magic, number, length = HEADER.unpack(header)
        if magic != MAGIC or number not in _STATUSES or bool(length) != (number == Status.HERE):
            raise self._gone("answers what is no header of ours")
        if number == Status.NO_TICKET:
            raise TicketRefused(f"{self._address}: does not take the ticket")
        if number != Status.HERE:
            return False
        if length != len(buffer):
            raise self._gone("answers with another length")
        self._receive(buffer, end_s)
        return True

    def _receive(self, buffer: memoryview, end_s: float) -> None:
        done = 0
        while done < len(buffer):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise Unavailable(f"{self._address}: not all bytes arrived before the deadline")
            set_timeout(self._socket, socket.SO_RCVTIMEO, min(self.progress_s, left_s))
            try:
                count = self._socket.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise PeerStalled(f"{self._address}: no bytes before the deadline") from None
            except OSError as error:
                raise self._gone(f"broke off: {error}") from error
            if count == 0:
                raise self._gone("ended the bulk stream")
            done += count

    def _gone(self, reason: str) -> Unavailable:
        if self._aborted:
            return Unavailable(f"{self._address}: the client is closed")
        return PeerGone(f"{self._address}: {reason}")
