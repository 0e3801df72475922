"""The stream of bytes beside the channel: plain TCP, tickets in, ranges of blobs out.

A client sends tickets of 32 bytes, as many as it likes ahead. The server answers each in turn with
a header of 16 bytes and the range, by sendfile; the client receives it into the caller's own
buffer. Nothing is encrypted here, and nobody proves who they are but by the ticket.

Sockets block, with the kernel's own timeouts: a call moves all it can, and wakes up once.
"""

import errno
import logging
import math
import os
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from kvfs.config import MIB, PeerLimits
from kvfs.errors import InvalidInput, KvfsError
from kvfs.peers.address import Address
from kvfs.peers.messages import TICKET_BYTES, Range
from kvfs.peers.source import Source
from kvfs.peers.stream import HEADER, MAGIC, Status, set_timeout
from kvfs.peers.tickets import TicketTable

log = logging.getLogger(__name__)

_TICKETS_AHEAD_MAX = 256  # that a server reads before it serves the first
_SEND_BYTES_MAX = 1024 * MIB  # in one call; the kernel takes 2 GiB
_ACCEPT_PAUSE_S = 0.1
# What accept(2) says when the machine is short of something, or a client has gone again.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED}


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection with the thread that serves it."""

    socket: socket.socket
    thread: threading.Thread = field(init=False)
    is_trusted: bool = False  # it had a good ticket
    is_idle: bool = True  # it waits for tickets
    end_s: float = math.inf  # by when what is being sent must have been taken


class BulkListener:
    """Serves ranges to who has a ticket; one thread for each stream, at most `streams_max`."""

    def __init__(
        self, source: Source, tickets: TicketTable, address: Address, limits: PeerLimits
    ) -> None:
        """Listen. Raises `InvalidInput` where that is impossible."""
        self._source = source
        self._tickets = tickets
        self._limits = limits
        self._lock = threading.Lock()
        self._streams: OrderedDict[_Stream, None] = OrderedDict()  # the longest idle first
        self._closing = False
        try:
            found = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, place = found[0]
            self._listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        except OSError as error:
            raise _unfit(address, error) from error
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(place)
            self._listener.listen(128)
        except OSError as error:
            self._listener.close()
            raise _unfit(address, error) from error
        self._thread = threading.Thread(
            target=self._accept_always, name="kvfs-bulk-accept", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def stream_count(self) -> int:
        with self._lock:
            return len(self._streams)

    def start(self) -> None:
        self._thread.start()

    def end_overdue(self, now_s: float) -> None:
        """End the streams whose clients take their bytes too slowly, a drop at a time."""
        with self._lock:
            for stream in self._streams:
                if stream.end_s < now_s:
                    _shut(stream.socket)

    def close(self, end_s: float) -> None:
        """End every stream, and wait for their threads until `end_s`."""
        with self._lock:
            self._closing = True
            streams = list(self._streams)
            for stream in streams:
                _shut(stream.socket)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
        for thread in [self._thread, *(stream.thread for stream in streams)]:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
        self._listener.close()

    def _accept_always(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                if error.errno not in _PASSING:
                    raise
                log.warning("no bulk stream can be accepted for now: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Serve a new connection on its own thread, if there is a place for it."""
        stream = _Stream(connection)
        stream.thread = threading.Thread(
            target=self._serve, args=(stream,), name="kvfs-bulk", daemon=True
        )
        with self._lock:
            if self._closing or not self._make_place():
                connection.close()
                return
            self._streams[stream] = None
        try:
            stream.thread.start()
        except RuntimeError as error:  # the system has no more threads
            log.warning("no thread for a bulk stream: %s", error)
            self._forget(stream)

    def _make_place(self) -> bool:
        """End a stream if there are too many: one without a good ticket before one that waits."""
        if len(self._streams) < self._limits.streams_max:
            return True
        idle = [stream for stream in self._streams if stream.is_idle]
        if not idle:
            return False
        chosen = min(idle, key=lambda stream: stream.is_trusted)  # the first of these
        del self._streams[chosen]
        _shut(chosen.socket)
        return True

    def _forget(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.pop(stream, None)
            stream.socket.close()  # under the lock: nobody shuts a number that is another's by now

    def _serve(self, stream: _Stream) -> None:
        try:
            stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            set_timeout(stream.socket, socket.SO_SNDTIMEO, self._limits.progress_s)
            while tickets := self._receive_tickets(stream):
                if not all(self._answer(stream, ticket) for ticket in tickets):
                    return
        except (ConnectionError, TimeoutError, BlockingIOError) as error:  # it has gone, or stalled
            log.debug("a bulk stream ended: %s", error)
        except OSError as error:
            log.warning("a bulk stream broke off: %s", error)
        except Exception:  # the thread's outer edge: the source has a bug
            log.exception("a bulk stream met a bug")
        finally:
            self._forget(stream)

    def _receive_tickets(self, stream: _Stream) -> list[Range | None]:
        """The ranges of the tickets that have arrived, used up by that; empty at the end."""
        self._note(stream, is_idle=True)
        limits = self._limits
        wait_s = limits.stream_idle_s if stream.is_trusted else limits.progress_s
        set_timeout(stream.socket, socket.SO_RCVTIMEO, wait_s)
        data = stream.socket.recv(_TICKETS_AHEAD_MAX * TICKET_BYTES)
        if missing := -len(data) % TICKET_BYTES:
            set_timeout(stream.socket, socket.SO_RCVTIMEO, limits.progress_s)
            rest = stream.socket.recv(missing, socket.MSG_WAITALL)
            if len(rest) < missing:
                return []
            data += rest
        self._note(stream, is_idle=False)
        tickets = [data[at : at + TICKET_BYTES] for at in range(0, len(data), TICKET_BYTES)]
        return [self._tickets.take(ticket) for ticket in tickets]

    def _note(self, stream: _Stream, *, is_idle: bool) -> None:
        with self._lock:
            stream.is_idle = is_idle
            if stream in self._streams:
                self._streams.move_to_end(stream)

    def _answer(self, stream: _Stream, wanted: Range | None) -> bool:
        """Send one range, or say why not; whether the stream can go on."""
        if wanted is None:
            stream.socket.sendall(HEADER.pack(MAGIC, Status.NO_TICKET, 0))
            return False
        stream.is_trusted = True
        try:
            fd = self._source.open(wanted.digest)
        except (KvfsError, OSError) as error:
            log.warning("a blob cannot be opened for a peer: %s", error)
            stream.socket.sendall(HEADER.pack(MAGIC, Status.FAILED, 0))
            return True
        if fd is None:
            stream.socket.sendall(HEADER.pack(MAGIC, Status.GONE, 0))
            return True
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes < wanted.offset + wanted.length:
                stream.socket.sendall(HEADER.pack(MAGIC, Status.GONE, 0))
                return True
            if wanted.length < size_bytes and not self._is_right(wanted.digest):
                stream.socket.sendall(HEADER.pack(MAGIC, Status.FAILED, 0))
                return True
            return self._send_range(stream, fd, wanted)
        finally:
            os.close(fd)

    def _is_right(self, digest: bytes) -> bool:
        try:
            self._source.check(digest)
        except KvfsError as error:
            log.warning("a blob is not given to a peer: %s", error)
            return False
        return True

    def _send_range(self, stream: _Stream, fd: int, wanted: Range) -> bool:
        # The disk reads ahead twice as far.
        os.posix_fadvise(fd, wanted.offset, wanted.length, os.POSIX_FADV_SEQUENTIAL)
        header = HEADER.pack(MAGIC, Status.HERE, wanted.length)
        stream.socket.sendall(header, socket.MSG_MORE)
        socket_fd = stream.socket.fileno()
        at, end = wanted.offset, wanted.offset + wanted.length
        allowed_s = self._limits.progress_s + wanted.length / self._limits.stream_bytes_per_s_min
        stream.end_s = time.monotonic() + allowed_s
        while at < end:
            count = os.sendfile(socket_fd, fd, at, min(end - at, _SEND_BYTES_MAX))
            if count == 0:  # the file was cut: what the client still awaits can't be made up
                log.warning("a blob got shorter while it was sent: %s", wanted.digest.hex())
                return False
            at += count
        stream.end_s = math.inf
        return True


def _unfit(address: Address, error: OSError) -> InvalidInput:
    reason = f"cannot be listened on for the bytes of files: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        reason += "; end what listens there, or write another bulk_port below [cluster]"
    return InvalidInput(str(address), reason)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        pass
