"""The versions that are open, what their numbers show, and which of them names show no more.

A file gets a newer version, under a number of its own, when a writer comes while readers have it
open, or when another node changed it (`mount.states`). Its names show the new one from then on, and
who has the old one open keeps what it was.
"""

from collections.abc import Callable
from dataclasses import replace

from kvfs.meta.contract import Inode
from kvfs.node import Node
from mount.numbers import Numbers
from mount.stages import Version
from mount.states import State


class Versions:
    """Of one mount, by number. `expire_pages` has the kernel drop the pages of a number, some time
    soon."""

    def __init__(self, node: Node, expire_pages: Callable[[int], None]) -> None:
        self._node = node
        self._expire_pages = expire_pages
        self._versions: dict[int, Version] = {}
        self.numbers = Numbers(self._versions.__contains__)

    def get(self, number: int) -> Version | None:
        """The version of a number, if it is open."""
        return self._versions.get(number)

    def enter(self, version: Version, is_writer: bool) -> None:
        """Count one more open of a version, which may be the first."""
        self._versions[version.number] = version
        if is_writer:
            version.writers += 1
        else:
            version.readers += 1
        version.is_mixed |= version.readers > 0 and version.writers > 0
        self._node.hold(version.ino)

    def end(self, version: Version) -> None:
        """Nobody has a version open any more."""
        del self._versions[version.number]

    def has_other(self, ino: int) -> bool:
        """Whether any version of a file is open."""
        return any(version.ino == ino for version in self._versions.values())

    # What stat shows ------------------------------------------------------------------------------
    def inode(self, number: int) -> tuple[Inode, bool] | None:
        """An inode as a number shows it, and whether it is changing; None when it is gone."""
        version = self._versions.get(number)
        if version is not None and version.frozen is not None:
            return _with_stage(version.frozen, version), version.stage is not None
        if not self.numbers.is_current(number):
            return None
        inode = self._node.meta.inode(self.numbers.ino(number))
        if inode is None and version is not None and version.shown is not None:
            return replace(version.shown, nlink=0), False  # removed by another node
        return None if inode is None else self.overlay(inode)

    def overlay(self, inode: Inode) -> tuple[Inode, bool]:
        """An inode with what its stage adds, and whether it is changing."""
        version = self._versions.get(self.numbers.current(inode.ino))
        if version is not None and version.through is not None:
            through = version.through
            mark = size_bytes, changed_ns = through.mark()
            shown = replace(
                inode,
                size_bytes=size_bytes,
                mtime_ns=through.mtime_ns(mark),
                ctime_ns=max(inode.ctime_ns, changed_ns),
            )
            return shown, True
        if version is None or version.stage is None:
            return inode, not inode.is_published and inode.is_regular
        return _with_stage(inode, version), True

    def is_written(self, ino: int) -> bool:
        """Whether somebody has a file open for writing."""
        version = self._versions.get(self.numbers.current(ino))
        return version is not None and version.writers > 0

    # Newer versions -------------------------------------------------------------------------------
    def move(self, version: Version) -> None:
        """Give the file a new version, which its names show from now on."""
        inode = self._node.meta.inode(version.ino)
        if version.shown is not None and (inode is None or inode.digest != version.digest):
            inode = version.shown  # another node has removed the file, or given it new bytes
        assert inode is not None, "held by its readers"
        version.frozen = replace(inode, nlink=0)
        self.numbers.move(version.ino)

    def note_changed(self, ino: int) -> bool:
        """Another node has changed a file. Whether who has it open here keeps what it was, under a
        number that its names show no more."""
        version = self._versions.get(self.numbers.current(ino))
        return version is not None and self.follow(version)

    def follow(self, version: Version) -> bool:
        """See to it that an open of a file, which another node has changed, shows what there is
        now; whether who has this version open keeps it as an older one. Who has it open for
        writing, and has seen nothing of its bytes yet, gets those that are there now."""
        if self._is_overtaken(version):
            self.move(version)
            return True
        if self._node.neighbours is None or version.state is not State.WRITE:
            return False
        inode = self._node.meta.inode(version.ino)
        if inode is None or inode.nlink == 0 or inode.digest == version.digest:
            return False
        version.digest, version.shown = inode.digest, inode
        self._expire_pages(version.number)
        return False

    def _is_overtaken(self, version: Version) -> bool:
        """Whether another node has removed a file, or given it new bytes, that is read here; or
        its bytes do not come."""
        is_kept = version.state is State.READ or (
            version.state is State.WRITE and version.content is not None
        )
        if self._node.neighbours is None or not is_kept:
            return False
        if version.content is not None and version.content.has_failed:
            return True
        inode = self._node.meta.inode(version.ino)
        return inode is None or inode.digest != version.digest


def _with_stage(inode: Inode, version: Version) -> Inode:
    """An inode with what a version's stage adds."""
    if version.stage is None:
        return inode
    return replace(inode, size_bytes=version.size_bytes, mtime_ns=version.mtime_ns)
