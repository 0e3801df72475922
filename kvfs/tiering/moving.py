"""One blob from a tier to another one. For worker threads."""

import os

from kvfs.config import TIER_PIECE_BYTES
from kvfs.file_io import allocate
from kvfs.tiering.opening import FILLED_BY_OTHERS
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.directory import DirectoryTier


def move_blob(source: WritableTier, target: WritableTier, digest: bytes, size_bytes: int) -> bool:
    """Have a blob in a tier that another one has, and still has afterwards; False when it has it
    not. Each step may take as long as its tier lets it. A blob of a tier that others fill is in
    memory meanwhile. Raises `Unavailable`, `Corrupt`, `OutOfSpace` and OSError."""
    if target.kind in FILLED_BY_OTHERS and target.has([digest]) == [size_bytes]:
        return True
    if isinstance(source, DirectoryTier) and source.kind not in FILLED_BY_OTHERS:
        fd = source.open_here(digest)
        if fd is None:
            return False
        try:
            target.put(digest, fd, size_bytes)
        finally:
            os.close(fd)
        return True
    memory = allocate(size_bytes)[:size_bytes]
    for begin in range(0, size_bytes, TIER_PIECE_BYTES):
        if not source.read_into(digest, begin, memory[begin : begin + TIER_PIECE_BYTES]):
            return False
    target.put(digest, memory, size_bytes)
    return True
