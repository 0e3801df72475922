"""Whole chunk files between descriptors and slots."""

import os

from kvfs.digest import digest_of
from kvfs.errors import Corrupt


def read_whole(fd: int, size_bytes: int, digest: bytes, memory: memoryview) -> memoryview:
    """Read a file into the start of `memory` (the caller's) and check it. Raises `Corrupt`."""
    target = memory[:size_bytes]
    done = 0
    while done < size_bytes and (count := os.preadv(fd, [target[done:]], done)):
        done += count
    if done < size_bytes:
        raise Corrupt(digest.hex(), f"has {done} bytes, not {size_bytes}")
    if digest_of(target) != digest:
        raise Corrupt(digest.hex(), "its bytes do not have this digest")
    return target


def write_whole(fd: int, memory: memoryview) -> None:
    """Write all of `memory` from the start of a file."""
    done = 0
    while done < len(memory):
        done += os.pwritev(fd, [memory[done:]], done)
