"""One peer, as a node or an engine process asks it: sync, in as many threads as the caller has.

A call has a channel, and a stream for bytes, to itself; both are kept for the next one. Every wait
ends at the call's deadline, or when the peer moves nothing for `progress_s`. A peer that does so
costs one error; after that calls are refused at once, until the peer was left alone for a while and
answers again.

Digests are not checked here: whoever wants the bytes does that, in its own buffer.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvfs.config import PEER_BATCH_ITEMS_MAX, PEER_READ_BYTES_MAX, PeerLimits
from kvfs.errors import InvalidInput, Unavailable
from kvfs.peers.address import Address, parse_address
from kvfs.peers.backoff import Backoff
from kvfs.peers.channel import SHARED, Channel
from kvfs.peers.gone import PeerGone, PeerStalled, SessionEnded, TicketRefused
from kvfs.peers.keys import Keys, is_key
from kvfs.peers.messages import (
    NODE_ID_BYTES,
    Bytes,
    Done,
    Health,
    HealthWanted,
    Hints,
    Lookup,
    Range,
    Read,
    Reply,
    Request,
    Sizes,
    Tickets,
    TicketsWanted,
)
from kvfs.peers.pool import Pool
from kvfs.peers.stream import BulkStream

Want = tuple[bytes, int, memoryview]  # digest, offset, where the bytes go
_Reply = TypeVar("_Reply", Sizes, Tickets, Done, Health)
_Result = TypeVar("_Result")

_TICKETS_MAX = 256  # of one batch: what a server reads ahead
_BATCH_BYTES_MAX = 256 * 1024 * 1024  # so that its last ticket is used before it expires


@dataclass(frozen=True, slots=True)
class _Target:
    range: Range
    buffer: memoryview  # of bytes, the caller's


class PeerClient:
    """Asks one peer at `address`, `host:port`. With `keys` its channel is encrypted, and
    `server_key` is the public key that the peer must have.

    Blobs go through a plain stream beside the channel; with `encrypt_bulk` through the channel.
    Every call raises `Unavailable` when the peer does not serve it within `deadline_s`, and
    `InvalidInput` for what could never be asked. Buffers are written to until a call returns or
    raises, not later; they are then filled where the call says so, else of no use.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        server_key: str | None,
        node_id: bytes,
        cluster: str,
        *,
        encrypt_bulk: bool = False,
        limits: PeerLimits | None = None,
    ) -> None:
        self._address = parse_address(address)
        if not self._address.is_numeric:
            raise InvalidInput(address, "must have an IP address: to resolve a name may take long")
        if (keys is None) != (server_key is None):
            raise InvalidInput(address, "needs own keys and the peer's public key, or neither")
        if server_key is not None and not is_key(server_key):
            raise InvalidInput(address, "the peer's public key is none")
        if encrypt_bulk and keys is None:
            raise InvalidInput(address, "encrypt_bulk needs keys")
        if len(node_id) != NODE_ID_BYTES:
            raise InvalidInput("node id", f"must be {NODE_ID_BYTES} bytes")
        self._keys = (keys.pair, server_key) if keys is not None and server_key else None
        self._hello = (cluster, node_id)
        self._encrypts_bulk = encrypt_bulk
        self._limits = limits or PeerLimits()
        self._backoff = Backoff(self._limits)
        self._channels: Pool[Channel] = Pool(
            self._limits.channels_max, f"{self._address}: channels"
        )
        self._streams: Pool[BulkStream] = Pool(
            self._limits.streams_per_peer_max, f"{self._address}: bulk streams"
        )
        self._bulk_address = self._address  # as the last welcome said
        self._left = threading.Condition()
        self._callers = 0
        self._closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = SHARED.take()

    @property
    def address(self) -> str:
        """Where the peer is, for people."""
        return str(self._address)

    def sizes(self, digests: Sequence[bytes], deadline_s: float) -> list[int | None]:
        """The size of each blob that the peer has; None for the others."""
        sizes: list[int | None] = []
        with self._call(deadline_s) as end_s:
            for batch in _batches(digests):
                reply = self._ask(Lookup(batch), Sizes, end_s)
                self._check_count(reply.sizes, batch)
                sizes += reply.sizes
        return sizes

    def read_into(
        self,
        digest: bytes,
        offset: int,
        buffer: memoryview,
        deadline_s: float,
        silence_s: float | None = None,
    ) -> bool:
        """Fill a buffer from a place in a blob; False when the peer has it not, or not so long."""
        return self.read_many([(digest, offset, buffer)], deadline_s, silence_s)[0]

    def read_many(
        self, wants: Sequence[Want], deadline_s: float, silence_s: float | None = None
    ) -> list[bool]:
        """Fill many buffers in one go; which of them were. `silence_s`: after how long without a
        byte the peer counts as stalled, for who has others to ask; `progress_s` is the longest."""
        targets = [_target(*want) for want in wants]
        if not targets:
            return []
        progress_s = self._limits.progress_s
        silence_s = progress_s if silence_s is None else min(progress_s, silence_s)
        with self._call(deadline_s) as end_s:
            if self._encrypts_bulk:
                return self._read_inside(targets, end_s, silence_s)
            filled: list[bool] = []
            for batch in _ticket_batches(targets):
                filled += self._read_batch(batch, end_s, silence_s)
            return filled

    def tickets(
        self, ranges: Sequence[Range], deadline_s: float
    ) -> tuple[Address, list[bytes | None]]:
        """Tickets for at most `PEER_BATCH_ITEMS_MAX` ranges, for another process to use in its own
        stream to the address; None for what the peer has not."""
        with self._call(deadline_s) as end_s:
            tickets = self._ask(TicketsWanted(tuple(ranges)), Tickets, end_s).tickets
            self._check_count(tickets, ranges)
            return self._bulk_address, list(tickets)

    def hint(
        self, digests: Sequence[bytes], deadline_s: float, *, spare_only: bool = False
    ) -> None:
        """Tell the peer what it will probably be asked for soon; with `spare_only` for what room it
        has to spare."""
        with self._call(deadline_s) as end_s:
            for batch in _batches(digests):
                self._ask(Hints(batch, int(spare_only)), Done, end_s)

    def health(self, deadline_s: float) -> Health:
        """How the peer is."""
        with self._call(deadline_s) as end_s:
            return self._ask(HealthWanted(), Health, end_s)

    def close(self) -> None:
        """End the calls that wait in other threads, and every connection, and wait until those
        threads have left. The client is of no use afterwards; closing twice is fine."""
        self.abandon()
        with self._left:
            self._left.wait_for(lambda: not self._callers, self._limits.close_s)

    def abandon(self) -> None:
        """As `close`, for who may not wait: the last thread to leave gives back what is left."""
        with self._left:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake_fd, 1)
            self._channels.close()
            self._streams.close(abort=BulkStream.abort)
            if not self._callers:
                self._release()

    # A call ---------------------------------------------------------------------------------------
    @contextmanager
    def _call(self, deadline_s: float) -> Iterator[float]:
        """The frame of every call: gives its end, and remembers how the peer did."""
        with self._left:
            if self._closed:
                raise Unavailable(f"{self._address}: the client is closed")
            self._callers += 1
        try:
            with self._backoff.asking(self._address, deadline_s):
                yield time.monotonic() + deadline_s
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._left:
            self._callers -= 1
            if self._closed and not self._callers:
                self._release()
                self._left.notify_all()

    def _release(self) -> None:
        """The last of all to leave gives back what they shared."""
        os.close(self._wake_fd)
        SHARED.give_back(self._context)

    def _connect(self, end_s: float) -> Channel:
        channel = Channel(
            self._context,
            self._address,
            self._hello,
            self._keys,
            self._limits,
            self._wake_fd,
            end_s,
        )
        welcome = channel.welcome
        bulk_address = Address(welcome.bulk_host or self._address.host, welcome.bulk_port)
        if not bulk_address.is_numeric:
            channel.close()
            raise PeerGone(f"{self._address}: names no IP address for its bulk stream")
        self._bulk_address = bulk_address
        return channel

    def _on_channel(
        self, use: Callable[[Channel], _Result], end_s: float, silence_s: float
    ) -> _Result:
        """Use a channel. One that was kept may have been ended meanwhile: then a new one serves."""
        while True:
            channel, was_kept = self._channels.take(
                lambda: self._connect(_soon(end_s, silence_s)), end_s
            )
            try:
                result = use(channel)
            except (PeerGone, SessionEnded) as error:
                self._channels.drop(channel)
                self._channels.drop_idle()
                if was_kept and not isinstance(error, PeerStalled):
                    continue
                raise
            except BaseException:
                self._channels.drop(channel)
                raise
            self._channels.put(channel)
            return result

    def _ask(
        self, request: Request, kind: type[_Reply], end_s: float, silence_s: float | None = None
    ) -> _Reply:
        patience_s = self._limits.progress_s if silence_s is None else silence_s
        reply: Reply = self._on_channel(
            lambda channel: channel.ask(request, _soon(end_s, patience_s)), end_s, patience_s
        )
        if not isinstance(reply, kind):
            raise PeerGone(f"{self._address}: answers with a {type(reply).__name__}")
        return reply

    def _check_count(self, answers: Sequence[object], asked: Sequence[object]) -> None:
        if len(answers) != len(asked):
            raise PeerGone(f"{self._address}: {len(answers)} answers to {len(asked)} questions")

    # Bytes through the stream ---------------------------------------------------------------------
    def _read_batch(self, targets: Sequence[_Target], end_s: float, silence_s: float) -> list[bool]:
        """Fill buffers through one stream. One that was kept may have been ended meanwhile, and
        tickets have expired: then all is asked for again, once."""
        is_last = False
        while True:
            ranges = tuple(target.range for target in targets)
            tickets = self._ask(TicketsWanted(ranges), Tickets, end_s, silence_s).tickets
            self._check_count(tickets, targets)
            if not any(tickets):
                return [False] * len(targets)
            stream, was_kept = self._streams.take(
                lambda: BulkStream(self._bulk_address, silence_s, end_s), end_s
            )
            stream.progress_s = silence_s
            try:
                filled = _receive(stream, targets, tickets, end_s)
            except PeerGone as error:
                self._streams.drop(stream)
                self._streams.drop_idle()
                may_be_old = was_kept or isinstance(error, TicketRefused)
                if is_last or not may_be_old or isinstance(error, PeerStalled):
                    raise
                is_last = True
                continue
            except BaseException:
                self._streams.drop(stream)
                raise
            self._streams.put(stream)
            return filled

    # Bytes through the channel --------------------------------------------------------------------
    def _read_inside(
        self, targets: Sequence[_Target], end_s: float, silence_s: float
    ) -> list[bool]:
        return self._on_channel(
            lambda channel: self._read_on(channel, targets, end_s, silence_s), end_s, silence_s
        )

    def _read_on(
        self, channel: Channel, targets: Sequence[_Target], end_s: float, silence_s: float
    ) -> list[bool]:
        """Keep a window of reads under way; their answers come in any order."""
        filled = [True] * len(targets)
        pieces = _pieces(targets)
        waiting: dict[int, tuple[int, memoryview]] = {}

        def place(number: int) -> memoryview:
            return waiting[number][1] if number in waiting else memoryview(b"")

        while True:
            while len(waiting) < self._limits.read_window and (piece := next(pieces, None)):
                index, read, memory = piece
                if filled[index]:
                    waiting[channel.send(read)] = (index, memory)
            if not waiting:
                return filled
            number, reply = channel.receive(_soon(end_s, silence_s), place)
            if number not in waiting or not isinstance(reply, Bytes):
                raise PeerGone(f"{self._address}: its reply does not fit a request")
            index, _ = waiting.pop(number)
            if reply.length is None:
                filled[index] = False


def _soon(end_s: float, silence_s: float) -> float:
    """When who says nothing from now on counts as stalled."""
    return min(end_s, time.monotonic() + silence_s)


def _receive(
    stream: BulkStream, targets: Sequence[_Target], tickets: Sequence[bytes | None], end_s: float
) -> list[bool]:
    stream.send_tickets([ticket for ticket in tickets if ticket is not None], end_s)
    filled = []
    for target, ticket in zip(targets, tickets, strict=True):
        filled.append(ticket is not None and stream.receive_into(target.buffer, end_s))
    return filled


def _target(digest: bytes, offset: int, buffer: memoryview) -> _Target:
    """What is asked for, and where it goes. Raises `InvalidInput`."""
    if buffer.readonly or not buffer.c_contiguous or not buffer.nbytes:
        raise InvalidInput("buffer", "must be writable, in one piece, and not empty")
    return _Target(Range(digest, offset, buffer.nbytes), buffer.cast("B"))


def _batches(digests: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    for begin in range(0, len(digests), PEER_BATCH_ITEMS_MAX):
        yield tuple(digests[begin : begin + PEER_BATCH_ITEMS_MAX])


def _ticket_batches(targets: Sequence[_Target]) -> Iterator[list[_Target]]:
    batch: list[_Target] = []
    batch_bytes = 0
    for target in targets:
        length = target.range.length
        if batch and (len(batch) == _TICKETS_MAX or batch_bytes + length > _BATCH_BYTES_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(target)
        batch_bytes += length
    yield batch


def _pieces(targets: Sequence[_Target]) -> Iterator[tuple[int, Read, memoryview]]:
    """The reads that fill buffers: which target, what to ask, where it goes."""
    for index, target in enumerate(targets):
        wanted = target.range
        for begin in range(0, wanted.length, PEER_READ_BYTES_MAX):
            memory = target.buffer[begin : begin + PEER_READ_BYTES_MAX]
            yield index, Read(wanted.digest, wanted.offset + begin, len(memory)), memory
