"""Stages that are at hand when a file is made.

To make a file on a disk is a third of what a create takes, and whoever waits for a create writes
next: so a few empty stages are made meanwhile. They go when nobody has made a file for a while.
"""

import logging
import os
from collections import deque

import trio

from kvfs.errors import KvfsError
from kvfs.node import Node
from kvfs.stage import Stage

log = logging.getLogger(__name__)

_SPARES_MAX = 6
_SPARES_LOW = 2  # with fewer at hand, more are made
_IDLE_S = 1.0


class SpareStages:
    """Stages of a node that nobody has taken. `run` makes them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._spares: deque[Stage] = deque()
        self._was_asked = False  # since `run` looked
        self._wake = trio.Event()

    def take(self) -> Stage:
        """An empty stage, made now where none is at hand. Raises as `Node.stage`."""
        self._was_asked = True
        if len(self._spares) <= _SPARES_LOW:
            self._wake.set()
        while self._spares:
            stage = self._spares.popleft()
            if _is_fresh(stage.fd):
                return stage
            self._node.discard(stage)
        return self._node.stage()

    async def run(self) -> None:
        """Make what will be taken, for ever."""
        while True:
            with trio.move_on_after(_IDLE_S if self._spares else float("inf")) as idle:
                await self._wake.wait()
            self._wake = trio.Event()
            if not idle.cancelled_caught:
                self._fill()
            elif not self._was_asked:
                self.discard()
            self._was_asked = False

    def _fill(self) -> None:
        try:
            while len(self._spares) < _SPARES_MAX:
                self._spares.append(self._node.stage())
        except (KvfsError, OSError) as error:  # whoever needs one makes it, and is told
            log.debug("no stage was made ahead: %s", error)

    def discard(self) -> None:
        """Have none at hand any more."""
        while self._spares:
            self._node.discard(self._spares.popleft())


def _is_fresh(fd: int) -> bool:
    """Whether a stage can be as one that is made now: it has its name, and that time."""
    try:
        os.utime(fd)
        return os.fstat(fd).st_nlink > 0  # 0: somebody has emptied `staging`
    except OSError as error:  # a new one tells whoever needs it
        log.debug("a stage that was made ahead is not used: %s", error)
        return False
