"""Bytes from another node into a file here, hashed on the way. Blocks: for worker threads."""

import mmap
import os
import time
from collections.abc import Sequence

import xxhash

from kvfs.config import CLUSTER_SILENCE_S, FETCH_PIECE_BYTES, FETCH_PIECES_MAX
from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient


def fetch_blob(
    holders: Sequence[PeerClient], digest: bytes, size_bytes: int, fd: int, deadline_s: float
) -> bool:
    """Fill a new file with a blob's bytes, from the first holder that has them whole; False when
    none has. Raises OSError when the file cannot take them.

    They land in the file's own pages, without a copy in this process.
    """
    os.ftruncate(fd, size_bytes)
    if size_bytes == 0:
        return True
    os.posix_fallocate(fd, 0, size_bytes)
    end_s = time.monotonic() + deadline_s
    with mmap.mmap(fd, size_bytes) as mapped, memoryview(mapped) as view:
        for holder in holders:
            silence_s = None if holder is holders[-1] else CLUSTER_SILENCE_S
            try:
                if _read(holder, digest, view, end_s, silence_s):
                    return True
            except Unavailable:
                continue  # its client knows, and refuses for a while
    return False


def _read(
    holder: PeerClient, digest: bytes, view: memoryview, end_s: float, silence_s: float | None
) -> bool:
    """Whether a holder gave all of the bytes, and they are right."""
    hasher = xxhash.xxh3_128()
    step = FETCH_PIECE_BYTES * FETCH_PIECES_MAX
    for start in range(0, len(view), step):
        part = view[start : start + step]
        pieces = [
            (digest, start + at, part[at : at + FETCH_PIECE_BYTES])
            for at in range(0, len(part), FETCH_PIECE_BYTES)
        ]
        if not all(holder.read_many(pieces, max(0.0, end_s - time.monotonic()), silence_s)):
            return False
        hasher.update(part)
    return hasher.digest() == digest
