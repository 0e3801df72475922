"""Inode numbers as the kernel knows them, and what they stand for.

A file's number is its inode in the metadata, until it gets a new version while the old one is being
read: then a number above `VERSION_BASE` is made for the new one. Such numbers are counted as FUSE
asks (each reply that names one is a look-up, FORGET takes them back), and go when the kernel has
forgotten them and no other version of the file is open; the file then has its own number again.
A file that shows as a symbolic link (`mount.links`) has one more number for that, above
`LINK_BASE`, since the kernel takes a number for one type. Numbers are never used twice in the life
of a mount.
"""

from collections.abc import Callable
from dataclasses import dataclass

LINK_BASE = 1 << 59
VERSION_BASE = 1 << 60
VIEW_BASE = 1 << 61


def link_of(ino: int) -> int:
    """The number under which an inode shows as a symbolic link to its blob."""
    return LINK_BASE + ino


def is_link(number: int) -> bool:
    """Whether a number is one of `link_of`."""
    return LINK_BASE <= number < VERSION_BASE


@dataclass(slots=True)
class _Made:
    ino: int
    lookups: int = 0


class Numbers:
    """Which number shows which inode. `is_open` tells whether a number has open handles."""

    def __init__(self, is_open: Callable[[int], bool]) -> None:
        self._is_open = is_open
        self._made: dict[int, _Made] = {}
        self._versions: dict[int, list[int]] = {}  # of an inode that has several, the current last
        self._last = VERSION_BASE

    def current(self, ino: int) -> int:
        """The number under which names show an inode."""
        versions = self._versions.get(ino)
        return versions[-1] if versions else ino

    def ino(self, number: int) -> int:
        """The inode that a number shows or showed. A made one that is forgotten is 0."""
        if number < VERSION_BASE:
            return number - LINK_BASE if is_link(number) else number
        made = self._made.get(number)
        return made.ino if made is not None else 0

    def is_current(self, number: int) -> bool:
        """Whether names show this number, not a newer version."""
        ino = self.ino(number)
        return ino != 0 and self.current(ino) == number

    def move(self, ino: int) -> int:
        """Make a new version's number for an inode and let its names show that."""
        self._last += 1
        self._made[self._last] = _Made(ino)
        self._versions.setdefault(ino, [ino]).append(self._last)
        return self._last

    def count(self, number: int) -> None:
        """Note that a reply names a number as a look-up does."""
        made = self._made.get(number)
        if made is not None:
            made.lookups += 1

    def forget(self, number: int, lookups: int) -> None:
        """Take look-ups back, as FORGET says."""
        made = self._made.get(number)
        if made is not None:
            made.lookups -= lookups
            self.settle(made.ino)

    def settle(self, ino: int) -> None:
        """Drop the numbers of an inode that nobody uses; call it when a version was closed."""
        versions = self._versions.get(ino)
        if versions is None:
            return
        older, newest = versions[1:-1], versions[-1]
        kept = [number for number in older if self._is_used(number)]
        if kept or self._is_used(newest) or self._is_open(ino):
            kept.append(newest)  # as long as an older one could be taken for it
        kept.insert(0, ino)
        for number in versions:
            if number not in kept:
                del self._made[number]
        if kept == [ino]:
            del self._versions[ino]
        else:
            self._versions[ino] = kept

    def _is_used(self, number: int) -> bool:
        return self._made[number].lookups > 0 or self._is_open(number)

    def __len__(self) -> int:
        return len(self._made)
