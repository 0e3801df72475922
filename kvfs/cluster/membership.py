"""The other nodes, as this one knows them: who is there, and a connection to each."""

from collections.abc import Callable, Mapping

import trio

from kvfs.config import CLUSTER_LEASE_S, CLUSTER_RENEW_S
from kvfs.errors import Unavailable
from kvfs.meta.members import Member, Members
from kvfs.peers.client import PeerClient


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
        self._clients: dict[Member, PeerClient] = {}
        self._renewal = trio.Lock()
        self.me = me
        self.present: tuple[Member, ...] = (me,)
        self._others: dict[bytes, Member] = {}
        self._missed: dict[bytes, tuple[Member, float]] = {}  # and until when they may come back

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
            listed = await trio.to_thread.run_sync(self._members.renew)
            self._take(listed + self._find_missed(listed))

    def _find_missed(self, listed: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those who are not on the list and may still be there. When this node's own lease had
        ended, or the server lost all of them, it says nothing that others are not listed yet: they
        count for as long as a lease lasts."""
        now_s = trio.current_time()
        if self._members.was_away:
            until_s = now_s + CLUSTER_LEASE_S
            self._missed = {node_id: (m, until_s) for node_id, m in self._others.items()}
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
        self.present = present
        self._others = {m.node_id: m for m in present if m.node_id != self.me.node_id}
        others = set(self._others.values())
        self._served.update({m.public_key: m.store for m in others if m.public_key})
        for key in self._served.keys() - {m.public_key for m in others}:
            del self._served[key]
        for member in self._clients.keys() - others:
            self._clients.pop(member).abandon()

    def others(self) -> Mapping[bytes, Member]:
        """All but this node, by their ids."""
        return self._others

    def client(self, member: Member) -> PeerClient:
        """What asks a peer; it lives as long as the peer is a member."""
        client = self._clients.get(member)
        if client is None:
            client = self._clients[member] = self._connect(member)
        return client

    def close(self) -> None:
        """End the connections, and the lease. Blocks. Raises `Unavailable`."""
        for client in self._clients.values():
            client.close()
        self._members.leave()
