"""Leaving without loss: what only this node has goes to others first.

A node that is leaving says so with its lease. From then on nobody counts on its copies, it takes
none, and it moves each blob that no node that stays has: it asks the one with most room to fetch
it, and waits until that is known to have it. Passes over all that lies here go on until one finds
nothing to move, and then slowly, for what is written here meanwhile and for what could not be
moved. Nothing is deleted: a node that comes back has its files still.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from kvfs.cluster.membership import Membership
from kvfs.cluster.takers import Takers
from kvfs.config import (
    CLUSTER_FETCH_S,
    CLUSTER_LEASE_S,
    CLUSTER_SLOW_BYTES_S,
    COPIES_ASKED_PER_S,
    COPIES_STEP,
    COPIES_STEP_S,
    DRAIN_AGAIN_S,
    DRAIN_BYTES_MAX,
    DRAIN_FILES_MAX,
    DRAIN_LEFT_SHOWN,
    DRAIN_TICK_S,
    DRAIN_TRIES_MAX,
)
from kvfs.errors import KvfsError
from kvfs.meta.contract import Blob
from kvfs.meta.redis import RedisEngine
from kvfs.names import escape
from kvfs.open_blobs import OpenBlobs

_RETRY_S = 1.0  # after a failure of the metadata server
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Flight:
    """A blob that another node was asked to fetch."""

    blob: Blob
    path: bytes
    target: bytes = b""
    end_s: float = 0.0
    asked: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Tally:
    files: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.files += 1
        self.size_bytes += size_bytes


class Drain:
    """In the node's thread."""

    def __init__(
        self,
        engine: RedisEngine,
        membership: Membership,
        takers: Takers,
        open_blobs: OpenBlobs,
        directories: Sequence[object | None],
    ) -> None:
        """`directories` of the store; None: not there, with what lies in it."""
        self._engine = engine
        self._membership = membership
        self._takers = takers
        self._open_blobs = open_blobs
        self._directories = directories
        self._begun = trio.Event()
        self._changed = trio.Event()
        self._hurry = trio.Event()  # somebody waits until it is done
        self._is_done = False
        self._problem = ""
        self._moved = _Tally()
        self._found = _Tally()  # in this pass, to be moved
        self._left = _Tally()  # in this pass, that cannot be
        self._left_shown: list[dict[str, object]] = []
        self._flights: dict[bytes, _Flight] = {}
        self._again: list[_Flight] = []  # that came to nothing, for another node
        self._outbox: dict[bytes, list[bytes]] = {}

    def begin(self) -> None:
        """Leave; or look again at what is left, when it has begun already."""
        self._is_done = False
        self._begun.set()
        self._changed.set()
        self._hurry.set()

    def published(self) -> None:
        """Something was written here."""
        if self._begun.is_set():
            self._changed.set()

    def describe(self) -> dict[str, object]:
        """How far it is. `is_done`: a pass has found nothing only here but what is `left`."""
        under_way = max(0, self._found.size_bytes - self._left.size_bytes)
        return {
            "is_leaving": self._begun.is_set(),
            "is_done": self._is_done,
            "problem": self._problem,
            "moved_files": self._moved.files,
            "moved_bytes": self._moved.size_bytes,
            "to_move_bytes": 0 if self._is_done else under_way,
            "left_files": self._left.files,
            "left_bytes": self._left.size_bytes,
            "left": list(self._left_shown),
        }

    async def run(self) -> None:
        """Background task."""
        await self._begun.wait()
        await self._tell_all()
        log.info("leaving: what only this node has goes to others")
        while True:
            self._changed = trio.Event()
            moved_files = self._moved.files
            try:
                await self._move_all()
            except KvfsError as error:
                self._problem = str(error)
                await trio.sleep(_RETRY_S)
                continue
            self._problem = ""
            # What moved took its time, in which the only other copy of something may have gone.
            if self._moved.files == moved_files and not self._changed.is_set():
                self._is_done = True
                self._hurry = trio.Event()
                with trio.move_on_after(DRAIN_AGAIN_S):
                    await self._changed.wait()

    async def _tell_all(self) -> None:
        """Until every member has heard of it, one may still give up its copy of what is here."""
        while True:
            try:
                await self._membership.begin_leaving()
            except KvfsError as error:
                self._problem = str(error)
                await trio.sleep(_RETRY_S)
            else:
                break
        self._problem = ""
        await trio.sleep(CLUSTER_LEASE_S)

    # A pass over all that is here -----------------------------------------------------------------
    async def _move_all(self) -> None:
        found = _Tally()
        after = b""
        while blobs := self._engine.own_blobs(after, COPIES_STEP):
            after = blobs[-1].digest
            for blob in self._last_copies(blobs):
                found.add(blob.size_bytes)
            await self._pause()
        self._found, self._left = found, _Tally()
        self._left_shown.clear()
        self._end_flights()
        after = b""
        while blobs := self._engine.own_blobs(after, COPIES_STEP):
            after = blobs[-1].digest
            for blob in self._last_copies(blobs):
                while self._is_full():
                    await self._wait_arrivals()
                await self._begin(blob)
                await self._begin_again()
            await self._pause()
        while self._flights:
            await self._wait_arrivals()
            await self._begin_again()

    async def _pause(self) -> None:
        """Between two steps; for long, as the walk of `kvfs.cluster.copies`, once it was done: the
        node may go on for days."""
        nodes = len(self._membership.present)
        with trio.move_on_after(max(COPIES_STEP_S, COPIES_STEP * nodes / COPIES_ASKED_PER_S)):
            await self._hurry.wait()

    def _end_flights(self) -> None:
        """Nothing is known any more of what another pass began, and of who has room."""
        for flight in self._flights.values():
            self._takers.settle(flight.target, flight.blob.size_bytes)
        self._flights.clear()
        self._again.clear()
        self._outbox.clear()
        self._takers.forget_rooms()

    def _last_copies(self, blobs: list[Blob]) -> list[Blob]:
        """Those that no other node has that stays."""
        in_use = [blob for blob in blobs if blob.references]
        others = self._membership.staying().keys()
        found = self._engine.ask_copies([blob.digest for blob in in_use])
        return [blob for blob, ids in zip(in_use, found, strict=True) if not ids & others]

    def _is_full(self) -> bool:
        under_way = sum(flight.blob.size_bytes for flight in self._flights.values())
        return len(self._flights) >= DRAIN_FILES_MAX or under_way >= DRAIN_BYTES_MAX

    async def _begin(self, blob: Blob) -> None:
        held = self._engine.held_paths(blob.digest, (0, 0, b""), 1)
        if not held:  # removed, and open here still
            self._found.size_bytes -= blob.size_bytes
            return
        flight = _Flight(blob, held[0].path)
        if self._directories[blob.directory] is None:
            self._leave_behind(flight, "its directory is not there")
        elif blob.digest in self._open_blobs:
            self._leave_behind(flight, "it is still open for writing here")
        else:
            await self._send(flight)

    async def _begin_again(self) -> None:
        while self._again:
            await self._send(self._again.pop())

    async def _send(self, flight: _Flight) -> None:
        """Ask a node to fetch a blob that was not asked yet. Where none has room it may look so
        only because of what is under way."""
        blob = flight.blob
        target = await self._choose(flight)
        while target is None and self._flights:
            await self._wait_arrivals()
            self._takers.forget_rooms()
            target = await self._choose(flight)
        if target is None:
            self._leave_behind(flight, self._why_not(flight))
            return
        flight.target = target
        flight.asked.add(target)
        self._flights[blob.digest] = flight
        under_way = sum(other.blob.size_bytes for other in self._flights.values())
        flight.end_s = trio.current_time() + CLUSTER_FETCH_S + under_way / CLUSTER_SLOW_BYTES_S
        self._outbox.setdefault(target, []).append(blob.digest)

    async def _choose(self, flight: _Flight) -> bytes | None:
        if len(flight.asked) == DRAIN_TRIES_MAX:
            return None
        return await self._takers.roomiest(flight.blob.size_bytes, flight.asked)

    def _why_not(self, flight: _Flight) -> str:
        if not self._membership.staying():
            return "no other node is there"
        return "no other node took it" if flight.asked else "no other node has room for it"

    def _leave_behind(self, flight: _Flight, reason: str) -> None:
        self._left.add(flight.blob.size_bytes)
        if len(self._left_shown) < DRAIN_LEFT_SHOWN:
            self._left_shown.append(
                {
                    "path": "/" + escape(flight.path),
                    "size_bytes": flight.blob.size_bytes,
                    "reason": reason,
                }
            )

    async def _wait_arrivals(self) -> None:
        """Send what is to be said, wait a moment, and see what has arrived."""
        outbox, self._outbox = self._outbox, {}
        await self._takers.hint(outbox, spare_only=True)
        await trio.sleep(DRAIN_TICK_S)
        digests = list(self._flights)
        here = self._engine.blobs(digests)
        others = self._membership.staying().keys()
        found = self._engine.known_copies(digests)
        now_s = trio.current_time()
        for digest, blob, ids in zip(digests, here, found, strict=True):
            flight = self._flights[digest]
            is_over = now_s > flight.end_s or flight.target not in others
            if not (ids & others or blob is None or is_over):
                continue
            del self._flights[digest]
            self._takers.settle(flight.target, flight.blob.size_bytes)
            if ids & others:
                self._moved.add(flight.blob.size_bytes)
                self._found.size_bytes -= flight.blob.size_bytes
            elif blob is None:  # it was removed meanwhile
                self._found.size_bytes -= flight.blob.size_bytes
            else:
                self._again.append(flight)
