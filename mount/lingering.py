"""Files that lost their last name a moment ago.

On a local file system, who has looked a name up can open the file even if the name goes before the
open. Here look-up and open are two requests: a file that loses its last name through the mount is
kept until the kernel forgets it or its room is needed, at most for `LINGER_S`. In a cluster the
kernel of another node may be on its way, so that it is kept whatever this one's forgets.
"""

from collections import OrderedDict

import trio

from kvfs.config import LINGER_S, LINGERING_MAX
from kvfs.node import Node


class Lingering:
    """Holds on inodes, oldest first, with the time at which each ends."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._until: OrderedDict[int, float] = OrderedDict()
        self._wake = trio.Event()
        node.on_shortage(self.drop_all)

    def keep(self, ino: int) -> None:
        """Hold a file that has just lost its last name, or is about to."""
        if ino in self._until:
            self._until.move_to_end(ino)
        else:
            self._node.hold(ino)
        self._until[ino] = trio.current_time() + LINGER_S
        if len(self._until) > LINGERING_MAX:
            self.drop(next(iter(self._until)))
        self._wake.set()

    def drop(self, ino: int) -> None:
        """Let an inode go now, if it lingers."""
        if self._until.pop(ino, None) is not None:
            self._node.release(ino)

    def drop_all(self) -> None:
        """Let all go: the room is needed, or the mount ends."""
        while self._until:
            self.drop(next(iter(self._until)))

    async def run(self) -> None:
        """Let go of those whose time is over, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._until:
                ino, until_s = next(iter(self._until.items()))
                await trio.sleep_until(until_s)
                if self._until.get(ino, trio.current_time() + 1) <= trio.current_time():
                    self.drop(ino)
