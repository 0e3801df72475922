"""What a server answers to a request: pure of sockets, asked on worker threads."""

import logging
import os
from collections.abc import Sequence

from kvfs.errors import InvalidInput, KvfsError
from kvfs.peers.messages import (
    Bytes,
    Code,
    Done,
    HealthWanted,
    Hello,
    Hints,
    Lookup,
    Range,
    Read,
    Refusal,
    Reply,
    Request,
    Sizes,
    Tickets,
    TicketsWanted,
    shortened,
)
from kvfs.peers.source import Source
from kvfs.peers.tickets import TicketTable

log = logging.getLogger(__name__)

Answer = tuple[Reply, bytes | None]  # the bytes follow as a part of their own


class Desk:
    """Asks the source. Safe in several threads, as the source is."""

    def __init__(self, source: Source, tickets: TicketTable | None) -> None:
        """`tickets` None: bytes do not leave the channel."""
        self._source = source
        self._tickets = tickets

    def answer(self, session: bytes, request: Request) -> Answer:
        """The reply to a request of a session; a source that fails is a refusal."""
        try:
            return self._answer(session, request)
        except InvalidInput as error:
            log.warning("what a peer was to be told breaks a rule: %s", error)
            return Refusal(Code.FAILED, shortened(str(error))), None
        except (KvfsError, OSError) as error:
            log.warning("a peer's request failed: %s", error)
            return Refusal(Code.FAILED, shortened(str(error))), None

    def _answer(self, session: bytes, request: Request) -> Answer:
        match request:
            case Lookup(digests):
                return Sizes(tuple(self._sizes(digests))), None
            case TicketsWanted(ranges):
                return self._give_tickets(session, ranges), None
            case Read(digest, offset, length):
                return self._read(digest, offset, length)
            case Hints(digests, spare_only):
                self._source.hinted(digests, spare_only=bool(spare_only))
                return Done(), None
            case HealthWanted():
                return self._source.health(), None
            case Hello():  # the session's own business
                raise AssertionError("hello is answered where sessions are kept")

    def _sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        sizes = self._source.sizes(digests)
        assert len(sizes) == len(digests)
        return sizes

    def _give_tickets(self, session: bytes, ranges: Sequence[Range]) -> Reply:
        if self._tickets is None:
            return Refusal(
                Code.FAILED, "this node's bytes are encrypted: set encrypt_bulk here too"
            )
        sizes = self._sizes([item.digest for item in ranges])
        is_here = [
            size is not None and item.offset + item.length <= size
            for item, size in zip(ranges, sizes, strict=True)
        ]
        found = [item for item, here in zip(ranges, is_here, strict=True) if here]
        tickets = self._tickets.give(session, found)
        if tickets is None:
            return Refusal(Code.BUSY, "too many tickets are unused")
        given = iter(tickets)
        return Tickets(tuple(next(given) if here else None for here in is_here))

    def _read(self, digest: bytes, offset: int, length: int) -> Answer:
        """A blob that cannot be read is not here: the others that a peer reads need not suffer."""
        try:
            data = self._read_range(digest, offset, length)
        except (KvfsError, OSError) as error:
            log.warning("a blob cannot be read for a peer: %s", error)
            data = b""
        return (Bytes(length), data) if len(data) == length else (Bytes(None), None)

    def _read_range(self, digest: bytes, offset: int, length: int) -> bytes:
        fd = self._source.open(digest)
        if fd is None:
            return b""
        try:
            if length < os.fstat(fd).st_size:
                self._source.check(digest)
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)
