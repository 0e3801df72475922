"""Bytes from another node into a file here. Blocks: for worker threads.

They land in the file's own pages, without a copy in this process. Whoever waited for a call here
may go before it returns: the memory stays until the last view of it has gone.
"""

import mmap
import os

from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient


def map_file(fd: int, size_bytes: int) -> memoryview:
    """The pages of a new file, made that long, with room for all of it on its disk. OSError
    passes."""
    if size_bytes == 0:
        return memoryview(b"")
    os.ftruncate(fd, size_bytes)
    os.posix_fallocate(fd, 0, size_bytes)
    return memoryview(mmap.mmap(fd, size_bytes))


def read_range(
    holder: PeerClient,
    digest: bytes,
    offset: int,
    buffer: memoryview,
    deadline_s: float,
    silence_s: float | None,
) -> bool:
    """Fill a buffer from a place in a holder's blob; False when it does not do it, or nothing comes
    for `silence_s`."""
    try:
        return holder.read_into(digest, offset, buffer, deadline_s, silence_s)
    except Unavailable:  # its client knows, and refuses for a while
        return False
