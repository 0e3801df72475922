"""Nodes of a simulated cluster, and the wire between them.

A node is what production makes of one, but for files and sockets: its engine on a real server, its
lease, its knowledge of who has what, its desk for peers. The wire carries encoded messages within
this process, counts them, and may lose them. Files are bytes in a dictionary, which outlives a node
that is lost, as a disk does.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvfs.cluster.fetch import read_range
from kvfs.cluster.location import Location
from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_FETCH_S, CLUSTER_RENEW_S, MIB, PeerLimits
from kvfs.digest import digest_of
from kvfs.errors import Unavailable
from kvfs.meta.contract import Inode, Publication
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from kvfs.meta.server import MetaServer
from kvfs.meta.shared import Record
from kvfs.peers.backoff import Backoff
from kvfs.peers.desk import Desk
from kvfs.peers.gone import PeerGone, PeerStalled
from kvfs.peers.messages import (
    PEER_PROTOCOL,
    Code,
    Health,
    Hello,
    Range,
    Refusal,
    Reply,
    Request,
    Tickets,
    TicketsWanted,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)
from kvfs.peers.sessions import Session, Sessions
from kvfs.peers.tickets import TicketTable
from scripts.simulation_costs import CountedServer, bytes_below

CLUSTER = "simulated"
T0_NS = 1_700_000_000 * 10**9
FETCH_TRIES = 8  # of one file, as many as a node's patience allows
_MAP_BYTES = 64 * MIB
_KEY = "k" * 40  # as long as a public key


class Wire:
    """What peers say to each other. `watch` is told who asks whom, before anything arrives."""

    def __init__(self, rng: random.Random, loss: float) -> None:
        self._rng = rng
        self._loss = loss
        self.listening: dict[str, SimulatedNode] = {}  # by address
        self.watch: Callable[[SimulatedNode, Member], None] = lambda asker, asked: None
        self.now_s = 0.0  # what peers' patience is measured by
        self.ticks = 0  # of what happens, in order
        self.counts: Counter[str] = Counter()

    def ask(self, asker: "SimulatedNode", asked: Member, frame: bytes) -> bytes:
        """The answer to a message. Raises `PeerStalled` where either got lost, or nobody is there
        to hear it."""
        self.watch(asker, asked)
        self._carry(frame)
        target = self.listening.get(asked.address)
        if target is None:
            self.counts["unheard"] += 1
            raise PeerStalled(f"{asked.address}: no answer before the deadline")
        answer = target.answer(asker.node_id, frame)
        self._carry(answer)
        return answer

    def stream(self, asked: Member, ticket: bytes) -> bytes:
        """The bytes that a ticket is for. Raises `PeerStalled`."""
        target = self.listening.get(asked.address)
        data = None if target is None else target.redeem(ticket)
        if data is None:
            raise PeerStalled(f"{asked.address}: gives no bytes")
        self.counts["streamed_bytes"] += len(data)
        return data

    def _carry(self, frame: bytes) -> None:
        self.counts["messages"] += 1
        self.counts["bytes"] += len(frame)
        if self._rng.random() < self._loss:
            self.counts["lost"] += 1
            raise PeerStalled("no answer before the deadline")


class WireClient:
    """Asks one peer over the wire: of `PeerClient` what fetching uses, with the same messages, and
    the same patience."""

    def __init__(self, wire: Wire, asker: "SimulatedNode", asked: Member) -> None:
        self._wire = wire
        self._asker = asker
        self._asked = asked
        self._number = 0
        self._is_greeted = False
        self._backoff = Backoff(PeerLimits(), lambda: wire.now_s)

    def read_into(
        self,
        digest: bytes,
        offset: int,
        buffer: memoryview,
        deadline_s: float,
        silence_s: float | None = None,
    ) -> bool:
        """As `PeerClient.read_into`."""
        if self._backoff.refusal_s(deadline_s) is not None:
            raise Unavailable(f"{self._asked.address}: is left alone")
        try:
            reply = self._ask(TicketsWanted((Range(digest, offset, len(buffer)),)))
            if not isinstance(reply, Tickets):
                raise PeerGone(f"{self._asked.address}: answers with {reply}")
            [ticket] = reply.tickets
            if ticket is not None:
                data = self._wire.stream(self._asked, ticket)
                buffer[: len(data)] = data
        except PeerGone:
            self._backoff.note_failure()
            self._is_greeted = False  # a channel that broke is never mended
            raise
        self._backoff.note_answer()
        return ticket is not None and len(data) == len(buffer)

    def _ask(self, request: Request) -> Reply:
        if not self._is_greeted:
            hello = Hello(PEER_PROTOCOL, CLUSTER, self._asker.node_id, bytes(16))
            if not isinstance(self._say(hello), Welcome):
                raise PeerGone(f"{self._asked.address}: does not answer to this hello")
            self._is_greeted = True
        reply = self._say(request)
        if isinstance(reply, Refusal) and reply.code is Code.NO_SESSION:
            self._is_greeted = False  # it was away
            return self._ask(request)
        return reply

    def _say(self, request: Request) -> Reply:
        self._number += 1
        answer = self._wire.ask(self._asker, self._asked, encode(self._number, request))
        number, reply = decode_reply(answer)
        assert number == self._number
        return reply

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is waited for."""


class SimulatedNode:
    """One node: absent until `join`, again after `leave` or `vanish`."""

    def __init__(self, directory: Path, url: str, wire: Wire, index: int, seed: int) -> None:
        rng = random.Random(f"{seed}-{index}")
        self.index = index
        self.node_id = rng.randbytes(16)
        self.disk: dict[bytes, bytes] = {}
        self.lease_end_s = 0.0  # not before that, by the server's clock
        self.renewed_tick = 0
        self._rng = rng
        self._directory = directory / str(index)
        self._url = url
        self._wire = wire
        self._starts = 0
        self._address = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}:7400"
        self.engine: RedisEngine
        self.membership: Membership
        self.location: Location

    async def join(self, lease_s: float) -> None:
        """Start, as a node does: its tables, what a former run left, its lease."""
        self._starts += 1
        self.engine = RedisEngine.join(
            self._directory,
            self._url,
            CLUSTER,
            self.node_id,
            now_ns=T0_NS,
            map_bytes=_MAP_BYTES,
            connect=CountedServer,
        )
        recovery = self.engine.recover()
        found = [digest for digest, _ in recovery.intended]
        self._take_away(found + [blob.digest for blob in recovery.doomed])
        me = Member(
            self.node_id, self._address, _KEY, f"node-{self.index}", "/nvme/kvfs", self._starts
        )
        self.membership = Membership(
            self.engine.members(me, lease_s),
            me,
            {},
            lambda asked: WireClient(self._wire, self, asked),
        )
        self._lease_s = lease_s
        self.location = Location(self.engine, self.membership, self._rng)
        self._tickets = TicketTable(PeerLimits(), lambda: self._wire.now_s)
        self._sessions = Sessions(PeerLimits())
        self._desk = Desk(self, self._tickets)
        await self.membership.join()
        self._note_renewal()
        self._wire.listening[self._address] = self

    async def renew(self) -> None:
        """Keep the lease, and know who else is there."""
        await self.membership.renew()
        self._note_renewal()

    def _note_renewal(self) -> None:
        self._wire.ticks += 1
        self.renewed_tick = self._wire.ticks
        self.lease_end_s = time.monotonic() + self._lease_s

    def leave(self) -> None:
        """Go, and say so."""
        self.membership.close()
        self.vanish()

    def vanish(self) -> None:
        """Go without a word."""
        del self._wire.listening[self._address]
        self.engine.close()

    # What peers are shown: `Source`, and the server before it -------------------------------------
    def answer(self, asker: bytes, frame: bytes) -> bytes:
        """As `PeerServer` does: sessions in order, the rest at the desk."""
        number, request = decode_request(frame)
        session = self._sessions.get(asker)
        if isinstance(request, Hello):
            if session is not None:
                self._sessions.end(asker)
            opened = self._sessions.open(
                Session(asker, asker.hex(), asker, number, self._wire.now_s)
            )
            assert opened
            return encode(number, Welcome(self.node_id, request.nonce, "", 7401))
        if session is None:
            return encode(number, Refusal(Code.NO_SESSION, "say hello first"))
        assert not session.is_replay(number)
        self._sessions.use(session, self._wire.now_s)
        reply, payload = self._desk.answer(asker, request)
        assert payload is None
        return encode(number, reply)

    def redeem(self, ticket: bytes) -> bytes | None:
        """The bytes of a ticket, as the bulk stream gives them."""
        wanted = self._tickets.take(ticket)
        fd = None if wanted is None else self.open(wanted.digest)
        if wanted is None or fd is None:
            return None
        try:
            return os.pread(fd, wanted.length, wanted.offset)
        finally:
            os.close(fd)

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        return [blob and blob.size_bytes for blob in self.engine.blobs(digests)]

    def open(self, digest: bytes) -> int | None:
        data = self.disk.get(digest)
        if data is None:
            return None
        fd = os.memfd_create("blob", os.MFD_CLOEXEC)
        os.write(fd, data)
        return fd

    def hinted(self, digests: Sequence[bytes], *, spare_only: bool) -> None:
        """Nothing, as in production."""

    def health(self) -> Health:
        return Health(0, 0.0, 0.0)

    # What it does ---------------------------------------------------------------------------------
    def store(self, publications: Sequence[tuple[Publication, bytes]], now_ns: int) -> None:
        """Publish files with their bytes."""
        self.engine.intend([(one.digest, 0) for one, _ in publications])
        self.disk.update({one.digest: data for one, data in publications})
        done = self.engine.publish([one for one, _ in publications], now_ns)
        replaced = [one.replaced.ino for one in done if one.replaced and not one.replaced.nlink]
        if replaced:
            self.engine.forget(replaced)
        self.reap()

    async def fetch(self, inode: Inode) -> bytes | None:
        """A file's bytes from whoever gives them, or None; with a node's patience."""
        buffer = memoryview(bytearray(inode.size_bytes))
        for _ in range(FETCH_TRIES):
            for client in self.location.whom_to_ask(inode.digest):
                is_filled = read_range(client, inode.digest, 0, buffer, CLUSTER_FETCH_S, None)
                if is_filled and digest_of(buffer) == inode.digest:
                    return bytes(buffer)
            self.engine.catch_up()
            await self.renew()
            self._wire.now_s += CLUSTER_RENEW_S / 2
            if not self.location.holders(inode.digest):
                return None
        return None

    def add_copy(self, inode: Inode, data: bytes) -> bool:
        """Keep fetched bytes; False where no file holds them any more."""
        self.engine.intend([(inode.digest, 0)])
        self.disk[inode.digest] = data
        copy = Publication(inode.digest, len(data), 4096, 0, T0_NS)
        is_wanted = self.engine.add_copy(copy)
        if not is_wanted:
            self._take_away([inode.digest])
        return is_wanted

    def reap(self) -> None:
        """Remove the bytes of doomed blobs."""
        while doomed := self.engine.doomed(24):
            self._take_away([blob.digest for blob in doomed])

    def _take_away(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.disk.pop(digest, None)
        self.engine.bury(digests)

    def recheck(self) -> None:
        """Compare what is here with what all share, as a node does in the background."""
        while self.engine.recheck_more():
            pass
        self.reap()

    def cached_values(self) -> dict[Record, bytes | None]:
        """What the engine keeps of the server's records."""
        return {
            Record(table, key): value
            for table, values in self.engine._known._values.items()
            for key, value in values.items()
        }

    def memory_bytes(self) -> dict[str, int]:
        """Of what the engine keeps of the server, and of the list of members, as Python counts."""
        engine = self.engine
        cached = (engine._known, engine._cache, engine._lookups, engine._untold)
        return {
            "cache_bytes": bytes_below(cached, (MetaServer,)),
            "members_bytes": bytes_below(self.membership, (MetaServer, WireClient)),
        }
