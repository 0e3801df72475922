"""Files of other nodes, straight into a client's memory: by the tickets that its own node got."""

import threading
import time
from collections import OrderedDict
from dataclasses import replace

from kvfs.config import REMOTE_NODES_MAX, REMOTE_PROGRESS_S, REMOTE_STREAMS_MAX, PeerLimits
from kvfs.peers.address import Address, parse_address
from kvfs.peers.backoff import Backoff
from kvfs.peers.pool import Pool
from kvfs.peers.stream import BulkStream

_LIMITS = replace(
    PeerLimits(), streams_per_peer_max=REMOTE_STREAMS_MAX, progress_s=REMOTE_PROGRESS_S
)


class RemoteReader:
    """Streams to other nodes, kept for the next file. Safe in several threads, each with a stream
    to itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[str, _Place] = OrderedDict()  # the last used at the right

    def read_range(self, address: str, ticket: bytes, view: memoryview, end_s: float) -> bool:
        """Fill `view` with the range that a ticket is for, which is used up, by `end_s` of the
        monotonic clock; False when the node has it not any more. Nothing is compared. Raises
        `Unavailable`; `view` is written to until this returns or raises, not later."""
        return self._place(address).read(ticket, view, end_s)

    def close(self) -> None:
        """End the streams; reads under way fail."""
        with self._lock:
            for place in self._places.values():
                place.close()

    def _place(self, address: str) -> "_Place":
        with self._lock:
            place = self._places.get(address)
            if place is None:
                place = self._places[address] = _Place(parse_address(address))
                if len(self._places) > REMOTE_NODES_MAX:
                    self._places.popitem(last=False)[1].close()
            self._places.move_to_end(address)
            return place


class _Place:
    """One node's stream address."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: Pool[BulkStream] = Pool(_LIMITS.streams_per_peer_max, f"{address}: streams")
        self._backoff = Backoff(_LIMITS)

    def read(self, ticket: bytes, view: memoryview, end_s: float) -> bool:
        with self._backoff.asking(self._address, max(0.0, end_s - time.monotonic())):
            return self._receive(ticket, view, end_s)

    def _receive(self, ticket: bytes, view: memoryview, end_s: float) -> bool:
        stream, _ = self._streams.take(
            lambda: BulkStream(self._address, _LIMITS.progress_s, end_s), end_s
        )
        try:
            stream.send_tickets([ticket], end_s)
            has_it = stream.receive_into(view, end_s)
        except BaseException:
            self._streams.drop(stream)
            raise
        self._streams.put(stream)
        return has_it

    def close(self) -> None:
        self._streams.close(abort=BulkStream.abort)
