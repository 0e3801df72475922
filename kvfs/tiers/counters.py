"""What a tier counts since it was opened."""

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Calls by how they ended. A call that failed by the tier's fault is in `failures` only."""

    reads: int = 0  # that gave their bytes
    read_bytes: int = 0
    read_s: float = 0.0  # that these took, of all callers together
    misses: int = 0  # reads of what is not here
    questions: int = 0  # has, capacity, scan
    puts: int = 0
    put_bytes: int = 0
    put_s: float = 0.0
    removes: int = 0
    failures: int = 0  # stalls among them
    stalls: int = 0  # calls that had not ended by their deadline
    refusals: int = 0  # calls that found no room below the limits, or the tier down
    corrupt: int = 0  # blobs that were found to have other bytes
    in_flight: int = 0  # reads, now
