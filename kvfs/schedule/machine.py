"""The pull scheduler: which tier reads which chunk of which job next, as a pure state machine.

Whoever runs it tells it events and does what it answers, in order. It has no clock: events carry
the time; no threads: one caller at a time. Every tier pulls: when a slot is free, it takes the next
unread chunk that it holds, by the rules in `choice`.

**Order among jobs.** A job's place is `arrival + STRETCH * (its bytes / the bandwidth of all tiers)
- priority * PRIORITY_S`, fixed when it comes; the least is first. So jobs of the same size are
served as they come; a short one overtakes a long one that has not waited for long; and of the same
priority nothing overtakes a job that comes later than STRETCH times the job's own time after it
(PRIORITY_S more for each step of priority). So what a job waits for is bounded, and ends. Idle jobs
are behind all others, and wait as long as there are any.

**Failures.** A range whose read failed is read elsewhere; a tier that does not have a chunk, or has
it wrong, is not asked for it again; one that failed is asked again when all have, until so many
reads of the chunk have failed. A chunk is lost when no tier that is there, and not down, may give
it. Reads that stall are given up; tiers go down and come back by `kvfs.health`.
"""

from typing import assert_never

from kvfs import config
from kvfs.errors import QueueFull
from kvfs.schedule.board import Board
from kvfs.schedule.flight import Flight
from kvfs.schedule.jobs import Job
from kvfs.schedule.slots import Slots
from kvfs.schedule.tiers import Tier
from kvfs.schedule.views import ScheduleView, view_of
from kvfs.schedule.words import (
    Action,
    ChunkChecked,
    Event,
    JobAdded,
    JobCancelled,
    JobEnded,
    MemoryFreed,
    ReadEnded,
    Tick,
    TierDown,
    TierTerms,
    TierUp,
)


class Schedule:
    """One engine's jobs over its tiers."""

    __slots__ = ("_board", "_flight", "_now_ns", "_sequence", "_slots")

    def __init__(self, scratch: int | None = None) -> None:
        """`scratch`: reads at the same time that may have memory of their own, as `MemoryFreed`
        counts them; None: there is always enough. Of the pool's buffers there are none at first."""
        self._board = Board(scratch)
        self._slots = Slots(self._board)
        self._flight = Flight(self._board, self._slots)
        self._now_ns = 0
        self._sequence = 0

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What is to be done about an event. Times do not go back: an earlier one counts as the
        latest. Raises `QueueFull` for a job or tier too many; nothing is changed then."""
        if now_ns < self._now_ns:
            now_ns = self._now_ns
        self._now_ns = now_ns
        flight = self._flight
        match event:
            case ReadEnded():  # nearly all are: it comes first
                flight.end_read(event.read, event.outcome, now_ns)
            case Tick():
                pass
            case JobAdded():
                self._add_job(event, now_ns)
            case ChunkChecked():
                flight.checked(event.job, event.chunk, event.outcome, now_ns)
            case JobCancelled():
                job = self._board.jobs.get(event.job)
                if job is not None:
                    flight.cancel_job(job)
            case TierUp():
                self._tier_up(event.tier, event.terms)
            case MemoryFreed():
                self._slots.give_memory(event.buffers, event.scratch, now_ns)
            case TierDown():
                tier = self._board.tiers.get(event.tier)
                if tier is not None and tier.is_present:
                    tier.is_present = False
                    flight.take_down(tier, now_ns)
            case _:
                assert_never(event)
        if self._slots.timers.first_ns <= now_ns:
            flight.look_at_timers(now_ns)
        self._slots.fill(now_ns)
        return self._slots.take_actions()

    @property
    def wake_ns(self) -> int | None:
        """When `Tick` is due, if nothing happens before; None while there is nothing to wait
        for."""
        return self._slots.timers.next_ns()

    @property
    def is_empty(self) -> bool:
        """No job, no read."""
        return not self._board.jobs and not self._board.reads

    def view(self) -> ScheduleView:
        """What people are shown."""
        return view_of(self._board, self._now_ns)

    # Jobs -----------------------------------------------------------------------------------------
    def _add_job(self, event: JobAdded, now_ns: int) -> None:
        board = self._board
        assert event.job not in board.jobs, "a job's number is its own"
        if len(board.jobs) >= config.SCHEDULE_JOBS_MAX:
            raise QueueFull("jobs of the schedule", 1, 0)
        room = config.SCHEDULE_CHUNKS_MAX - board.unread_count
        if len(event.chunks) > room:
            raise QueueFull("chunks of the schedule", len(event.chunks), room)
        if not event.chunks:
            self._slots.actions.append(JobEnded(event.job, ()))
            return
        assert all(chunk.size_bytes > 0 for chunk in event.chunks), "an empty chunk needs no read"
        self._sequence += 1
        sets = {tiers: board.holders_of(tiers) for tiers in {c.tiers for c in event.chunks}}
        holders = [sets[chunk.tiers] for chunk in event.chunks]
        is_idle = event.priority == config.SCHEDULE_PRIORITY_IDLE
        size_bytes = sum(chunk.size_bytes for chunk in event.chunks)
        order = (self._order(size_bytes, event.priority, now_ns), self._sequence)
        is_pooled = event.is_pooled
        job = Job(event.job, order, event.chunks, holders, is_idle=is_idle, is_pooled=is_pooled)
        board.add_job(job)
        self._flight.lose_unreadable(job, now_ns)
        if event.job in board.jobs:
            size_bytes = event.chunks[0].size_bytes
            self._slots.ask_fastest(job.tiers, size_bytes, config.SCHEDULE_TIERS_MAX, now_ns)

    def _order(self, size_bytes: int, priority: int, now_ns: int) -> float:
        if priority == config.SCHEDULE_PRIORITY_IDLE:
            return now_ns + 1e24  # behind any time that a clock will show
        assert abs(priority) <= config.SCHEDULE_PRIORITY_MAX
        rate = self._board.rate or config.SCHEDULE_BYTES_PER_S / 1e9
        alone_ns = size_bytes / rate
        grace_ns = priority * config.SCHEDULE_PRIORITY_S * 1e9
        return now_ns + config.SCHEDULE_STRETCH * alone_ns - grace_ns

    # Tiers ----------------------------------------------------------------------------------------
    def _tier_up(self, number: int, terms: TierTerms) -> None:
        board = self._board
        tier = board.tiers.get(number)
        if tier is None:
            self._make_room_for_tier()
            tier = board.tiers[number] = Tier(number, terms)
        elif tier.terms.reads_max != terms.reads_max:
            tier.width.limit(terms.reads_max)
        tier.set_terms(terms)
        tier.is_present = True
        board.sum_rates()
        self._slots.ask(tier)

    def _make_room_for_tier(self) -> None:
        """A tier that is gone is forgotten when another needs its place."""
        board = self._board
        if len(board.tiers) < config.SCHEDULE_TIERS_MAX:
            return
        for tier in list(board.tiers.values()):
            if not tier.is_present and not tier.reads and not tier.users:
                del board.tiers[tier.number]
                board.idle.discard(tier.number)
                board.short.discard(tier.number)
                return
        raise QueueFull("tiers of the schedule", 1, 0)
