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
        by_peer: defaultdict[PeerClient, list[Range]] = defaultdict(list)
        missing = [digest for digest, blob in zip(wanted, known, strict=True) if blob is None]
        self._location.learn(missing)
        for digest in missing:
            if peers := self._whom_to_ask(digest):
                by_peer[peers[0]].append(Range(digest, 0, wanted[digest]))
        referrals: dict[bytes, Referral] = {}
        async with trio.open_nursery() as nursery:
            for peer, ranges in by_peer.items():
                nursery.start_soon(_ask, peer, ranges, referrals)
        if self._copy_after:
            self._want([d for d in referrals if self._count(d) % self._copy_after == 0])
        return referrals

    def _whom_to_ask(self, digest: bytes) -> Sequence[PeerClient]:
        try:
            return self._location.whom_to_ask(digest)
        except KvfsError as error:
            log.info("who else has blob %s is not known: %s", digest.hex(), error)
            return ()

    def _count(self, digest: bytes) -> int:
        """How often clients were sent elsewhere for a file, this time included."""
        count = self._counts[digest] = self._counts.pop(digest, 0) + 1
        if len(self._counts) > REFERRED_MAX:
            self._counts.popitem(last=False)
        return count


async def _ask(peer: PeerClient, ranges: Sequence[Range], referrals: dict[bytes, Referral]) -> None:
    """Add a peer's tickets to the referrals."""
    try:
        address, tickets = await trio.to_thread.run_sync(peer.tickets, ranges, REFERRAL_DEADLINE_S)
    except KvfsError as error:
        log.info("no tickets, so that the files are brought here: %s", error)
        return
    for wanted, ticket in zip(ranges, tickets, strict=True):
        if ticket is not None:
            referrals[wanted.digest] = Referral(str(address), ticket)
