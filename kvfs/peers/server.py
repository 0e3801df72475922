"""The server that a node's peers talk to.

One thread owns the channels and the sessions on them; workers ask the source, and hand their
answers back to it. A channel that has said hello is a session. A message that breaks a rule costs
its sender the session and nothing else: others' messages wait in queues of their own, which zmq
takes in turns.
"""

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

from kvfs.config import PeerLimits
from kvfs.errors import InvalidInput
from kvfs.peers.address import Address, parse_address
from kvfs.peers.bulk import BulkListener
from kvfs.peers.desk import Desk
from kvfs.peers.front import Arrival, Front
from kvfs.peers.keys import Keys, check_exposure
from kvfs.peers.messages import (
    NODE_ID_BYTES,
    PEER_PROTOCOL,
    Code,
    Hello,
    Refusal,
    Reply,
    Request,
    Welcome,
    decode_request,
    encode,
    shortened,
)
from kvfs.peers.sessions import Session, Sessions
from kvfs.peers.source import Source
from kvfs.peers.tickets import TicketTable

log = logging.getLogger(__name__)

_TICK_S = 0.25  # between two looks at what has expired, or grown too large
_TURN_MESSAGES_MAX = 64  # before answers are sent, and others let in


@dataclass(frozen=True, slots=True)
class _Job:
    session: Session
    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Answer:
    session: Session
    frame: bytes  # empty: nobody waits for it any more
    payload: bytes | None = None


class PeerServer:
    """Serves a source to peers: `start` once, `close` once. `port` is known from the beginning.

    With `encrypt_bulk` bytes go through the channel only, to clients that say so too.
    `address` is what to listen on, `host:port`; bytes go out on `bulk_port` of the same host, any
    free one by default. Raises `InvalidInput` when it would serve strangers without `insecure`, or
    cannot listen.
    """

    def __init__(
        self,
        source: Source,
        address: str,
        node_id: bytes,
        cluster: str,
        keys: Keys | None,
        *,
        insecure: bool = False,
        encrypt_bulk: bool = False,
        bulk_port: int = 0,
        limits: PeerLimits | None = None,
    ) -> None:
        if len(node_id) != NODE_ID_BYTES:
            raise InvalidInput("node id", f"must be {NODE_ID_BYTES} bytes")
        place = parse_address(address)
        check_exposure(place, keys, insecure=insecure)
        self._node_id = node_id
        self._cluster = cluster
        self._limits = limits or PeerLimits()
        tickets = TicketTable(self._limits)
        self._desk = Desk(source, None if encrypt_bulk else tickets)
        self._sessions = Sessions(self._limits)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # at most `requests_max`
        self._answers: deque[_Answer] = deque()  # no more than there were jobs
        self._unanswered = 0
        self._closing = False
        self._front = Front(place, keys, self._limits)
        try:
            self._bulk = BulkListener(source, tickets, Address(place.host, bulk_port), self._limits)
        except BaseException:
            self._front.close()
            raise
        self.port = self._front.port
        self._workers = [
            threading.Thread(target=self._work_always, name=f"kvfs-peers-{index}", daemon=True)
            for index in range(self._limits.workers)
        ]
        self._thread = threading.Thread(target=self._serve_always, name="kvfs-peers", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._bulk.start()
        for thread in (*self._workers, self._thread):
            thread.start()

    def close(self) -> None:
        """End every session and stream. Takes at most `close_s`: a thread that the source keeps for
        longer is left to end by itself."""
        end_s = time.monotonic() + self._limits.close_s
        self._closing = True
        if self._thread.ident is None:
            self._front.close()
        else:
            self._front.wake()
        for _ in self._workers:
            self._jobs.put(None)
        self._bulk.close(end_s)
        left = [t for t in (self._thread, *self._workers) if not _has_left(t, end_s)]
        if left:
            log.warning("threads of the peer server are busy still: %s", [t.name for t in left])

    @property
    def connection_count(self) -> int:
        """Of channels, whether they have said hello or not."""
        return self._front.connection_count

    @property
    def session_count(self) -> int:
        """Of channels that have said hello."""
        return len(self._sessions)

    @property
    def stream_count(self) -> int:
        return self._bulk.stream_count

    # The thread that owns the channels ------------------------------------------------------------
    def _serve_always(self) -> None:
        try:
            next_tick_s = time.monotonic() + _TICK_S
            has_more = False
            while not self._closing:
                wait_s = 0.0 if has_more else max(0.0, next_tick_s - time.monotonic())
                self._front.wait(wait_s)
                has_more = self._take_turn()
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    self._sessions.end_idle(now_s)
                    self._bulk.end_overdue(now_s)
                    self._front.cut_hoarders()
                    next_tick_s = now_s + _TICK_S
        finally:
            self._front.close()

    def _take_turn(self) -> bool:
        """Send what was answered and take what has come; whether there may be more of it."""
        while self._answers:
            self._finish(self._answers.popleft())
        for _ in range(_TURN_MESSAGES_MAX):
            arrival = self._front.receive()
            if arrival is None:
                return False
            self._take(arrival)
        return True

    def _take(self, arrival: Arrival) -> None:
        try:
            if arrival.body is None:
                raise InvalidInput("message", "has more than one part")
            number, request = decode_request(arrival.body)
        except InvalidInput as error:
            self._end(arrival.route, 0, Refusal(Code.INVALID, shortened(str(error))))
            return
        session = self._sessions.get(arrival.route)
        if session is not None and arrival.key not in ("", session.owner):
            self._sessions.end(arrival.route)  # another peer has taken the name of its channel
            session = None
        match request:
            case Hello():
                self._greet(arrival, number, request, session)
            case _ if session is None:
                self._send(arrival.route, number, Refusal(Code.NO_SESSION, "say hello first"))
            case _:
                self._accept(session, number, request)

    def _greet(self, arrival: Arrival, number: int, hello: Hello, session: Session | None) -> None:
        if session is not None:
            refusal = Refusal(Code.INVALID, "hello: was said before in this session")
            self._end(arrival.route, number, refusal)
            return
        if hello.protocol != PEER_PROTOCOL:
            text = f"speaks version {hello.protocol} of the protocol; {PEER_PROTOCOL} is needed"
            self._send(arrival.route, number, Refusal(Code.STRANGER, text))
            return
        if hello.cluster != self._cluster:
            text = shortened(f"is of cluster {hello.cluster!r}; this is {self._cluster!r}")
            self._send(arrival.route, number, Refusal(Code.STRANGER, text))
            return
        session = Session(
            arrival.route,
            arrival.key or hello.node_id.hex(),
            hello.node_id,
            number,
            time.monotonic(),
        )
        if self._sessions.open(session):
            reply: Reply = Welcome(self._node_id, hello.nonce, "", self._bulk.port)
        else:
            reply = Refusal(Code.BUSY, "too many sessions are busy")
        self._send(arrival.route, number, reply)

    def _accept(self, session: Session, number: int, request: Request) -> None:
        """Give a request to the workers, if it is in order."""
        if session.is_replay(number):
            self._end(session.route, number, Refusal(Code.REPLAY, f"number {number} is not new"))
            return
        if session.unanswered >= self._limits.session_requests_max:
            text = f"more than {self._limits.session_requests_max} requests are unanswered"
            self._end(session.route, number, Refusal(Code.INVALID, text))
            return
        self._sessions.use(session, time.monotonic())
        if self._unanswered >= self._limits.requests_max:
            self._send(session.route, number, Refusal(Code.BUSY, "the node has too much to do"))
            return
        session.unanswered += 1
        self._unanswered += 1
        self._jobs.put(_Job(session, number, request))

    def _finish(self, answer: _Answer) -> None:
        self._unanswered -= 1
        session = answer.session
        session.unanswered -= 1
        if session.has_ended:
            return
        if not self._front.send(session.route, answer.frame, answer.payload):
            self._sessions.end(session.route)

    def _send(self, route: bytes, number: int, reply: Reply) -> None:
        if not self._front.send(route, encode(number, reply)):
            self._sessions.end(route)

    def _end(self, route: bytes, number: int, refusal: Refusal) -> None:
        """End a session, if there is one, and say why."""
        self._sessions.end(route)
        log.debug("a peer's session ended: %s", refusal.text)
        self._front.send(route, encode(number, refusal))

    # The workers ----------------------------------------------------------------------------------
    def _work_always(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._answers.append(self._answer(job))
            if self._closing:
                return
            self._front.wake()

    def _answer(self, job: _Job) -> _Answer:
        if job.session.has_ended:
            return _Answer(job.session, b"")
        try:
            reply, payload = self._desk.answer(job.session.route, job.request)
            return _Answer(job.session, encode(job.number, reply), payload)
        except Exception:  # the thread's outer edge: a bug must not end the worker
            log.exception("a peer's request met a bug")
            refusal = Refusal(Code.FAILED, "the node met a bug; its log says more")
            return _Answer(job.session, encode(job.number, refusal))


def _has_left(thread: threading.Thread, end_s: float) -> bool:
    if thread.ident is None:
        return True
    thread.join(max(0.0, end_s - time.monotonic()))
    return not thread.is_alive()
