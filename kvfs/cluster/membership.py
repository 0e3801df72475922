"""The other nodes, as this one knows them: who is there, and a connection to each."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import trio

from kvfs.config import CLUSTER_GONE_S, CLUSTER_LEASE_S, CLUSTER_RENEW_S
from kvfs.errors import Unavailable
from kvfs.meta.members import Endpoint, Member, Members
from kvfs.peers.client import PeerClient
from kvfs.replicate import Standing


class Membership:
    """Keeps this node's lease, and who else has one. In the node's thread; what waits for the
    network does it in others."""

    def __init__(
        self,
        members: Members,
        me: Member,
        served: dict[str, str],
        connect: Callable[[Member], PeerClient],
    ) -> None:
        """`served`: the public keys of the peers that the server of this node serves, and their
        stores; kept up to date. `connect` makes what asks a peer."""
        self._members = members
        self._served = served
        self._connect = connect
        self._clients: dict[Endpoint, PeerClient] = {}
        self._renewal = trio.Lock()
        self._thread = trio.CapacityLimiter(1)  # its own: a lease waits for no disk
        self._went_s: dict[bytes, float] = {}  # who is there no more, and since when
        self.me = me
        self.present: tuple[Member, ...] = (me,)
        self._others: dict[bytes, Member] = {}
        self._missed: dict[bytes, tuple[Member, float]] = {}  # and until when they may come back
        self._staying: dict[bytes, Member] = {}

    async def join(self) -> None:
        """Become a member; after the lease has ended that this node had before it died. Raises
        `Unavailable`."""
        end_s = trio.current_time() + 2 * CLUSTER_LEASE_S
        while True:
            try:
                await self.renew()
            except Unavailable:
                if trio.current_time() > end_s:
                    raise
            else:
                return
            await trio.sleep(CLUSTER_RENEW_S)

    async def renew(self) -> None:
        """Say that this node is there, and know who else is. Raises `Unavailable`."""
        async with self._renewal:
            listed = await trio.to_thread.run_sync(self._members.renew, limiter=self._thread)
            self._take(listed + self._find_missed(listed))

    def _find_missed(self, listed: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those who are not on the list and may still be there. When this node's own lease had
        ended, or the server lost all of them, it says nothing that others are not listed yet: they
        count for as long as a lease lasts."""
        now_s = trio.current_time()
        if self._members.was_away:
            until_s = now_s + CLUSTER_LEASE_S
            there_before = {node_id: (m, until_s) for node_id, m in self._others.items()}
            self._missed = there_before | self._missed  # who is missed longer counts no longer
        if self._missed:
            there = {member.node_id for member in listed}
            self._missed = {
                node_id: (member, until_s)
                for node_id, (member, until_s) in self._missed.items()
                if node_id not in there and now_s < until_s
            }
        return tuple(member for member, _ in self._missed.values())

    def _take(self, present: tuple[Member, ...]) -> None:
        """Know who is there: whom to serve, whom to ask."""
        if present == self.present:
            return
        now_s = trio.current_time()
        self._went_s |= {m.node_id: now_s for m in self.present if not m.is_leaving}
        for member in present:
            self._went_s.pop(member.node_id, None)
        self._went_s = {i: s for i, s in self._went_s.items() if now_s - s < CLUSTER_GONE_S}
        self.present = present
        self._others = {m.node_id: m for m in present if m.node_id != self.me.node_id}
        self._staying = {i: m for i, m in self._others.items() if not m.is_leaving}
        others = set(self._others.values())
        self._served.update({m.public_key: m.store for m in others if m.public_key})
        for key in self._served.keys() - {m.public_key for m in others}:
            del self._served[key]
        for endpoint in self._clients.keys() - {member.endpoint for member in others}:
            self._clients.pop(endpoint).abandon()

    def others(self) -> Mapping[bytes, Member]:
        """All but this node, by their ids."""
        return self._others

    def staying(self) -> Mapping[bytes, Member]:
        """Those of the others that are not leaving."""
        return self._staying

    def standing(self) -> Standing:
        """Who counts where copies are counted."""
        staying = {m.node_id for m in self.present if not m.is_leaving}
        if self.me.is_leaving:
            staying.discard(self.me.node_id)  # whatever the server was told until now
        now_s = trio.current_time()
        just_went = {i for i, s in self._went_s.items() if now_s - s < CLUSTER_GONE_S}
        return Standing(self.me.node_id, frozenset(staying), frozenset(staying | just_went))

    async def begin_leaving(self) -> None:
        """Tell all that nothing is to be put here any more. Raises `Unavailable`: then they will
        hear of it with the next renewal."""
        self.me = replace(self.me, is_leaving=True)
        self._members.describe(self.me)
        await self.renew()

    def client(self, member: Member) -> PeerClient:
        """What asks a peer; it lives as long as the peer is a member."""
        client = self._clients.get(member.endpoint)
        if client is None:
            client = self._clients[member.endpoint] = self._connect(member)
        return client

    def close(self) -> None:
        """End the connections, and the lease. Blocks. Raises `Unavailable`."""
        for client in self._clients.values():
            client.close()
        self._members.leave()
