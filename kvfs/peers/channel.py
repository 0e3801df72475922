"""A client's channel to one peer: messages over zmq, encrypted where there are keys.

A channel has one user at a time, so replies need no sorting out between threads. Whoever fails in
the middle of a request must close it, and makes a new one: a channel that broke is never mended.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvfs.config import PeerLimits
from kvfs.errors import InvalidInput, Unavailable
from kvfs.peers.address import Address
from kvfs.peers.bounds import set_bounds
from kvfs.peers.gone import PeerGone, PeerStalled, SessionEnded
from kvfs.peers.keys import KeyPair
from kvfs.peers.messages import (
    NONCE_BYTES,
    PEER_PROTOCOL,
    Bytes,
    Code,
    Hello,
    Refusal,
    Reply,
    Request,
    Welcome,
    decode_reply,
    encode,
)

_QUEUED_MESSAGES_MAX = 64
_EVENTS_MAX = 16
_WORDS = {
    zmq.EVENT_CLOSED: "cannot be reached",
    zmq.EVENT_DISCONNECTED: "closed the channel",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not know this node's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "and this node do not agree on keys",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broke off the handshake",
}


class SharedContext:
    """zmq's own threads, of which a process needs one set; gone with their last user. A forked
    child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pid = 0
        self._users = 0

    def take(self) -> "zmq.Context[zmq.Socket[bytes]]":
        with self._lock:
            if self._context is None or self._pid != os.getpid():
                self._context, self._pid, self._users = zmq.Context(), os.getpid(), 0
            self._users += 1
            return self._context

    def give_back(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """The user's sockets are closed by now."""
        with self._lock:
            if context is not self._context:
                return  # a parent's
            self._users -= 1
            if self._users == 0:
                self._context = None
                context.term()


SHARED = SharedContext()


class Channel:
    """Connects and says hello when it is made. Deadlines are times of `time.monotonic`.

    Raises `PeerGone` when the peer gives no answer or a wrong one, `SessionEnded` when it has
    forgotten this channel, and `Unavailable` for what else it can't do now.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: Address,
        hello: tuple[str, bytes],
        keys: tuple[KeyPair, str] | None,
        limits: PeerLimits,
        wake_fd: int,
        end_s: float,
    ) -> None:
        """`hello`: cluster and node id. `keys`: the own pair, and the peer's public key. What
        becomes readable on `wake_fd` ends every wait."""
        self._address = address
        self._wake_fd = wake_fd
        self._progress_s = limits.progress_s
        self._number = 0
        self._poller = zmq.Poller()
        self._make_sockets(context)
        try:
            self._set_up(keys, limits)
            for item in (self._socket, self._monitor, wake_fd):
                self._poller.register(item, zmq.POLLIN)
            self._socket.connect(f"tcp://{address}")
            self.welcome = self._greet(*hello, end_s)
        except zmq.ZMQError as error:
            self.close()
            raise PeerGone(f"{address}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _make_sockets(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        try:
            self._socket = context.socket(zmq.DEALER)
            try:
                self._monitor = self._socket.get_monitor_socket(sum(_WORDS))
            except zmq.ZMQError:
                self._socket.close(0)
                raise
        except zmq.ZMQError as error:  # of descriptors there are too few
            raise Unavailable(f"{self._address}: no channel can be made: {error}") from error

    def _set_up(self, keys: tuple[KeyPair, str] | None, limits: PeerLimits) -> None:
        set_bounds(self._socket, limits, queued_messages_max=_QUEUED_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never
        if keys is not None:
            pair, server_key = keys
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())

    def _greet(self, cluster: str, node_id: bytes, end_s: float) -> Welcome:
        nonce = secrets.token_bytes(NONCE_BYTES)
        reply = self.ask(Hello(PEER_PROTOCOL, cluster, node_id, nonce), end_s)
        if not isinstance(reply, Welcome) or reply.nonce != nonce:
            raise PeerGone(f"{self._address}: does not answer to this hello")
        return reply

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def is_usable(self) -> bool:
        """Whether an idle channel is still open, and nothing unasked has come on it."""
        return not self._poller.poll(0)

    def ask(self, request: Request, end_s: float) -> Reply:
        """The reply to a request. A refusal is raised."""
        number = self.send(request)
        got, reply = self.receive(end_s)
        if got != number or isinstance(reply, Bytes):
            raise PeerGone(f"{self._address}: its reply does not fit the request")
        return reply

    def send(self, request: Request) -> int:
        """Send a request, to be received later; its number."""
        frame = encode(self._number + 1, request)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone(f"{self._address}: takes no more messages") from None
        self._number += 1
        return self._number

    def receive(
        self, end_s: float, place: Callable[[int], memoryview] | None = None
    ) -> tuple[int, Reply]:
        """The next reply, and the number of its request; the bytes of a `Bytes` reply go where
        `place` says for that number. A refusal is raised."""
        self._wait(end_s)
        try:
            number, reply = decode_reply(self._socket.recv(zmq.NOBLOCK))
        except InvalidInput as error:
            raise PeerGone(f"{self._address}: its answer is none: {error}") from error
        if isinstance(reply, Refusal):
            raise self._refused(reply)
        self._receive_rest(number, reply, place)
        return number, reply

    def _receive_rest(
        self, number: int, reply: Reply, place: Callable[[int], memoryview] | None
    ) -> None:
        wants_bytes = isinstance(reply, Bytes) and reply.length is not None
        if wants_bytes != bool(self._socket.getsockopt(zmq.RCVMORE)) or (
            wants_bytes and place is None
        ):
            raise PeerGone(f"{self._address}: its answer has not the parts it should have")
        if place is None or not isinstance(reply, Bytes) or reply.length is None:
            return
        buffer = place(number)
        if len(buffer) != reply.length:
            raise PeerGone(f"{self._address}: answers with another length")
        arrived = self._socket.recv_into(buffer, flags=zmq.NOBLOCK)
        if arrived != len(buffer) or self._socket.getsockopt(zmq.RCVMORE):
            raise PeerGone(f"{self._address}: the bytes do not have the length announced")

    def _wait(self, end_s: float) -> None:
        """Return when a reply is there."""
        end_s = min(end_s, time.monotonic() + self._progress_s)
        while True:
            left_s = end_s - time.monotonic()
            ready = dict(self._poller.poll(max(0, int(left_s * 1000))))
            if self._socket in ready:
                return
            if self._wake_fd in ready:
                raise Unavailable(f"{self._address}: the client is closed")
            if self._monitor in ready:
                self._look_at_events()
            elif left_s <= 0:
                raise PeerStalled(f"{self._address}: no answer before the deadline")

    def _look_at_events(self) -> None:
        """Raise `PeerGone` for what has happened to the connection. An answer that came before is
        not awaited: who asks again gets it anew."""
        reasons = set()
        for _ in range(_EVENTS_MAX):
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            reasons.add(event["event"])
        # Of several, the one that says most.
        for reason in reversed(_WORDS):
            if reason in reasons:
                raise PeerGone(f"{self._address}: {_WORDS[reason]}")

    def _refused(self, refusal: Refusal) -> Unavailable:
        text = f"{self._address}: {refusal.text}"
        match refusal.code:
            case Code.NO_SESSION:
                return SessionEnded(text)
            case Code.FAILED:
                return Unavailable(text)
        return PeerGone(text)
