"""What a client makes of a peer that does not serve it."""

from kvfs.errors import Unavailable


class PeerGone(Unavailable):
    """A peer is dead, overloaded or talks nonsense: leave it alone for a while."""


class PeerStalled(PeerGone):
    """A peer is connected and says nothing: another connection would fare no better."""


class TicketRefused(PeerGone):
    """A peer does not take a ticket that it gave, as when it has expired: a new one may do."""


class SessionEnded(Unavailable):
    """A peer has forgotten a channel, or restarted: a new channel may serve at once."""
