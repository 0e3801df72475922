"""What a node counts since it started."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the node started."""

    lookups: int = 0
    lookup_hits: int = 0
    opens: int = 0
    open_misses: int = 0
    published_files: int = 0
    published_bytes: int = 0
    deduplicated_bytes: int = 0
    fetched_bytes: int = 0  # from other nodes
    hinted_files: int = 0  # fetched because another node asked for it
    evicted_files: int = 0
    evicted_bytes: int = 0
    corrupt_blobs: int = 0
    missing_blobs: int = 0
    unreadable_blobs: int = 0  # each time that one was asked for
