"""A blob on its way here: from several holders at a time, hashed in order while it lands, and read
meanwhile.

`pieces` decides what is fetched next and what may be read. Everything here runs in the node's
thread; reading from a peer and hashing are done in worker threads, which write to and read from
pages that nobody else has.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import trio
import xxhash

from kvfs.cluster.fetch import read_range
from kvfs.cluster.pieces import Pieces, Run, Want
from kvfs.config import (
    CLUSTER_HOLDER_WAIT_S,
    CLUSTER_READ_S,
    CLUSTER_RENEW_S,
    CLUSTER_SILENCE_S,
    FETCH_PIECE_BYTES,
    FETCH_RUN_PIECES,
    FETCH_RUN_S,
    FETCH_RUN_WANTED_S,
    FETCH_RUNS_MAX,
    FETCH_TRIES_MAX,
    FETCH_WHOLE_BYTES,
    MIB,
)
from kvfs.errors import Unavailable
from kvfs.file_io import map_file
from kvfs.peers.client import PeerClient

_HASH_BYTES_MAX = 64 * MIB  # in one go
_HASH_INLINE_BYTES_MAX = 256 * 1024  # what takes less than a hop to a thread
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ways:
    """How a node reaches others, for all of its fetches."""

    whom_to_ask: Callable[[bytes], Sequence[PeerClient]]  # for a digest, as far as is known
    ask_again: Callable[[], Awaitable[None]]  # know anew who has what, and who is there
    threads: trio.CapacityLimiter  # that read from peers
    hashing: trio.CapacityLimiter


class Arrival:
    """`kvfs.arriving.Arriving` of one blob, from its first byte on its way to its end. Whoever
    makes one calls `fill` once, and then `end`."""

    def __init__(
        self, digest: bytes, size_bytes: int, ways: Ways, doubted: set[PeerClient] | None
    ) -> None:
        """`doubted`: nodes that have given wrong bytes for the digest, which are not asked; None
        when no node has."""
        self.digest = digest
        self.size_bytes = size_bytes
        self._ways = ways
        self.doubted = set() if doubted is None else doubted
        # A small one in one go: its holder need not read it first to give parts of it.
        is_small = 0 < size_bytes <= FETCH_WHOLE_BYTES
        self._pieces = Pieces(size_bytes, size_bytes if is_small else FETCH_PIECE_BYTES)
        self._waiting: dict[Want, trio.Event] = {}
        self._changed = trio.Event()
        self._begun = trio.Event()
        self._ended = trio.Event()
        self._fd = -1
        self._view = memoryview(b"")
        self._is_shown = False  # a reader has, or may have, bytes that were not checked
        self.was_wrong = False  # it ended with wrong bytes
        # One holder gives all, so that wrong bytes are known to be its own.
        self._is_alone = doubted is not None
        self._search = trio.Lock()
        self._holders: list[PeerClient] = []
        self._has_asked = False
        self._busy: Counter[PeerClient] = Counter()  # runs under way
        self._failed: set[PeerClient] = set()  # who did not give what they were asked for
        self._givers: set[PeerClient] = set()
        self._unfit_since_s: float | None = None  # that nobody gives what he is asked for

    # For readers ----------------------------------------------------------------------------------
    @property
    def is_whole(self) -> bool:
        return self._pieces.is_confirmed

    @property
    def has_failed(self) -> bool:
        return self._pieces.is_given_up

    def open(self) -> int:
        if self._fd < 0:
            raise Unavailable(f"blob {self.digest.hex()} does not come")
        return os.dup(self._fd)

    async def wait(self, begin: int, end: int) -> None:
        self._is_shown = True
        if self._pieces.shows(begin, end):
            return
        if not self.has_failed:
            want = self._pieces.want(begin, end)
            self._waiting[want] = trio.Event()
            self._change()
            try:
                with trio.move_on_after(CLUSTER_READ_S):
                    await self._waiting[want].wait()
            finally:
                self._pieces.forget(want)
                del self._waiting[want]
            if want.is_here:
                return
        raise Unavailable(f"blob {self.digest.hex()}: its bytes do not come from any node")

    @property
    def has_ended(self) -> bool:
        """Whether it is a copy here, or is none and will be none."""
        return self._ended.is_set()

    async def wait_begun(self) -> None:
        """Return when the first bytes are here, or the end is."""
        await self._begun.wait()

    async def wait_ended(self) -> None:
        """Return when `has_ended`."""
        await self._ended.wait()

    # For who fetches ------------------------------------------------------------------------------
    async def fill(self, fd: int) -> bool:
        """Fetch all bytes into a new file, which stays the caller's and is needed until `end`;
        whether they are right. OSError passes."""
        self._view = await trio.to_thread.run_sync(map_file, fd, self.size_bytes)
        self._fd = fd
        for _ in range(FETCH_TRIES_MAX):
            if not await self._fetch_all():
                return False
            if await self._is_right():
                self.was_wrong = False
                self._tell(self._pieces.confirm())
                return True
            self.was_wrong = True
            if self._is_shown:  # those who were must be told
                return False
            self._pieces.start_over()
        return False

    def end(self) -> None:
        """It is a copy, or will be none: tell all who wait, once. The file is the caller's
        again."""
        if not self.is_whole and not self.has_failed:
            self._tell(self._pieces.give_up())
        self._fd, self._view = -1, memoryview(b"")
        self._begun.set()
        self._ended.set()

    def _tell(self, wants: Iterable[Want]) -> None:
        for want in wants:
            self._waiting[want].set()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _fetch_all(self) -> bool:
        """Have everything land, and be hashed; False when nobody gives it."""
        self._hasher = xxhash.xxh3_128()
        self._givers.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hash_in_order)
            for _ in range(1 if self._is_alone else FETCH_RUNS_MAX):
                nursery.start_soon(self._pull, nursery.cancel_scope)
        return self._pieces.has_landed

    async def _hash_in_order(self) -> None:
        done = 0
        while done < self.size_bytes:
            end = min(self._pieces.prefix_bytes, done + _HASH_BYTES_MAX)
            part = self._view[done:end]
            if not part:
                await self._changed.wait()
            elif len(part) <= _HASH_INLINE_BYTES_MAX:
                self._hasher.update(part)
            else:
                await trio.to_thread.run_sync(
                    self._hasher.update, part, abandon_on_cancel=True, limiter=self._ways.hashing
                )
            done = end

    async def _pull(self, all_pulls: trio.CancelScope) -> None:
        """Fetch runs until all have landed, or end all pulls when nobody gives the rest."""
        pieces_max = FETCH_RUN_PIECES
        while not self._pieces.has_landed:
            holder = await self._choose()
            if holder is None:
                if not self._pieces.has_landed:
                    all_pulls.cancel()
                return
            run = self._pieces.take(pieces_max)
            if run is None:
                if not self._pieces.has_landed:
                    await self._changed.wait()
                continue
            began_s = trio.current_time()
            try:
                is_here = await self._fetch(holder, run)
            except BaseException:
                self._pieces.fail(run)
                raise
            if is_here:
                self._givers.add(holder)
                self._unfit_since_s = None
                spent_s = trio.current_time() - began_s
                pieces_max = _pieces_in(FETCH_RUN_WANTED_S, run, spent_s)
                self._tell(self._pieces.land(run))
                self._begun.set()
            else:
                self._failed.add(holder)
                self._pieces.fail(run)
            self._change()

    async def _fetch(self, holder: PeerClient, run: Run) -> bool:
        """Have a holder put a run's bytes in their place; whether it did."""
        has_others = any(one is not holder for one in self._fit())
        self._busy[holder] += 1
        try:
            return await trio.to_thread.run_sync(
                read_range,
                holder,
                self.digest,
                run.begin,
                self._view[run.begin : run.end],
                FETCH_RUN_S,
                CLUSTER_SILENCE_S if has_others else None,
                abandon_on_cancel=True,  # nothing is read from these pages then
                limiter=self._ways.threads,
            )
        finally:
            self._busy[holder] -= 1

    async def _choose(self) -> PeerClient | None:
        """The least busy of the holders that give what they are asked for. When there is none,
        those are asked once more that are there then, for a while; None after that."""
        async with self._search:
            while True:
                if found := self._fit():
                    return min(found, key=self._burden)
                is_first, self._has_asked = not self._has_asked, True
                if not is_first:
                    # Who has joined just now may not be known yet, here or to who has the bytes.
                    await self._ways.ask_again()
                self._holders = list(self._ways.whom_to_ask(self.digest))
                random.shuffle(self._holders)
                if is_first or self._fit():
                    continue
                now_s = trio.current_time()
                if self._unfit_since_s is None:
                    self._unfit_since_s = now_s
                is_over = now_s - self._unfit_since_s > CLUSTER_HOLDER_WAIT_S
                if (is_over or not self._holders) and not self._busy.total():
                    return None
                await trio.sleep(CLUSTER_RENEW_S / 2)
                self._failed.clear()

    def _fit(self) -> list[PeerClient]:
        """The holders that give what they are asked for, as far as is known."""
        unfit = self._failed | self.doubted
        return [holder for holder in self._holders if holder not in unfit]

    def _burden(self, holder: PeerClient) -> tuple[bool, int]:
        is_new = self._is_alone and bool(self._givers) and holder not in self._givers
        return is_new, self._busy[holder]

    async def _is_right(self) -> bool:
        """Whether what has landed is the blob. Where it is not, who is known to have given wrong
        bytes is not asked again."""
        if self._hasher.digest() == self.digest:
            return True
        if len(self._givers) == 1:
            self.doubted |= self._givers
        shown = ", ".join(sorted(giver.address for giver in self._givers))
        log.warning("blob %s: wrong bytes from %s", self.digest.hex(), shown)
        self._is_alone = True
        return False


def _pieces_in(wanted_s: float, run: Run, spent_s: float) -> int:
    """How many pieces come in a time, after a run took so long; one that is long keeps a reader
    who wants another piece waiting."""
    if spent_s <= wanted_s:
        return FETCH_RUN_PIECES
    pieces = int(run.size_bytes / FETCH_PIECE_BYTES * wanted_s / spent_s)
    return max(1, min(FETCH_RUN_PIECES, pieces))
