"""One node among many: it tells the others that it is there, hears what they change, serves them
the bytes that it has, and fetches those that it lacks.

Everything here runs in the node's trio thread, but for what waits for the network: that is done in
worker threads. The peers' server has threads of its own, which ask the node in its thread.
"""

import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import trio

from kvfs.config import (
    CLUSTER_FETCH_S,
    CLUSTER_FETCHES_MAX,
    CLUSTER_HOLDER_WAIT_S,
    CLUSTER_LEASE_S,
    CLUSTER_LISTEN_S,
    CLUSTER_RENEW_S,
    MIB,
    ClusterConfig,
)
from kvfs.errors import KvfsError, Unavailable
from kvfs.fetch import fetch_blob
from kvfs.meta.contract import Inode
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from kvfs.meta.shared import SharedTable
from kvfs.node import Change, Node
from kvfs.peers.client import PeerClient
from kvfs.peers.keys import Keys, load_pair
from kvfs.peers.messages import Health
from kvfs.peers.server import PeerServer
from kvfs.stage import Stage

KEY_NAME = "peer.key"
_SLOW_BYTES_S = 10 * MIB  # a transfer that is slower is given up
_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


class Cluster:
    """See the module's docstring. `node.neighbours` while `running`."""

    def __init__(self, node: Node, engine: RedisEngine, config: ClusterConfig) -> None:
        self._node = node
        self._engine = engine
        self._config = config
        self._known: dict[str, str] = {}  # the peers that are served: their keys, and stores
        pair = load_pair(node.config.home / KEY_NAME)
        self._keys = None if config.insecure else Keys(pair, self._known)
        reachable = _own_address(config.metadata)
        listen = config.listen or f"{reachable}:0"
        self._server = PeerServer(
            _Shown(node, trio.lowlevel.current_trio_token()),
            listen,
            engine.node_id,
            config.name,
            self._keys,
            insecure=config.insecure,
        )
        host = listen.rpartition(":")[0]
        self._me = Member(
            engine.node_id,
            f"{reachable if host in ('0.0.0.0', '[::]') else host}:{self._server.port}",
            "" if self._keys is None else pair.public,
            socket.gethostname(),
            str(node.config.home),
            node.started_ns,
        )
        self._membership = engine.members(self._me)
        self.members: tuple[Member, ...] = (self._me,)
        self._clients: dict[Member, PeerClient] = {}
        self._fetching: dict[bytes, trio.Event] = {}
        self._limiter = trio.CapacityLimiter(CLUSTER_FETCHES_MAX)
        self._is_cut_off = False
        self._renewal = trio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member for the length of a `with` block. Raises `Unavailable`."""
        self._take_members(await self._join())
        self._server.start()
        self._node.neighbours = self
        log.info("cluster %s: serving peers at %s", self._config.name, self._me.address)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew_always)
                nursery.start_soon(self._listen_always)
                nursery.start_soon(self._refill_always)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self._node.neighbours = None
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._stop)

    async def _join(self) -> tuple[Member, ...]:
        """Become a member; after the lease has ended that this node had before it died."""
        end_s = trio.current_time() + 2 * CLUSTER_LEASE_S
        while True:
            try:
                return await trio.to_thread.run_sync(self._membership.renew)
            except Unavailable:
                if trio.current_time() > end_s:
                    raise
            await trio.sleep(CLUSTER_RENEW_S)

    def _stop(self) -> None:
        self._server.close()
        for client in self._clients.values():
            client.close()
        try:
            self._membership.leave()
        except Unavailable as error:
            log.info("could not say goodbye: %s", error)

    # Members -------------------------------------------------------------------------------------
    async def _renew_always(self) -> None:
        while True:
            await trio.sleep(CLUSTER_RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        """Say that this node is there, and know who else is."""
        async with self._renewal:
            try:
                members = await trio.to_thread.run_sync(self._membership.renew)
            except Unavailable as error:
                self._note_cut_off(error)
            else:
                self._take_members(members)

    def _take_members(self, members: tuple[Member, ...]) -> None:
        """Know who is there: whom to serve, whom to ask."""
        if members == self.members:
            return
        self.members = members
        others = {m for m in members if m.node_id != self._me.node_id}
        self._known.update({m.public_key: m.store for m in others if m.public_key})
        for key in self._known.keys() - {m.public_key for m in others}:
            del self._known[key]
        for member in self._clients.keys() - others:
            self._clients.pop(member).close()

    def _client(self, member: Member) -> PeerClient:
        client = self._clients.get(member)
        if client is None:
            client = self._clients[member] = PeerClient(
                member.address,
                self._keys,
                member.public_key or None,
                self._me.node_id,
                self._config.name,
            )
        return client

    # The others' changes -------------------------------------------------------------------------
    async def _listen_always(self) -> None:
        while True:
            try:
                await trio.to_thread.run_sync(self._engine.wait_news, abandon_on_cancel=True)
            except Unavailable as error:
                self._note_cut_off(error)
                await trio.sleep(CLUSTER_LISTEN_S)
            self.refresh()  # also without news: the server may have lost everything

    async def _refill_always(self) -> None:
        """Fill a server that has lost its names again, and compare what this node has with what
        all share after it was away; in small steps."""
        while True:
            await trio.sleep(CLUSTER_RENEW_S)
            try:
                while self._engine.refill_more(self._node.now_ns()) or self._engine.recheck_more():
                    await trio.sleep(0)
                self._node.reap()
            except KvfsError as error:
                log.warning("the metadata server is not filled yet: %s", error)

    def refresh(self) -> None:
        """Know all that others did until now, and have the kernel know. A round trip; where the
        server does not answer, what was known has to do."""
        try:
            heard = self._engine.catch_up()
        except KvfsError as error:  # also of this node's own full disk: what it knows has to do
            self._note_cut_off(error)
            return
        if self._is_cut_off:
            log.warning("the metadata server answers again")
            self._engine.forget_remembered()
            self._is_cut_off = False
        for record in {record for one in heard for record in one.records}:
            if record.table is SharedTable.DIRENT:
                parent, name = record.split()
                self._node.tell(Change(int.from_bytes(parent, "big"), name, 0))
            elif record.table is SharedTable.INODE:
                self._node.tell(Change(0, None, int.from_bytes(record.key, "little")))
        if any(one.moves_directories for one in heard):
            self._node.tell(Change(0, None, 0, moves_directories=True))
        if any(one.moves for one in heard):
            self._node.reap()

    def _note_cut_off(self, error: KvfsError) -> None:
        if not self._is_cut_off:
            log.warning("cut off from the cluster: %s", error)
        self._is_cut_off = True

    # Bytes ---------------------------------------------------------------------------------------
    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, as far as any node that is there has them."""
        wanted = {i.digest: i.size_bytes for i in inodes if i.is_published}
        known = self._engine.blobs(list(wanted))
        missing = [d for d, blob in zip(wanted, known, strict=True) if blob is None]
        async with trio.open_nursery() as nursery:
            for digest in missing:
                nursery.start_soon(self._bring_one, digest, wanted[digest])

    async def _bring_one(self, digest: bytes, size_bytes: int) -> None:
        running = self._fetching.get(digest)
        if running is not None:
            await running.wait()
            return
        self._fetching[digest] = trio.Event()
        try:
            await self._fetch(digest, size_bytes)
        except (KvfsError, OSError) as error:
            log.warning("blob %s cannot be fetched: %s", digest.hex(), error)
        finally:
            self._fetching.pop(digest).set()

    async def _fetch(self, digest: bytes, size_bytes: int) -> None:
        stage = self._node.stage(size_bytes)
        try:
            await self._node.reserve(stage, size_bytes)
            end_s = trio.current_time() + CLUSTER_HOLDER_WAIT_S
            while not await self._fetch_into(stage, digest, size_bytes):
                # Who has joined just now may not be known yet, here or to who has the bytes.
                self.refresh()
                await self._renew()
                if not self._holders(digest) or trio.current_time() > end_s:
                    log.info("blob %s: no node gives it", digest.hex())
                    return
                await trio.sleep(CLUSTER_RENEW_S / 2)
            await self._node.publisher.adopt_copy(stage, digest, size_bytes, self._engine.add_copy)
            self._node.counters.fetched_bytes += size_bytes
        finally:
            if stage.is_open:
                self._node.discard(stage)
            else:
                self._node.reclaim.close(stage.fd)

    async def _fetch_into(self, stage: Stage, digest: bytes, size_bytes: int) -> bool:
        deadline_s = CLUSTER_FETCH_S + size_bytes / _SLOW_BYTES_S
        clients = [self._client(member) for member in self._holders(digest)]
        random.shuffle(clients)
        return await trio.to_thread.run_sync(
            fetch_blob, clients, digest, size_bytes, stage.fd, deadline_s, limiter=self._limiter
        )

    def _holders(self, digest: bytes) -> list[Member]:
        """The other nodes that have a blob, and are there."""
        ids = set(self._engine.copies(digest)) - {self._me.node_id}
        return [member for member in self.members if member.node_id in ids]

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up this node's copies of those digests that other nodes hold as well, and say
        which. Their blobs are doomed."""
        others = {member.node_id for member in self.members} - {self._me.node_id}
        return self._engine.end_copies(digests, others)

    def describe(self) -> dict[str, object]:
        """For `kvfs status` and `.kvfs/nodes`."""
        return {
            "name": self._config.name,
            "metadata": _without_password(self._config.metadata),
            "is_cut_off": self._is_cut_off,
            "nodes": [
                {
                    "id": member.node_id.hex(),
                    "host": member.host,
                    "address": member.address,
                    "store": member.store,
                    "is_this": member.node_id == self._me.node_id,
                }
                for member in self.members
            ],
        }


class _Shown:
    """What a node shows its peers: `Source`, asked by the server's threads."""

    def __init__(self, node: Node, token: trio.lowlevel.TrioToken) -> None:
        self._node = node
        self._token = token

    def _ask(self, question: Callable[[], _Result]) -> _Result:
        try:
            return trio.from_thread.run_sync(question, trio_token=self._token)
        except trio.RunFinishedError as error:
            raise Unavailable("the node has stopped") from error

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        def ask() -> list[int | None]:
            found = self._node.meta.blobs(digests)
            return [None if blob is None else blob.size_bytes for blob in found]

        return self._ask(ask)

    def open(self, digest: bytes) -> int | None:
        return self._ask(lambda: self._node.open_blob(digest))

    def hinted(self, digests: Sequence[bytes]) -> None:
        """Nothing is done on a hint yet: blobs come when they are asked for."""

    def health(self) -> Health:
        def ask() -> Health:
            uptime_s = (time.time_ns() - self._node.started_ns) / 1e9
            return Health(self._node.statfs().free_bytes, 0.0, max(0.0, uptime_s))

        return self._ask(ask)


def _own_address(url: str) -> str:
    """The address of this machine on its way to the metadata server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 6379))
        except OSError as error:
            raise Unavailable(f"{parts.hostname}: {error.strerror or error}") from error
        address = probe.getsockname()[0]
        assert isinstance(address, str)
        return address


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host).geturl()
