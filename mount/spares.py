"""Stages that are at hand when a file is made.

To make a file on a disk is a third of what a create takes, and whoever waits for a create writes
next: so a few empty stages are made meanwhile. They go when nobody has made a file for a while.

Where the files that were closed last are large, stages have blocks for as much as the smallest of
those. A write into blocks that are there takes a quarter less of a processor's time than one that
has to reserve them one by one. What a file does not need of them it keeps, so one that turns out
much smaller is published as a copy (`Stage.wastes_blocks`).
"""

import logging
import os
from collections import deque

import trio

from kvfs.config import MIB
from kvfs.errors import KvfsError
from kvfs.file_io import give_blocks
from kvfs.node import Node
from kvfs.stage import Stage

log = logging.getLogger(__name__)

_SPARES_MAX = 6
_SPARES_LOW = 2  # with fewer at hand, more are made
_IDLE_S = 1.0
_SIZES = 4  # so many files tell how large the next ones are
_AHEAD_BYTES_MIN = MIB
_AHEAD_BYTES_MAX = 64 * MIB
_HELD_SHARE = 64  # all spares together hold no more of what a directory may hold


class SpareStages:
    """Stages of a node that nobody has taken. `run` makes them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._spares: deque[Stage] = deque()
        self._sizes: deque[int] = deque(maxlen=_SIZES)
        self._without_blocks: set[int] = set()  # directories that can't give any
        self._was_asked = False  # since `run` looked
        self._wake = trio.Event()

    def take(self) -> Stage:
        """An empty stage, made now where none is at hand. Raises as `Node.stage`."""
        self._was_asked = True
        if len(self._spares) <= _SPARES_LOW:
            self._wake.set()
        expected_bytes = self._expected_bytes()
        while self._spares:
            stage = self._spares.popleft()
            if not stage.wastes_blocks(expected_bytes) and _is_fresh(stage.fd):
                return stage
            self._node.discard(stage)
        return self._node.stage()

    def note_closed(self, size_bytes: int) -> None:
        """A file of this size was written and closed."""
        self._sizes.append(size_bytes)

    def _expected_bytes(self) -> int:
        """What the next file will have at least, by what the last ones had; 0: nobody can tell."""
        smallest = min(self._sizes) if len(self._sizes) == _SIZES else 0
        return min(smallest, _AHEAD_BYTES_MAX) if smallest >= _AHEAD_BYTES_MIN else 0

    async def run(self) -> None:
        """Make what will be taken, for ever."""
        while True:
            with trio.move_on_after(_IDLE_S if self._spares else float("inf")) as idle:
                await self._wake.wait()
            self._wake = trio.Event()
            if not idle.cancelled_caught:
                await self._fill()
            elif not self._was_asked:
                self.discard()
            self._was_asked = False

    async def _fill(self) -> None:
        made: list[Stage] = []
        try:
            while len(self._spares) + len(made) < _SPARES_MAX:
                made.append(self._node.stage())
            await self._give_blocks(made, self._expected_bytes())
        except (KvfsError, OSError) as error:  # whoever needs one makes it, and is told
            log.debug("no stage was made ahead: %s", error)
        finally:
            self._spares.extend(made)

    async def _give_blocks(self, stages: list[Stage], size_bytes: int) -> None:
        """Have the disk set aside what will be written, where that is little of what it holds."""
        fits_ever, held_bytes = self._node.space.fits_ever, size_bytes * _SPARES_MAX
        chosen: list[Stage] = []
        for stage in stages if size_bytes else ():
            index = stage.directory
            if index not in self._without_blocks and fits_ever(index, held_bytes * _HELD_SHARE):
                await self._node.reserve(stage, size_bytes)
                stage.ahead_bytes = size_bytes
                chosen.append(stage)
        if not chosen:
            return
        own_fds = [os.dup(stage.fd) for stage in chosen]
        given = await trio.to_thread.run_sync(
            _give_blocks_and_close, own_fds, size_bytes, abandon_on_cancel=True
        )
        for stage, has_blocks in zip(chosen, given, strict=True):
            if not has_blocks:
                self._without_blocks.add(stage.directory)
                self._node.space.fit(stage, 0)
                stage.ahead_bytes = 0

    def discard(self) -> None:
        """Have none at hand any more."""
        while self._spares:
            self._node.discard(self._spares.popleft())


def _give_blocks_and_close(fds: list[int], size_bytes: int) -> list[bool]:
    """Whether each has them: file systems may have no way to give any."""
    try:
        return [give_blocks(fd, size_bytes) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def _is_fresh(fd: int) -> bool:
    """Whether a stage can be as one that is made now: it has its name, and that time."""
    try:
        os.utime(fd)
        return os.fstat(fd).st_nlink > 0  # 0: somebody has emptied `staging`
    except OSError as error:  # a new one tells whoever needs it
        log.debug("a stage that was made ahead is not used: %s", error)
        return False
