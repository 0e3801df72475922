"""Sending clients to the nodes that have what they want: one copy of the bytes less, and no disk
between."""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

import trio

from kvfs.cluster.location import Location
from kvfs.config import REFERRAL_DEADLINE_S, REFERRED_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode, MetaEngine
from kvfs.neighbours import Referral
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Range

log = logging.getLogger(__name__)


class Referrals:
    """Asks peers for tickets, on behalf of clients. What they ask for again and again is to be here
    as well: `want` is told of it, at each `copy_after`th time (0: never)."""

    def __init__(
        self,
        meta: MetaEngine,
        location: Location,
        want: Callable[[Sequence[bytes]], None],
        copy_after: int,
    ) -> None:
        self._meta = meta
        self._location = location
        self._want = want
        self._copy_after = copy_after
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # the last asked for at the right

    async def refer(self, inodes: Iterable[Inode]) -> dict[bytes, Referral]:
        """As `kvfs.neighbours.Neighbours.refer`. A peer that does not answer soon is left out."""
        wanted = {i.digest: i.size_bytes for i in inodes if i.is_published and i.size_bytes}
        known = self._meta.blobs(list(wanted))
        missing = [digest for digest, blob in zip(wanted, known, strict=True) if blob is None]
        self._location.learn(missing)
        holders = {digest: self._holders(digest) for digest in missing}
        by_peer: defaultdict[PeerClient, list[Range]] = defaultdict(list)
        for digest, peers in holders.items():
            if peers:
                by_peer[next(iter(peers.values()))].append(Range(digest, 0, wanted[digest]))
        tickets: dict[bytes, tuple[str, bytes]] = {}
        async with trio.open_nursery() as nursery:
            for peer, ranges in by_peer.items():
                nursery.start_soon(_ask, peer, ranges, tickets)
        referrals = {
            digest: Referral(tuple(holders[digest]), *ticket) for digest, ticket in tickets.items()
        }
        if self._copy_after:
            self._want([d for d in referrals if self._count(d) % self._copy_after == 0])
        return referrals

    async def tickets(
        self, node_id: bytes, ranges: Sequence[Range]
    ) -> tuple[str, list[bytes | None]]:
        """As `kvfs.neighbours.Neighbours.tickets`."""
        peer = self._location.client_of(node_id)
        address, tickets = await trio.to_thread.run_sync(peer.tickets, ranges, REFERRAL_DEADLINE_S)
        return str(address), tickets

    async def sizes_at(self, node_id: bytes, digests: Sequence[bytes]) -> list[int | None]:
        """As `kvfs.neighbours.Neighbours.sizes_at`."""
        peer = self._location.client_of(node_id)
        return await trio.to_thread.run_sync(peer.sizes, digests, REFERRAL_DEADLINE_S)

    def _holders(self, digest: bytes) -> dict[bytes, PeerClient]:
        try:
            return self._location.choose(digest)
        except KvfsError as error:
            log.info("who else has blob %s is not known: %s", digest.hex(), error)
            return {}

    def _count(self, digest: bytes) -> int:
        """How often clients were sent elsewhere for a file, this time included."""
        count = self._counts[digest] = self._counts.pop(digest, 0) + 1
        if len(self._counts) > REFERRED_MAX:
            self._counts.popitem(last=False)
        return count


async def _ask(
    peer: PeerClient, ranges: Sequence[Range], found: dict[bytes, tuple[str, bytes]]
) -> None:
    """Add a peer's address and tickets to those that were found."""
    try:
        address, tickets = await trio.to_thread.run_sync(peer.tickets, ranges, REFERRAL_DEADLINE_S)
    except KvfsError as error:
        log.info("no tickets, so that the files are brought here: %s", error)
        return
    for wanted, ticket in zip(ranges, tickets, strict=True):
        if ticket is not None:
            found[wanted.digest] = str(address), ticket
