"""Which blob comes to this node's store next, before anybody asks for it: a pure state machine.

Whoever runs it tells it events and does what it answers, in order. It has no clock: events come
with the time.

**Order.** What an engine's waiting requests will read; what a person warms; the chunks that
continue one that was just read; the files that used to follow it. What is expected or warmed comes
in the order in which it was asked for, guesses the newest first: the moment of an old one has
passed.

**Idle sources only.** A blob is fetched from those of its sources that nobody else reads from. When
somebody does from all of them, it is cancelled: a guess is dropped, what is expected waits again.
What a person warms is begun and goes on all the same; there the schedule's idle priority alone
keeps it behind the readers. Nothing is cancelled that a reader waits for by now.

**Guesses cost nobody anything.** They wait until nobody has read for a moment: else they would run
beside their reader, who is about to ask for the same. They take room to spare, and have nothing
evicted.

**No loop.** Wants come from readers, engines and people alone. What is brought here makes none and
teaches nothing; a guess that was evicted unread is not made again until somebody reads the file.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from kvfs import config
from kvfs.prefetch.successors import Successors
from kvfs.prefetch.unread import Unread
from kvfs.prefetch.words import (
    Action,
    Asked,
    Cancel,
    Cause,
    Ended,
    Event,
    Files,
    Look,
    Promote,
    Read,
    Sweep,
    Tally,
    Used,
    Wanted,
)

_SPARE_DIGESTS = 4096  # kept beyond need, so that they are looked through seldom
_LIFE_S = {
    Cause.EXPECTED: config.PREFETCH_EXPECTED_S,
    Cause.WARM: float("inf"),
    Cause.CHILD: config.PREFETCH_GUESS_S,
    Cause.SUCCESSOR: config.PREFETCH_GUESS_S,
}


@dataclass(slots=True)
class _Waiting:
    blob: Wanted
    until_ns: float
    tries_left: int = config.PREFETCH_TRIES_MAX


@dataclass(slots=True)
class _UnderWay:
    waited: _Waiting
    cause: Cause
    sources: int
    is_cancelled: bool = False
    is_used: bool = False


class Prefetch:
    """See the module's docstring. `files` is asked within `handle`. `causes`: those that are not
    switched off."""

    def __init__(self, files: Files, causes: frozenset[Cause] = frozenset(Cause)) -> None:
        self.tallies = {cause: Tally() for cause in Cause}
        self._files = files
        self._causes = causes
        self._waiting: dict[Cause, OrderedDict[bytes, _Waiting]] = {c: OrderedDict() for c in Cause}
        self._under_way: dict[bytes, _UnderWay] = {}
        self._unread = Unread(self.tallies)
        self._successors = Successors()
        self._busy = 0
        self._quiet_ns = 0  # from then on guesses come
        self._digests: dict[int, bytes] = {}  # of files that wait, come, or were not read yet
        self._spare_bytes = 0

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What is to be done about an event."""
        match event:
            case Used():
                self._note_used(event.inos, now_ns)
                return []
            case Read():
                self._note_read(event, now_ns)
                return []  # others may follow, for which there is no need to guess then
            case Asked():
                self._ask(event.cause, event.blobs, now_ns)
            case Ended():
                self._end(event)
            case Look():
                self._busy, self._spare_bytes = event.busy, event.spare_bytes
            case Sweep():
                self._unread.sweep(self._files.is_here)
            case _:
                assert_never(event)
        return [*self._cancel(), *self._start(now_ns)]

    # What is shown --------------------------------------------------------------------------------
    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def under_way_count(self) -> int:
        return len(self._under_way)

    @property
    def under_way_bytes(self) -> int:
        return sum(one.waited.blob.size_bytes for one in self._under_way.values())

    @property
    def unread_count(self) -> int:
        """Blobs that were brought here, and that nobody has read yet."""
        return len(self._unread)

    def is_pending(self, digest: bytes) -> bool:
        """Whether a blob waits or is on its way."""
        return digest in self._under_way or any(digest in one for one in self._waiting.values())

    # What is wanted -------------------------------------------------------------------------------
    def _guess(self, read: Read, now_ns: int) -> None:
        children = self._files.children(read.ino, config.PREFETCH_CHILDREN_MAX + 1)
        if children is not None:
            if Cause.CHILD in self._causes:
                self._add_guesses(Cause.CHILD, self._descendants(children), now_ns)
        elif read.reader is not None and Cause.SUCCESSOR in self._causes:
            self._successors.note(read.ino, read.reader, read.at_ns)
            inos = self._successors.after(read.ino, config.PREFETCH_FOLLOWERS_MAX)
            self._add_guesses(Cause.SUCCESSOR, inos, now_ns)

    def _descendants(self, children: Sequence[int]) -> list[int]:
        """The chunks behind a chunk, nearest first, as far as it can be said which come next."""
        found = list(_few(children))
        for ino in found:  # which grows meanwhile
            if len(found) >= config.PREFETCH_DESCENDANTS_MAX:
                break
            more = self._files.children(ino, config.PREFETCH_CHILDREN_MAX + 1)
            found += (child for child in _few(more or ()) if child not in found)
        return found[: config.PREFETCH_DESCENDANTS_MAX]

    def _add_guesses(self, cause: Cause, inos: Sequence[int], now_ns: int) -> None:
        queue = self._waiting[cause]
        for blob in reversed(self._files.lacking(inos) if inos else ()):  # the first comes first
            self._unread.waste(blob.digest)  # else it would not be lacking
            if self._unread.is_wasted(blob.digest) or blob.size_bytes > config.PREFETCH_BYTES_MAX:
                continue
            is_wanted = any(blob.digest in self._waiting[other] for other in Cause if other < cause)
            if not is_wanted and blob.digest not in self._under_way:
                self._put(cause, blob, now_ns)
                queue.move_to_end(blob.digest, last=False)
        while len(queue) > config.PREFETCH_GUESSES_MAX:
            queue.popitem()
            self.tallies[cause].dropped += 1

    def _ask(self, cause: Cause, blobs: Sequence[Wanted], now_ns: int) -> None:
        """Note an order, also of what is on its way, which may fail."""
        assert not cause.is_guess
        for blob in blobs if cause in self._causes else ():
            self._unread.waste(blob.digest)
            if blob.digest in self._waiting[cause]:
                continue
            if len(self._waiting[cause]) < config.PREFETCH_ORDERS_MAX:
                self._put(cause, blob, now_ns)
            else:
                self.tallies[cause].dropped += 1

    def _put(self, cause: Cause, blob: Wanted, now_ns: int) -> None:
        """Have a blob wait; a less urgent guess of it is none any more."""
        for other, queue in self._waiting.items():
            if other.is_guess and other >= cause:
                queue.pop(blob.digest, None)
        self._waiting[cause][blob.digest] = _Waiting(blob, now_ns + _LIFE_S[cause] * 1e9)
        self._digests[blob.ino] = blob.digest
        if len(self._digests) > 2 * (self.waiting_count + len(self._unread)) + _SPARE_DIGESTS:
            self._forget_digests()

    def _forget_digests(self) -> None:
        """Keep those of files that are of interest still."""
        self._digests = {
            ino: digest
            for ino, digest in self._digests.items()
            if digest in self._unread or self.is_pending(digest)
        }

    def _drop_waiting(self, digest: bytes, kept: Cause | None = None) -> None:
        for cause, queue in self._waiting.items():
            if cause is not kept:
                queue.pop(digest, None)

    # What became of it ----------------------------------------------------------------------------
    def _note_used(self, inos: Sequence[int], now_ns: int) -> None:
        self._quiet_ns = now_ns + int(config.PREFETCH_SETTLE_S * 1e9)
        for ino in inos:
            digest = self._digests.get(ino)
            if digest is None:
                continue
            # The reader has it fetched, or reads it where it is: nobody is ahead of it any more.
            self._drop_waiting(digest, kept=Cause.WARM)
            under_way = self._under_way.get(digest)
            if under_way is not None:
                under_way.is_used = True
            self._unread.use(digest)

    def _note_read(self, read: Read, now_ns: int) -> None:
        self._unread.forgive(read.digest)
        for cause, queue in self._waiting.items():
            if cause.is_guess:
                queue.pop(read.digest, None)
        self._guess(read, now_ns)

    def _end(self, event: Ended) -> None:
        one = self._under_way.pop(event.digest)
        tally, size_bytes = self.tallies[one.cause], one.waited.blob.size_bytes
        if event.is_here:
            self._drop_waiting(event.digest)
            tally.arrived += 1
            tally.arrived_bytes += size_bytes
            if one.is_used:
                self._unread.count_used(one.cause, size_bytes)
            else:
                self._unread.add(event.digest, one.cause, size_bytes)
            return
        tally.cancelled += one.is_cancelled
        tally.failed += not one.is_cancelled
        is_over = one.cause.is_guess or (one.is_used and one.cause is not Cause.WARM)
        queue = self._waiting[one.cause]
        if not is_over and one.waited.tries_left and event.digest not in queue:
            queue[event.digest] = one.waited
            queue.move_to_end(event.digest, last=False)

    # What is done ---------------------------------------------------------------------------------
    def _cancel(self) -> list[Action]:
        """What comes only from sources that others read from by now, and that nobody waits for."""
        cancelled: list[Action] = []
        for digest, one in self._under_way.items():
            is_warmed = one.cause is Cause.WARM or digest in self._waiting[Cause.WARM]
            if one.is_cancelled or one.is_used or is_warmed:
                continue
            if not one.sources & ~self._busy:
                one.is_cancelled = True
                cancelled.append(Cancel(digest))
        return cancelled

    def _start(self, now_ns: int) -> list[Action]:
        started: list[Action] = []
        outstanding_bytes = self.under_way_bytes
        for cause in Cause:
            if cause.is_guess and now_ns < self._quiet_ns:
                break
            for waiting in self._first(cause, now_ns):
                blob = waiting.blob
                if len(self._under_way) >= config.PREFETCH_BLOBS_MAX:
                    return started
                if self._files.is_here(blob.digest):  # stored meanwhile, or fetched for a reader
                    self._drop_waiting(blob.digest)
                    continue
                sources = blob.sources & ~self._busy
                if cause is Cause.WARM:
                    sources = sources or blob.sources
                if not sources or blob.digest in self._under_way:
                    continue
                if cause.is_guess and blob.size_bytes > self._spare_bytes:
                    continue
                outstanding_bytes += blob.size_bytes
                if self._under_way and outstanding_bytes > config.PREFETCH_BYTES_MAX:
                    return started  # nothing overtakes it: a large one would wait for ever
                started.append(self._promote(cause, waiting, sources))
        return started

    def _first(self, cause: Cause, now_ns: int) -> list[_Waiting]:
        """Those of a cause that are looked at, without those whose time is over."""
        queue = self._waiting[cause]
        first = list(islice(queue.values(), config.PREFETCH_EXAMINED_MAX))
        for waiting in first:
            if waiting.until_ns < now_ns:
                del queue[waiting.blob.digest]
                self.tallies[cause].dropped += 1
        return [waiting for waiting in first if waiting.until_ns >= now_ns]

    def _promote(self, cause: Cause, waiting: _Waiting, sources: int) -> Promote:
        blob = waiting.blob
        del self._waiting[cause][blob.digest]
        waiting.tries_left -= 1
        self._under_way[blob.digest] = _UnderWay(waiting, cause, sources)
        self._spare_bytes -= blob.size_bytes
        self.tallies[cause].started += 1
        self.tallies[cause].started_bytes += blob.size_bytes
        return Promote(blob, sources, cause)


def _few(children: Sequence[int]) -> Sequence[int]:
    """None where there are many: that says nothing of which comes next."""
    return children if len(children) <= config.PREFETCH_CHILDREN_MAX else ()
