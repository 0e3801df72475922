"""Tickets for the bulk stream: each opens one range, once, for a short time.

Safe in several threads. A ticket is 32 random bytes; who holds it may read its range and nothing
else, so it is handed out over the authenticated channel only.
"""

import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfs.config import PeerLimits
from kvfs.peers.messages import TICKET_BYTES, Range


@dataclass(frozen=True, slots=True)
class _Given:
    range: Range
    session: bytes
    end_s: float


class TicketTable:
    """The tickets that were given and not yet used."""

    def __init__(self, limits: PeerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._given: OrderedDict[bytes, _Given] = OrderedDict()  # in the order in which they expire
        self._held: Counter[bytes] = Counter()  # by session

    def __len__(self) -> int:
        with self._lock:
            self._drop_expired()
            return len(self._given)

    def give(self, session: bytes, ranges: Sequence[Range]) -> list[bytes] | None:
        """A ticket for each range, to the holder of a session; None when it has too many unused
        ones, or all sessions together."""
        with self._lock:
            self._drop_expired()
            if self._held[session] + len(ranges) > self._limits.tickets_per_session_max:
                return None
            if len(self._given) + len(ranges) > self._limits.tickets_max:
                return None
            end_s = self._clock() + self._limits.ticket_life_s
            tickets = [secrets.token_bytes(TICKET_BYTES) for _ in ranges]
            for ticket, item in zip(tickets, ranges, strict=True):
                self._given[ticket] = _Given(item, session, end_s)
            self._held[session] += len(ranges)
            return tickets

    def take(self, ticket: bytes) -> Range | None:
        """The range of a ticket, which is used up by that; None for one that is none any more."""
        with self._lock:
            self._drop_expired()
            given = self._given.pop(ticket, None)
            if given is None:
                return None
            self._release(given.session)
            return given.range

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._given:
            ticket, given = next(iter(self._given.items()))
            if given.end_s > now_s:
                return
            del self._given[ticket]
            self._release(given.session)

    def _release(self, session: bytes) -> None:
        self._held[session] -= 1
        if not self._held[session]:
            del self._held[session]
