"""The sockets of a peer server: who may connect, messages in, messages out.

One thread at a time uses a `Front`; only `wake` may be called from others. zmq ends a channel whose
message is larger than `PEER_FRAME_BYTES_MAX`, that does not finish its handshake, or stops in the
middle of a message; `Connections` ends those that zmq would let have too much.
"""

import logging
import os
import threading
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvfs.config import PeerLimits
from kvfs.errors import InvalidInput
from kvfs.peers.address import Address
from kvfs.peers.bounds import set_bounds
from kvfs.peers.connections import Connections
from kvfs.peers.keys import Keys
from kvfs.peers.zap import DOMAIN, Gatekeeper

log = logging.getLogger(__name__)

_QUEUED_MESSAGES_MAX = 16  # of one channel, each way: what one session may have unanswered
_EVENTS_MAX = 256  # of the monitor, in one go


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message and the channel that it came on. `key` is the sender's, "" without keys; `body` is
    None for a message of more than one part."""

    route: bytes
    key: str
    body: bytes | None


class Front:
    """Listens from the beginning. Raises `InvalidInput` where that is impossible."""

    def __init__(self, address: Address, keys: Keys | None, limits: PeerLimits) -> None:
        self._has_keys = keys is not None
        self._limits = limits
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context, keys.known if keys is not None else None)
        self._router = self._context.socket(zmq.ROUTER)
        self._set_up_router(keys)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for socket in (self._wake_fd, self._router, self._gate.socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise InvalidInput(str(address), f"cannot be listened on: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._connections = Connections(limits, self.port)

    def _set_up_router(self, keys: Keys | None) -> None:
        router = self._router
        set_bounds(router, self._limits, queued_messages_max=_QUEUED_MESSAGES_MAX)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or it would drop in silence what nobody takes
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public.encode())
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())

    def wake(self) -> None:
        """End a `wait`; safe in any thread, and after `close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Return when there may be messages, after `wake`, or at the timeout; who wants in is
        judged here."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._monitor in ready:
            self._count_connections()
        if self._gate.socket in ready:
            self._gate.answer()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def cut_hoarders(self) -> None:
        """End the connections that send what never becomes a message."""
        if cut := self._connections.cut_hoarders():
            log.warning("cut %s peers that sent messages without an end", cut)

    def receive(self) -> Arrival | None:
        """The next message; None when there is none."""
        try:
            route = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frame = self._router.recv(zmq.NOBLOCK, copy=False)
        is_single = not frame.more
        while self._router.getsockopt(zmq.RCVMORE):
            self._router.recv(zmq.NOBLOCK)
        self._connections.note_message(int(frame.get(zmq.SRCFD)))
        key = str(frame.get("User-Id")) if self._has_keys else ""
        return Arrival(route, key, frame.bytes if is_single else None)

    def send(self, route: bytes, frame: bytes, payload: bytes | None = None) -> bool:
        """Send a message of one or two parts; False when the channel is gone, or takes no more."""
        parts = [route, frame] if payload is None else [route, frame, payload]
        try:
            self._router.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Close every channel; what was not sent is dropped."""
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(0)
        self._gate.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1  # the number may be another's soon

    def _count_connections(self) -> None:
        for _ in range(_EVENTS_MAX):
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections.note_accepted(event["value"])
            else:
                self._connections.note_closed(event["value"])
