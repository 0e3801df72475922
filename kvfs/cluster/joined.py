"""A node that has joined a cluster: it hears what the others change, serves them what it has, and
gives a server that lost everything its names again.

Everything here runs in the node's trio thread, but for what waits for the network: that is done in
worker threads. The peers' server has threads of its own, which ask the node in its thread.
"""

import logging
import socket
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from contextlib import asynccontextmanager

import trio

from kvfs.arriving import Arriving
from kvfs.boot import boot_id
from kvfs.cluster.abandoned import Abandoned
from kvfs.cluster.copies import Copies
from kvfs.cluster.drain import Drain
from kvfs.cluster.fetcher import Fetcher
from kvfs.cluster.hints import Hints
from kvfs.cluster.location import Location
from kvfs.cluster.membership import Membership
from kvfs.cluster.own_address import own_address
from kvfs.cluster.referrals import Referrals
from kvfs.cluster.source import NodeSource
from kvfs.cluster.takers import Takers
from kvfs.cluster.trouble import Trouble
from kvfs.config import CLUSTER_LISTEN_S, CLUSTER_LOOK_S, CLUSTER_RENEW_S
from kvfs.errors import KvfsError, Unavailable
from kvfs.meta.contract import Inode
from kvfs.meta.members import Member
from kvfs.meta.probe import Memory
from kvfs.meta.redis import RedisEngine
from kvfs.meta.shared import SharedTable
from kvfs.meta.unreadable import UNREADABLE
from kvfs.meta.url import without_password
from kvfs.neighbours import Referral
from kvfs.node import Change, Node
from kvfs.peers.address import bulk_port, parse_address
from kvfs.peers.client import PeerClient
from kvfs.peers.keys import PAIR_NAME, Keys, load_pair
from kvfs.peers.messages import Range
from kvfs.peers.server import PeerServer
from kvfs.replicate import Holder
from kvfs.settings.words import ClusterConfig

log = logging.getLogger(__name__)


class Cluster:
    """See the module's docstring. `node.neighbours` while `running`."""

    def __init__(self, node: Node, engine: RedisEngine, config: ClusterConfig) -> None:
        self._node = node
        self._engine = engine
        self._config = config
        served: dict[str, str] = {}
        pair = load_pair(node.config.home / PAIR_NAME)
        keys = None if config.insecure else Keys(pair, served)
        reachable = own_address(config.metadata)
        listen = config.listen or f"{reachable}:0"
        self._hints = Hints(node)
        self._source = NodeSource(node, self._hints, trio.lowlevel.current_trio_token())
        self._server = PeerServer(
            self._source,
            listen,
            engine.node_id,
            config.name,
            keys,
            insecure=config.insecure,
            encrypt_bulk=config.encrypt_bulk,
            bulk_port=bulk_port(parse_address(listen), config.bulk_port),
        )
        host = listen.rpartition(":")[0]
        me = Member(
            engine.node_id,
            f"{reachable if host in ('0.0.0.0', '[::]') else host}:{self._server.port}",
            "" if keys is None else pair.public,
            socket.gethostname(),
            str(node.config.home),
            node.started_ns,
            boot_id(),
        )
        self._membership = Membership(
            engine.members(me),
            me,
            served,
            lambda member: PeerClient(
                member.address,
                keys,
                member.public_key or None,
                me.node_id,
                config.name,
                encrypt_bulk=config.encrypt_bulk,
            ),
        )
        self._location = Location(engine, self._membership)
        self._fetcher = Fetcher(node, engine, self._location, self._ask_again)
        self._referrals = Referrals(engine, self._location, self._hints.take, config.copy_after)
        takers = Takers(self._membership)
        self._copies = Copies(engine, self._membership, takers, config.copies)
        self._drain = Drain(engine, self._membership, takers, node.open_blobs, node.directories)
        self._abandoned = Abandoned(node, engine, self._membership)
        self._trouble = Trouble()
        self._unfilled = ""  # why the server was not filled, the last time
        self._memory: Memory | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member for the length of a `with` block. Raises `Unavailable`."""
        try:
            await self._membership.join()
        except BaseException:  # its lease may be another node's, so that only the server is closed
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._server.close)
            raise
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._source.run)
                await nursery.start(self._fetcher.run)
                self._server.start()
                self._node.neighbours = self
                me = self._membership.me
                log.info("cluster %s: serving peers at %s", self._config.name, me.address)
                nursery.start_soon(self._renew_always)
                nursery.start_soon(self._listen_always)
                nursery.start_soon(self._refill_always)
                nursery.start_soon(self._hints.work_always, self._fetcher.bring)
                nursery.start_soon(self._copies.run)
                nursery.start_soon(self._drain.run)
                nursery.start_soon(self._abandoned.run)
                nursery.start_soon(self._watch_memory_always)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self._node.neighbours = None
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._stop)

    def _stop(self) -> None:
        self._server.close()
        try:
            self._membership.close()
        except Unavailable as error:
            log.info("could not say goodbye: %s", error)

    async def _renew_always(self) -> None:
        while True:
            await trio.sleep(CLUSTER_RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        try:
            await self._membership.renew()
        except Unavailable as error:
            self._trouble.begin("lease", error)
        else:
            self._trouble.end("lease")

    async def _ask_again(self) -> None:
        """Know anew who has what, and who is there."""
        self.refresh()
        await self._renew()

    # The others' changes -------------------------------------------------------------------------
    async def _listen_always(self) -> None:
        thread = trio.CapacityLimiter(1)
        while True:
            try:
                await trio.to_thread.run_sync(
                    self._engine.wait_news, abandon_on_cancel=True, limiter=thread
                )
            except Unavailable as error:
                self._trouble.begin("feed", error)
                await trio.sleep(CLUSTER_LISTEN_S)
            else:
                self._trouble.end("feed")
            self.refresh()  # also without news: the server may have lost everything

    async def _refill_always(self) -> None:
        """Fill a server that has lost its names again, compare what this node has with what all
        share after it was away, and learn what it needs for that; in small steps."""
        while True:
            await trio.sleep(CLUSTER_RENEW_S)
            try:
                self._engine.look_after()
                while (
                    self._engine.refill_more(self._node.now_ns())
                    or self._engine.recheck_more()
                    or self._engine.remember_more()
                ):
                    await trio.sleep(0)
                self._node.orphans.reap()
                self._unfilled = ""
            except KvfsError as error:
                is_said = self._trouble or str(error) == self._unfilled
                self._unfilled = str(error)
                level = logging.DEBUG if is_said else logging.WARNING
                log.log(level, "the metadata server is not filled yet: %s", error)

    async def _watch_memory_always(self) -> None:
        """Say once where the server gives names up by itself when it is full; and tell one that did
        again what this node knows."""
        thread = trio.CapacityLimiter(1)
        while True:
            before = self._memory
            try:
                self._memory = await trio.to_thread.run_sync(
                    self._engine.memory, abandon_on_cancel=True, limiter=thread
                )
            except Unavailable as error:
                log.debug("how the metadata server keeps names is not known: %s", error)
            now = self._memory
            if now is not None and now is not before:
                if now.evicts and (before is None or before.policy != now.policy):
                    log.warning("%s", _evicts(now))
                if before is not None and now.takes_names and now.evicted > before.evicted:
                    self._engine.give_back_lost()
            await trio.sleep(CLUSTER_LOOK_S)

    def refresh(self) -> None:
        """Know all that others did until now, and have the kernel know. A round trip; where the
        server does not answer, what was known has to do."""
        try:
            heard = self._engine.catch_up()
        except KvfsError as error:  # also of this node's own full disk: what it knows has to do
            self._trouble.begin("news", error)
            return
        if "news" in self._trouble:
            self._engine.forget_remembered()
            self._trouble.end("news")
        for record in {record for one in heard for record in one.records}:
            if record.table is SharedTable.DIRENT:
                parent, name = record.split()
                self._node.tell(Change(int.from_bytes(parent, "big"), name, 0))
            elif record.table is SharedTable.INODE:
                self._node.tell(Change(0, None, int.from_bytes(record.key, "little")))
        if any(one.moves_directories for one in heard):
            self._node.tell(Change(0, None, 0, moves_directories=True))
        if any(one.moves for one in heard):
            self._node.orphans.reap()

    # The others' bytes --------------------------------------------------------------------------
    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, as far as any node that is there has them."""
        await self._fetcher.bring(inodes)

    async def refer(self, inodes: Iterable[Inode]) -> dict[bytes, Referral]:
        """Where a client gets what is not here, by digest; nowhere if all bytes are encrypted, for
        which clients have no keys."""
        return {} if self._config.encrypt_bulk else await self._referrals.refer(inodes)

    async def tickets(
        self, node_id: bytes, ranges: Sequence[Range]
    ) -> tuple[str, list[bytes | None]]:
        """As `kvfs.neighbours.Neighbours.tickets`."""
        if self._config.encrypt_bulk:
            raise Unavailable("bytes between nodes are encrypted, for which clients have no keys")
        return await self._referrals.tickets(node_id, ranges)

    async def sizes_at(self, node_id: bytes, digests: Sequence[bytes]) -> list[int | None]:
        """The sizes of blobs that another node has. Raises `Unavailable`."""
        return await self._referrals.sizes_at(node_id, digests)

    @property
    def fetching(self) -> int:
        """How many files are on their way here, or wait for that."""
        return self._fetcher.under_way

    async def begin(self, inode: Inode) -> Arriving | None:
        """A published file's bytes as they come from another node, or None: all are here, or no
        node has them."""
        return await self._fetcher.begin(inode)

    def stop_fetching(self) -> None:
        """Let nobody wait any more for what other nodes have."""
        self._fetcher.stop()

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up this node's copies of those digests that other nodes hold as well, and say
        which. Their blobs are doomed."""
        return self._location.give_up(digests)

    def held_elsewhere(self, digests: Sequence[bytes]) -> Container[bytes]:
        """Those of the digests that others hold as well, as far as it is known; never fails."""
        return self._location.held_elsewhere(digests)

    def copies(self, digests: Sequence[bytes]) -> list[list[Holder]]:
        """Which nodes have the bytes of each digest. Raises `Unavailable`."""
        return self._location.copies(digests)

    def published(self, inode: Inode) -> None:
        """A file has got its bytes here: others may have to have them as well."""
        self._copies.published(inode)
        self._drain.published()

    # Leaving ------------------------------------------------------------------------------------
    def leave(self, *, begin: bool) -> dict[str, object]:
        """Begin to leave, or only say how far it is; see `Drain.describe`."""
        if begin:
            self._hints.refuse()
            self._drain.begin()
        return self._drain.describe()

    def describe(self) -> dict[str, object]:
        """For `kvfs status` and `.kvfs/nodes`."""
        return {
            "name": self._config.name,
            "metadata": without_password(self._config.metadata),
            "is_cut_off": bool(self._trouble),
            "trouble": self._trouble.reason,
            "eviction": _evicts(self._memory) if self._memory and self._memory.evicts else "",
            "unreadable": UNREADABLE.count,
            "fetching": self.fetching,
            "nodes": [
                {
                    "id": member.node_id.hex(),
                    "host": member.host,
                    "address": member.address,
                    "store": member.store,
                    "is_this": member.node_id == self._membership.me.node_id,
                    "is_leaving": member.is_leaving,
                }
                for member in self._membership.present
            ],
        }


def _evicts(memory: Memory) -> str:
    return (
        f"the metadata server's maxmemory-policy is {memory.policy}: it may take names away when it"
        " is full; set it to noeviction"
    )
