"""The sessions of a server: who may ask, in which order, and who goes when there are too many.

No clock and no socket in it: the caller says what time it is. A session is known by its route, the
channel that it came on; its owner is the public key of that channel, or the node's id where there
are no keys.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvfs.config import PeerLimits


@dataclass(slots=True)
class Session:
    """One channel that has said hello."""

    route: bytes
    owner: str
    node_id: bytes
    last_number: int  # of its requests
    last_s: float  # when it last asked
    unanswered: int = 0
    has_ended: bool = False  # what it asked before need not be answered

    def is_replay(self, number: int) -> bool:
        """Whether a request repeats or precedes one that was seen; if not, it is the last now."""
        if number <= self.last_number:
            return True
        self.last_number = number
        return False


class Sessions:
    """At most `sessions_max`, of one owner at most `sessions_per_peer_max`."""

    def __init__(self, limits: PeerLimits) -> None:
        self._limits = limits
        self._by_route: OrderedDict[bytes, Session] = OrderedDict()  # the longest idle first
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_route)

    def open(self, session: Session) -> bool:
        """Take a new session. When there are too many, the one that was idle for longest goes, of
        the same owner if it has its share; False when all are busy."""
        assert session.route not in self._by_route
        if self._owned[session.owner] >= self._limits.sessions_per_peer_max:
            oldest = self._oldest_idle(session.owner)
        elif len(self) >= self._limits.sessions_max:
            oldest = self._oldest_idle(None)
        else:
            return self._add(session)
        if oldest is None:
            return False
        self.end(oldest.route)
        return self._add(session)

    def get(self, route: bytes) -> Session | None:
        return self._by_route.get(route)

    def use(self, session: Session, now_s: float) -> None:
        """Note that it asked something."""
        session.last_s = now_s
        self._by_route.move_to_end(session.route)

    def end(self, route: bytes) -> None:
        """Forget a session; one that is gone is fine."""
        session = self._by_route.pop(route, None)
        if session is None:
            return
        session.has_ended = True
        self._owned[session.owner] -= 1
        if not self._owned[session.owner]:
            del self._owned[session.owner]

    def end_idle(self, now_s: float) -> int:
        """Forget those that asked nothing for `session_idle_s`; how many."""
        ended = 0
        for session in list(self._by_route.values()):
            if now_s - session.last_s < self._limits.session_idle_s:
                break
            if not session.unanswered:
                self.end(session.route)
                ended += 1
        return ended

    def _add(self, session: Session) -> bool:
        self._by_route[session.route] = session
        self._owned[session.owner] += 1
        return True

    def _oldest_idle(self, owner: str | None) -> Session | None:
        for session in self._by_route.values():
            if not session.unanswered and owner in (None, session.owner):
                return session
        return None
