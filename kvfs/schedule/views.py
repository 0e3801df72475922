"""The schedule as people are shown it."""

from dataclasses import dataclass
from math import isinf

from kvfs.health import HealthState
from kvfs.schedule.board import Board


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier at one moment; counts are since it was first there."""

    tier: int
    is_present: bool
    health: HealthState
    reads: int  # under way, with those that were cancelled and have not ended
    late: int
    reads_wanted: int  # at the same time, for the best throughput
    bytes_per_s: float  # with so many
    latency_s: float
    jobs: int  # that may want something of it
    reads_ended: int
    bytes_read: int  # that were wanted
    hedges_won: int  # repeated reads that came first
    hedges_lost: int


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """All of it at one moment. `kept` counts what memory is used for."""

    tiers: tuple[TierView, ...]
    jobs: int
    unread_chunks: int
    unread_bytes: int
    reads: int
    buffers: int  # of the pool, that chunks may still take
    scratch: int | None  # reads that may still have memory of their own; None: no bound
    kept: int


def view_of(board: Board, now_ns: int) -> ScheduleView:
    """What there is to see."""
    tiers = tuple(
        TierView(
            tier=tier.number,
            is_present=tier.is_present,
            health=tier.health.state(now_ns),
            reads=len(tier.reads),
            late=tier.late,
            reads_wanted=tier.width.reads,
            bytes_per_s=tier.measured_rate() * 1e9,
            latency_s=tier.speed.latency_ns / 1e9,
            jobs=len(tier.jobs),
            reads_ended=tier.reads_ended,
            bytes_read=tier.bytes_read,
            hedges_won=tier.hedges_won,
            hedges_lost=tier.hedges_lost,
        )
        for tier in board.tiers.values()
    )
    kept = len(board.jobs) + len(board.reads) + len(board.holders) + len(board.hedgeable)
    kept += board.unread_count + board.unread_bytes
    kept += sum(len(tier.jobs) + len(tier.reads) + tier.users for tier in board.tiers.values())
    return ScheduleView(
        tiers,
        jobs=len(board.jobs),
        unread_chunks=board.unread_count,
        unread_bytes=board.unread_bytes,
        reads=len(board.reads),
        buffers=board.buffers,
        scratch=None if isinf(board.scratch) else int(board.scratch),
        kept=kept,
    )
