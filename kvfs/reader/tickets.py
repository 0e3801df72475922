"""Tickets for what another node has, from one's own: a client has no keys to ask for them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from kvfs.client import Client
from kvfs.config import READER_TICKET_S, READER_TICKETS_KEPT_MAX
from kvfs.peers.address import Address, parse_address
from kvfs.peers.messages import Range

_Kept = tuple[Range, Address, bytes, float]  # for what, where, the ticket, until when


class NodeReferrer:
    """`kvfs.tiers.peer.Referrer` for one node. Thread-safe."""

    def __init__(self, node_id: bytes, client: Client) -> None:
        """The client is its owner's to close; what is asked of it may take as long as another node
        does, so no other call should wait behind it."""
        self._node_id = node_id
        self._client = client
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the oldest first

    def keep(self, wanted: Range, address: str, ticket: bytes) -> None:
        """A ticket that came unasked, for the first read of that range."""
        with self._lock:
            until_s = time.monotonic() + READER_TICKET_S
            self._kept[wanted.digest] = (wanted, parse_address(address), ticket, until_s)
            if len(self._kept) > READER_TICKETS_KEPT_MAX:
                self._kept.popitem(last=False)

    def tickets(
        self, ranges: Sequence[Range], deadline_s: float
    ) -> tuple[Address, list[bytes | None]]:
        """Raises `Unavailable`. `deadline_s` is the client's own: it knows how long its node
        waits."""
        if len(ranges) == 1 and (kept := self._take(ranges[0])) is not None:
            return kept
        wanted = [(item.digest, item.offset, item.length) for item in ranges]
        address, tickets = self._client.peer_tickets(self._node_id, wanted)
        return parse_address(address), tickets

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]:
        """Raises `Unavailable`; see `tickets`."""
        return self._client.peer_sizes(self._node_id, digests)

    def _take(self, wanted: Range) -> tuple[Address, list[bytes | None]] | None:
        with self._lock:
            kept = self._kept.get(wanted.digest)
            if kept is None or kept[0] != wanted:
                return None
            del self._kept[wanted.digest]
        _, address, ticket, until_s = kept
        return None if time.monotonic() > until_s else (address, [ticket])
