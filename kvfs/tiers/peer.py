"""Another node as a tier. It cannot be written to: a node that is to have a blob fetches it.

A node asks its peers itself, with `kvfs.peers.client.PeerClient`. An engine has no keys: its own
node asks for tickets, and the engine reads by them with `kvfs.remote`, in streams of its own.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from kvfs.errors import TierStalled, TierTrouble, Unavailable
from kvfs.peers.address import Address
from kvfs.peers.gone import PeerStalled
from kvfs.peers.messages import Range
from kvfs.remote import RemoteReader
from kvfs.settings.words import TierKind, TierLimits
from kvfs.tiers.contract import Tier, check_time


class Peer(Protocol):
    """What is asked of a node: `PeerClient` and `ReferredPeer` have it."""

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]: ...

    def read_into(
        self, digest: bytes, offset: int, buffer: memoryview, deadline_s: float
    ) -> bool: ...


class Referrer(Protocol):
    """What gives tickets of a node: `PeerClient` again, or what asks a node for its own."""

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]: ...

    def tickets(
        self, ranges: Sequence[Range], deadline_s: float
    ) -> tuple[Address, list[bytes | None]]: ...


class ReferredPeer:
    """A node that is read by tickets. Buffers are written to until a call ends, not later."""

    def __init__(self, referrer: Referrer, reader: RemoteReader) -> None:
        """Both are their owner's to close."""
        self._referrer = referrer
        self._reader = reader

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]:
        return self._referrer.sizes(digests, deadline_s)

    def read_into(self, digest: bytes, offset: int, buffer: memoryview, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        wanted = [Range(digest, offset, len(buffer))]
        address, [ticket] = self._referrer.tickets(wanted, deadline_s)
        return ticket is not None and self._reader.read_range(str(address), ticket, buffer, end_s)


class PeerTier(Tier):
    """One node, by a client that its owner keeps, and closes."""

    def __init__(self, name: str, limits: TierLimits, peer: Peer) -> None:
        super().__init__(name, TierKind.PEER, limits)
        self._peer = peer

    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        try:
            return self._peer.read_into(digest, offset_bytes, buffer, check_time(end_s, self.name))
        except Unavailable as error:
            raise self._trouble(error, end_s) from error

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        try:
            return self._peer.sizes(digests, check_time(end_s, self.name))
        except Unavailable as error:
            raise self._trouble(error, end_s) from error

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        """The node checks what it has by itself, when it is asked for a blob."""
        return self._has([digest], end_s)[0] is not None

    def _trouble(self, error: Unavailable, end_s: float) -> TierTrouble:
        if isinstance(error, PeerStalled) or time.monotonic() >= end_s:
            return TierStalled(self.name, str(error))
        return TierTrouble(self.name, str(error))
