"""Files that were closed and are published a little later.

A digest costs close() a third of the time in which a file of 16 MiB is written into memory, and
more where it has to be read from a disk again. So a large file that the kernel wrote
(`mount.through`) is published when nobody begins or ends to write for a moment, when it waited for
`SETTLE_AGE_S`, or when somebody asks who sees published files only: a client on the node's socket,
`.kvfs/prefixes`, a writer that comes back. Until then it counts as open for writing once more, so
that it has its size, its names and its bytes for everyone in the mount, and `kvfs.kept` sees to it
that a crash loses nothing.

What waits is bounded: a close that finds no room among it publishes by itself. A file that cannot
be published waits on, and is tried again.
"""

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import trio

from kvfs.config import (
    SETTLE_AGE_S,
    SETTLE_BYTES_MAX,
    SETTLE_QUIET_S,
    SETTLE_RETRY_S,
    SETTLE_SEEN_S,
    SETTLE_WAIT_S,
)
from kvfs.errors import KvfsError, NamespaceError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A closed file."""

    ino: int
    size_bytes: int
    due_s: float  # at the latest
    is_awaited: bool = False
    not_before_s: float = 0.0  # after a failure
    problem: Exception | None = None
    tried: trio.Event = field(default_factory=trio.Event)


class Settling:
    """What waits. `publish(ino)` publishes a file, or raises what keeps it from that; `run` alone
    calls it. `note_end(ino)` hears of each file that does not wait any more."""

    def __init__(
        self, publish: Callable[[int], Awaitable[None]], note_end: Callable[[int], None]
    ) -> None:
        self._publish = publish
        self._note_end = note_end
        self._waiting: dict[int, _Waiting] = {}  # by inode, the oldest first
        self._bytes = 0
        self._current: _Waiting | None = None
        self._is_late = False  # somebody has waited for the current one in vain
        self._quiet_from_s = 0.0
        self._wake = trio.Event()
        self._look_s = math.inf  # when `run` looks, if nobody wakes it
        self._worker: trio.lowlevel.Task | None = None

    def __contains__(self, ino: int) -> bool:
        return ino in self._waiting

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    def note_writer(self) -> None:
        """Somebody began to write a file, or has closed one."""
        self._quiet_from_s = trio.current_time() + SETTLE_QUIET_S

    def room_bytes(self, ino: int) -> int:
        """How large a file may be that is to wait as well, or waits already."""
        waiting = self._waiting.get(ino)
        return SETTLE_BYTES_MAX - self._bytes + (0 if waiting is None else waiting.size_bytes)

    def put_off(self, ino: int, size_bytes: int) -> None:
        """Publish a file that was closed some time soon."""
        waiting = self._waiting.get(ino)
        if waiting is None:
            due_s = trio.current_time() + SETTLE_AGE_S
            waiting = self._waiting[ino] = _Waiting(ino, 0, due_s)
        self._bytes += size_bytes - waiting.size_bytes
        waiting.size_bytes = size_bytes
        self.note_writer()
        if self._at_s(waiting) < self._look_s:
            self._wake.set()

    def forget(self, ino: int) -> None:
        """A file has lost its last name, and need not be published any more."""
        waiting = self._waiting.get(ino)
        if waiting is not None and waiting is not self._current:
            self._end(waiting)

    async def settle(self, ino: int) -> None:
        """Return when a file does not wait any more. Raises what keeps it from being published,
        which is tried again before; ETIMEDOUT after `SETTLE_WAIT_S`."""
        waiting = self._await(ino)
        if waiting is None:
            return
        with trio.move_on_after(SETTLE_WAIT_S) as scope:
            await waiting.tried.wait()
        if scope.cancelled_caught:
            raise NamespaceError(errno.ETIMEDOUT)
        if ino in self._waiting and waiting.problem is not None:
            raise waiting.problem

    async def settle_all(self) -> None:
        """Return when what waits now was published, as far as it can be within `SETTLE_WAIT_S`."""
        await self._wait_tried(list(self._waiting), SETTLE_WAIT_S)

    async def settle_seen(self) -> None:
        """As `settle_all`, for who is to see what was closed: within `SETTLE_SEEN_S`. Only the
        first waits for a disk that hangs, and nobody for what has just failed; nor does a
        publication itself."""
        if self._is_late or trio.lowlevel.current_task() is self._worker:
            return
        now_s = trio.current_time()
        inos = [w.ino for w in self._waiting.values() if w.not_before_s <= now_s]
        if not await self._wait_tried(inos, SETTLE_SEEN_S):
            self._is_late = self._current is not None

    async def _wait_tried(self, inos: Sequence[int], wait_s: float) -> bool:
        """Whether each file was tried once more in time."""
        tried = [waiting.tried for ino in inos if (waiting := self._await(ino)) is not None]
        with trio.move_on_after(wait_s) as scope:
            for event in tried:
                await event.wait()
        return not scope.cancelled_caught

    def _await(self, ino: int) -> _Waiting | None:
        waiting = self._waiting.get(ino)
        if waiting is not None:
            waiting.is_awaited = True
            if waiting.tried.is_set():
                waiting.tried = trio.Event()
            self._wake.set()
        return waiting

    async def run(self) -> None:
        """Settle what has waited long enough, for ever."""
        self._worker = trio.lowlevel.current_task()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                waiting = min(self._waiting.values(), key=self._at_s)
                self._look_s = self._at_s(waiting)
                if self._look_s <= trio.current_time():
                    await self._try(waiting)
                    continue
                with trio.move_on_at(self._look_s):
                    await self._wake.wait()
                self._wake = trio.Event()
            self._look_s = math.inf

    def _at_s(self, waiting: _Waiting) -> float:
        """When a file is to be settled."""
        if waiting.is_awaited:
            return 0.0
        return max(min(self._quiet_from_s, waiting.due_s), waiting.not_before_s)

    async def _try(self, waiting: _Waiting) -> None:
        waiting.is_awaited = False
        self._current = waiting
        try:
            await self._publish(waiting.ino)
        except Exception as error:  # one file must not end the mount; whoever asks for it is told
            if waiting.problem is None:
                is_ours = not isinstance(error, (KvfsError, OSError))  # a bug: where it was
                text = "inode %d cannot be published yet: %s"
                log.error(text, waiting.ino, error, exc_info=is_ours)
            waiting.problem = error
            waiting.not_before_s = trio.current_time() + SETTLE_RETRY_S
            waiting.tried.set()
        else:
            self._end(waiting)
        finally:
            self._current = None
            self._is_late = False

    def _end(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.ino]
        self._bytes -= waiting.size_bytes
        waiting.tried.set()
        try:
            self._note_end(waiting.ino)
        except Exception:  # as above; what was to be published is
            log.exception("inode %d could not be let go", waiting.ino)

    def describe(self) -> dict[str, object]:
        """For `kvfs status`: what waits, and why it does still."""
        problems = [str(w.problem) for w in self._waiting.values() if w.problem is not None]
        return {
            "unsettled_files": len(self._waiting),
            "unsettled_bytes": self._bytes,
            "unsettled_why": problems[0] if problems else None,
        }
