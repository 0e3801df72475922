"""Directories that were removed: shown until they are forgotten, in bounded memory."""

import stat

from kvfs.meta.contract import Inode
from mount import removed
from mount.removed import RemovedDirectories


def gone(ino: int) -> Inode:
    return Inode(ino, stat.S_IFDIR | 0o755, 0, 0, 0, 0, 1, 1, 1)


def test_a_removed_directory_is_known_until_it_is_forgotten() -> None:
    directories = RemovedDirectories()
    directories.note(gone(7))
    assert directories.find(7) == gone(7)
    assert directories.find(8) is None
    directories.forget(7)
    directories.forget(7)
    assert directories.find(7) is None


def test_the_oldest_go_when_there_are_too_many() -> None:
    directories = RemovedDirectories()
    for ino in range(removed._KEPT_MAX + 3):
        directories.note(gone(ino))
    assert directories.find(2) is None
    assert directories.find(3) is not None
