"""Directories that were removed while somebody may have them open, or works in them.

Such a directory is empty for ever, and the kernel lets nothing be made in it. Its descriptors still
have a status, with no links, until the kernel forgets it.
"""

from collections import OrderedDict

from kvfs.meta.contract import Inode

_KEPT_MAX = 4096  # beyond, the oldest is ESTALE to who has it open


class RemovedDirectories:
    """What the kernel is still shown of directories that have gone."""

    def __init__(self) -> None:
        self._inodes: OrderedDict[int, Inode] = OrderedDict()

    def note(self, inode: Inode) -> None:
        """A directory was removed; what it was last, with no links."""
        assert inode.is_directory
        self._inodes[inode.ino] = inode
        if len(self._inodes) > _KEPT_MAX:
            self._inodes.popitem(last=False)

    def find(self, number: int) -> Inode | None:
        return self._inodes.get(number)

    def forget(self, number: int) -> None:
        """The kernel knows the number no more."""
        self._inodes.pop(number, None)
