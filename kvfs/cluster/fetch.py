"""Bytes from another node into a file here. Blocks: for worker threads.

They land in the file's own pages (`file_io.map_file`), without a copy in this process. Whoever
waited for a call here may go before it returns: the memory stays until the last view of it has
gone.
"""

from kvfs.errors import Unavailable
from kvfs.peers.client import PeerClient


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
