"""Reads from their start to their end: what lands is kept once, what fails or is late is brought by
others, what nobody can give is lost."""

from kvfs import config
from kvfs.health import HealthState
from kvfs.schedule.board import Board
from kvfs.schedule.jobs import Job, Trouble
from kvfs.schedule.reads import Piece, Read
from kvfs.schedule.slots import Slots, late_after_ns
from kvfs.schedule.tiers import Tier
from kvfs.schedule.timers import Timer
from kvfs.schedule.words import (
    CancelRead,
    CheckChunk,
    ChunkDone,
    ChunkLost,
    JobEnded,
    KeepRead,
    Memory,
    Outcome,
    ReadKind,
)

_LANDED = Outcome.LANDED  # a member of an enum takes long to look up
_LATE_NS_MIN = round(config.SCHEDULE_LATE_S_MIN * 1e9)
_STALL_NS_MIN = round(config.SCHEDULE_STALL_S_MIN * 1e9)


class Flight:
    """What becomes of reads. Its methods change the board, note what is to be done, and have tiers
    asked that may have something to do now."""

    __slots__ = ("_board", "_slots")

    def __init__(self, board: Board, slots: Slots) -> None:
        self._board = board
        self._slots = slots

    # Ends -----------------------------------------------------------------------------------------
    def end_read(self, number: int, outcome: Outcome, now_ns: int) -> None:
        """A slot is free again."""
        board = self._board
        read = board.reads.pop(number)
        tier = board.tiers[read.tier]
        together = len(tier.reads)
        share_ns = tier.share_ns(now_ns) - read.share_ns
        beside = (now_ns - read.began_ns) / share_ns if share_ns else 1.0  # reads, on average
        del tier.reads[number]
        if read.is_late:
            tier.late -= 1
        tier.reads_ended += 1
        self._slots.ask(tier)
        piece = read.piece
        if read.tears is not None:
            self._mend(read.tears, now_ns)
        if outcome is _LANDED:
            self._learn_landed(tier, read, together, beside, now_ns)
            if piece is not None:
                tier.bytes_read += read.size_bytes
                self._land(board.jobs[piece.job], piece, read)
            return
        retry_ns = tier.health.retry_ns
        self._learn(tier, read, outcome, beside, now_ns)
        if piece is not None:
            self._end_wanted(tier, read, piece, outcome, now_ns)
        if tier.health.retry_ns not in (None, retry_ns):
            self.take_down(tier, now_ns)

    def _end_wanted(
        self, tier: Tier, read: Read, piece: Piece, outcome: Outcome, now_ns: int
    ) -> None:
        """A read ended without the bytes that were wanted of it."""
        job = self._board.jobs[piece.job]
        if outcome is not Outcome.CANCELLED:
            job.bar(tier.number, piece.chunk)
            trouble = self._trouble(job, piece.chunk)
            if outcome is Outcome.FAILED:
                trouble.rest(tier.number)
            else:
                trouble.exclude(tier.number)
        is_try = outcome in (Outcome.FAILED, Outcome.CANCELLED)
        self._lose_read(job, piece, read, now_ns, is_try=is_try)

    def _learn_landed(
        self, tier: Tier, read: Read, together: int, beside: float, now_ns: int
    ) -> None:
        """What a read that landed says of its tier."""
        tier.speed.note(read.size_bytes, now_ns - read.began_ns, beside, now_ns)
        tier.width.note(read.size_bytes, now_ns, is_full=together >= tier.width.reads)
        tier.health.note_landed(now_ns)
        if now_ns >= tier.stale_ns:
            self._board.update_rate(tier, now_ns)

    def _learn(self, tier: Tier, read: Read, outcome: Outcome, beside: float, now_ns: int) -> None:
        """What a read that brought nothing says of its tier."""
        took_ns = now_ns - read.began_ns
        health = tier.health
        if outcome is Outcome.MISSING:
            health.note_landed(now_ns)
        elif outcome is not Outcome.CANCELLED:
            health.note_failed(now_ns)
        else:
            if read.is_trial:
                health.note_nothing()
            if now_ns > read.end_ns:
                tier.speed.note(read.size_bytes, took_ns, beside, now_ns)
        self._board.update_rate(tier, now_ns)

    def _land(self, job: Job, piece: Piece, read: Read) -> None:
        """The first that brings a range is kept, the others are not wanted any more."""
        board = self._board
        if len(piece.reads) > 1:
            self._count_hedges(piece, read)
        piece.reads.remove(read)
        board.hedgeable.discard(read)
        read.piece = None
        if piece.reads:
            self._drop_piece(job, piece)
        else:
            board.end_piece(job, piece)
        self._slots.actions.append(KeepRead(read.number))
        chunk = piece.chunk
        split = job.splits.get(chunk) if job.splits else None
        if split is None:
            self._finish(job, chunk)
            return
        split.landed_bytes += piece.end - piece.begin
        split.gave.add(read.tier)
        if split.landed_bytes == job.chunks[chunk].size_bytes:
            self._slots.actions.append(CheckChunk(job.number, chunk))

    def _count_hedges(self, piece: Piece, winner: Read) -> None:
        for read in piece.reads:
            if read.kind is ReadKind.HEDGE:
                tier = self._board.tiers[read.tier]
                if read is winner:
                    tier.hedges_won += 1
                else:
                    tier.hedges_lost += 1

    def _finish(self, job: Job, chunk: int) -> None:
        self._slots.actions.append(ChunkDone(job.number, chunk))
        if job.splits:
            job.splits.pop(chunk, None)
        if job.troubles:
            job.troubles.pop(chunk, None)
        job.left -= 1
        if not job.left:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        self._board.remove_job(job)
        self._slots.actions.append(JobEnded(job.number, tuple(sorted(job.lost))))

    def checked(self, number: int, chunk: int, outcome: Outcome, now_ns: int) -> None:
        """A chunk that was read in parts has been looked at."""
        job = self._board.jobs.get(number)
        if job is None:
            return
        split = job.splits[chunk]
        assert split.landed_bytes == job.chunks[chunk].size_bytes, "asked for"
        if outcome is Outcome.LANDED:
            self._finish(job, chunk)
            return
        trouble = self._trouble(job, chunk)
        trouble.is_whole = True
        trouble.tries += 1
        if len(split.gave) == 1:
            (tier,) = split.gave
            job.bar(tier, chunk)
            trouble.exclude(tier)
        del job.splits[chunk]
        self._read_again(job, chunk, 0, job.chunks[chunk].size_bytes, now_ns)

    def _lose_read(self, job: Job, piece: Piece, read: Read, now_ns: int, *, is_try: bool) -> None:
        """A read that was wanted brings nothing: another does, or the range is unread again."""
        board = self._board
        board.hedgeable.discard(read)
        piece.reads.remove(read)
        read.piece = None
        if is_try:
            self._trouble(job, piece.chunk).tries += 1
        if piece.reads:
            self._slots.update_hedgeable(job, piece)
            # Another part of the chunk may be unread, and this tier the last that could give it.
            if job.is_unread(piece.chunk) and not self._is_readable(job, piece.chunk, now_ns):
                self._lose(job, piece.chunk)
            return
        board.end_piece(job, piece)
        self._read_again(job, piece.chunk, piece.begin, piece.end, now_ns)

    def _read_again(self, job: Job, chunk: int, begin: int, end: int, now_ns: int) -> None:
        self._board.put_back(job, chunk, begin, end)
        if self._is_readable(job, chunk, now_ns):
            self._offer(job, chunk, end - begin, now_ns)
        else:
            self._lose(job, chunk)

    def _trouble(self, job: Job, chunk: int) -> Trouble:
        return job.troubles.setdefault(chunk, Trouble())

    # Losing chunks --------------------------------------------------------------------------------
    def _is_readable(self, job: Job, chunk: int, now_ns: int) -> bool:
        """Whether some tier may give a chunk; those that failed may again when all others have."""
        trouble = job.troubles.get(chunk)
        if trouble is not None and trouble.tries >= config.SCHEDULE_TRIES_MAX:
            return False
        tiers = self._board.tiers
        usable = [n for n in job.holders[chunk].tiers if tiers[n].is_usable(now_ns)]
        if any(job.may_give(number, chunk) for number in usable):
            return True
        again = trouble.resting.intersection(usable) if trouble is not None else set()
        for number in again:
            job.admit(number, chunk)
            tiers[number].list_job(job.entry)
            self._slots.ask(tiers[number])
        if trouble is not None:
            trouble.resting -= again
        return bool(again)

    def _lose(self, job: Job, chunk: int) -> None:
        """No tier can give a chunk."""
        self._board.drop(job, chunk)
        for piece in [piece for piece in job.pieces.values() if piece.chunk == chunk]:
            self._drop_piece(job, piece)
        job.troubles.pop(chunk, None)
        job.lost.append(chunk)
        self._slots.actions.append(ChunkLost(job.number, chunk))
        job.left -= 1
        if not job.left:
            self._end_job(job)

    def lose_unreadable(self, job: Job, now_ns: int) -> None:
        """A job's chunks that no tier can give now are lost now."""
        tiers = self._board.tiers
        usable = frozenset(n for n in job.tiers if tiers[n].is_usable(now_ns))
        for chunk in list(job.without(usable)):
            if not self._is_readable(job, chunk, now_ns):
                self._lose(job, chunk)

    def _drop_piece(self, job: Job, piece: Piece) -> None:
        """A range is not under way any more: reads that still bring it are cancelled."""
        for read in piece.reads:
            self._board.hedgeable.discard(read)
            read.piece = None
            self._cancel(job, piece, read)
        piece.reads.clear()
        self._board.end_piece(job, piece)

    def _cancel(self, job: Job, piece: Piece, read: Read) -> None:
        """The bytes of a read are not wanted; it may write until it ends."""
        self._slots.actions.append(CancelRead(read.number))
        if read.into is not Memory.SCRATCH:
            read.tears = piece
            job.torn.setdefault(piece.chunk, []).append((piece.begin, piece.end))

    def _mend(self, piece: Piece, now_ns: int) -> None:
        """A read that was cancelled writes no more."""
        job = self._board.jobs.get(piece.job)
        if job is None:
            return
        ranges = job.torn[piece.chunk]
        ranges.remove((piece.begin, piece.end))
        if not ranges:
            del job.torn[piece.chunk]
        if self._board.scratch <= 0:
            self._offer(job, piece.chunk, piece.end - piece.begin, now_ns)

    def cancel_job(self, job: Job) -> None:
        """Nobody wants it any more."""
        for piece in list(job.pieces.values()):
            self._drop_piece(job, piece)
        self._board.remove_job(job)

    # Time, and tiers that go ----------------------------------------------------------------------
    def take_down(self, tier: Tier, now_ns: int) -> None:
        """A tier gives nothing for now: what it was to bring is brought by others, and what only it
        could is lost."""
        board = self._board
        board.idle.discard(tier.number)
        board.sum_rates()
        for read in list(tier.reads.values()):
            if read.piece is not None:
                self._give_up(read, now_ns, is_try=tier.is_present)
        for job in [entry[2] for entry in tier.jobs]:
            self.lose_unreadable(job, now_ns)
        self._slots.ask(tier)  # who is down for a pause is asked again after it

    def _give_up(self, read: Read, now_ns: int, *, is_try: bool) -> None:
        """A read is cancelled, and what it was to bring is brought by others."""
        piece = read.piece
        assert piece is not None
        job = self._board.jobs[piece.job]
        self._cancel(job, piece, read)
        self._lose_read(job, piece, read, now_ns, is_try=is_try)

    def look_at_timers(self, now_ns: int) -> None:
        """See to what is due."""
        while (due := self._slots.timers.pop_due(now_ns)) is not None:
            timer, number = due
            if timer is Timer.READ:
                self._look_at_read(self._board.reads[number], now_ns)
            else:
                tier = self._board.tiers[number]
                tier.ask_ns = 0
                tier.has_waited = True
                self._slots.ask(tier)

    def _look_at_read(self, read: Read, now_ns: int) -> None:
        """A read has taken long: it is late, or it has stalled."""
        board = self._board
        tier = board.tiers[read.tier]
        took_ns = now_ns - read.began_ns
        stall_ns = max(_STALL_NS_MIN, config.SCHEDULE_STALL_FACTOR * (read.end_ns - read.began_ns))
        if not read.is_late:
            # Others may have come since, and all share the tier; or all of it is slower now.
            reads = max(read.beside, len(tier.reads))
            late_ns = late_after_ns(tier.speed.read_ns(read.size_bytes, reads))
            if took_ns < late_ns and took_ns < stall_ns:
                self._slots.timers.add(read.began_ns + late_ns, Timer.READ, read.number)
                return
            read.is_late = True
            tier.late += 1
            board.update_rate(tier, now_ns)
            if read.piece is not None:
                board.end_flow(read.piece)
        if took_ns >= stall_ns:
            self._stall(tier, read, now_ns)
            return
        again_ns = min(max(took_ns // 2, _LATE_NS_MIN), stall_ns - took_ns)
        self._slots.timers.add(now_ns + int(again_ns) + 1, Timer.READ, read.number)
        piece = read.piece
        if piece is not None:
            self._offer(board.jobs[piece.job], piece.chunk, read.size_bytes, now_ns)

    def _offer(self, job: Job, chunk: int, size_bytes: int, now_ns: int) -> None:
        """A range may have to be read: by a tier that has nothing to do, if there is one."""
        idle = self._board.idle
        holders = job.holders[chunk].tiers if idle else ()
        able = [number for number in holders if number in idle and job.may_give(number, chunk)]
        self._slots.ask_fastest(able, size_bytes, config.SCHEDULE_ASKED_MAX, now_ns)

    def _stall(self, tier: Tier, read: Read, now_ns: int) -> None:
        read.is_stalled = True
        tier.health.note_stalled(read.began_ns, now_ns)
        if tier.health.state(now_ns) is HealthState.DOWN:
            self.take_down(tier, now_ns)
        elif read.piece is not None:
            job = self._board.jobs[read.piece.job]
            job.bar(tier.number, read.piece.chunk)
            self._trouble(job, read.piece.chunk).rest(tier.number)
            self._give_up(read, now_ns, is_try=True)
