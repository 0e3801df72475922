"""Free slots and what they are used for: tiers are asked, and take one read after the other."""

from collections.abc import Iterable

from kvfs import config
from kvfs.schedule.board import Board
from kvfs.schedule.choice import Choice, Refusal, choose_hedge, choose_late, choose_unread
from kvfs.schedule.jobs import Job
from kvfs.schedule.reads import Piece, Read
from kvfs.schedule.tiers import Tier
from kvfs.schedule.timers import Timer, Timers
from kvfs.schedule.words import Action, Memory, ReadKind, StartRead

_FIRST = ReadKind.FIRST  # a member of an enum takes long to look up
_CHUNK = Memory.CHUNK
_READ = Timer.READ
_CREDIT_MAX = config.SCHEDULE_HEDGE_CREDIT_MAX
_CREDIT_SHARE = config.SCHEDULE_HEDGE_SHARE
_LATE_FACTOR = config.SCHEDULE_LATE_FACTOR
_LATE_NS_MIN = round(config.SCHEDULE_LATE_S_MIN * 1e9)
_ASK_NS_MIN = round(config.SCHEDULE_ASK_S_MIN * 1e9)
_ASK_NS_MAX = round(config.SCHEDULE_ASK_S_MAX * 1e9)


def late_after_ns(expected_ns: float) -> int:
    """How long a read may take that is expected to take so long, before it is late."""
    most = expected_ns * _LATE_FACTOR
    least = expected_ns + _LATE_NS_MIN
    return int(most if most > least else least)


def _may_hedge(board: Board, choice: Choice | Refusal | None) -> bool:
    """Whether a tier has time for repeating a read. One that only waits for memory will have it
    soon, and repeats what is late."""
    if isinstance(choice, Choice):
        return choice.job.is_idle
    return choice is None or not choice.is_short or board.hedgeable.has_late


class Slots:
    """Notes what is to be done. Tiers that something has happened to are asked; `fill` comes last,
    when all is known."""

    __slots__ = ("_asked", "_board", "_next_read", "actions", "timers")

    def __init__(self, board: Board) -> None:
        self._board = board
        self.actions: list[Action] = []  # to be done, in this order
        self._asked: dict[int, Tier] = {}  # to be offered work, in this order
        self._next_read = 0
        self.timers = Timers(self._is_live)

    def take_actions(self) -> list[Action]:
        """All that is to be done, once."""
        actions, self.actions = self.actions, []
        return actions

    def ask(self, tier: Tier) -> None:
        """See whether a tier can do something now."""
        self._asked[tier.number] = tier

    def ask_fastest(self, numbers: Iterable[int], size_bytes: int, most: int, now_ns: int) -> None:
        """The same for so many of some tiers, at most, that have nothing to do."""
        idle = self._board.idle
        if not idle:
            return
        able = [number for number in numbers if number in idle]
        for tier in self._fastest(able, size_bytes, now_ns)[:most]:
            self.ask(tier)

    def _fastest(self, numbers: Iterable[int], size_bytes: int, now_ns: int) -> list[Tier]:
        tiers = [self._board.tiers[number] for number in numbers]
        for tier in tiers:
            tier.speed.age(now_ns)
        tiers.sort(key=lambda tier: (tier.read_ns(size_bytes), tier.number))
        return tiers

    def give_memory(self, buffers: int, scratch: int, now_ns: int) -> None:
        """There is so much more: tiers that found none are asked while there is any left, the
        fastest first, and no more of them at once than it is enough for."""
        board = self._board
        board.buffers += buffers
        board.scratch += scratch
        assert board.buffers >= 0 and board.scratch >= 0, "only what is left may be taken back"
        size_bytes = board.unread_bytes // max(1, board.unread_count)
        short = self._fastest(board.short, size_bytes, now_ns)
        while short and (left := board.buffers + board.scratch) > 0:
            count = int(min(left, len(short)))
            for tier in short[:count]:
                board.short.discard(tier.number)
                self.ask(tier)
            del short[:count]
            self.fill(now_ns)

    def fill(self, now_ns: int) -> None:
        """Each tier that was asked takes one read after the other, in turns."""
        asked = self._asked
        while asked:
            for tier in tuple(asked.values()):
                if not self._fill_slot(tier, now_ns):
                    del asked[tier.number]

    def _fill_slot(self, tier: Tier, now_ns: int) -> bool:
        """Begin one read of a tier, if it may and has something; whether there may be more."""
        board = self._board
        idle = board.idle
        is_trial = False
        if not tier.health.is_up:
            is_trial = tier.is_present and tier.health.may_take(now_ns)
            if not is_trial or len(tier.reads) >= tier.terms.reads_max:
                idle.discard(tier.number)
                self._ask_after_pause(tier)
                return False
        elif not tier.is_present or len(tier.reads) >= tier.width.reads:
            idle.discard(tier.number)
            return False
        hedge = None
        if board.hedge_credit >= 1 and board.hedgeable.has_late and board.scratch > 0:
            hedge = choose_late(board, tier)
        if hedge is not None:
            board.hedge_credit -= 1
        elif is_trial:
            hedge = choose_hedge(board, tier, now_ns, is_trial=True)
        if hedge is None:
            choice = choose_unread(board, tier, now_ns)
            if _may_hedge(board, choice):
                hedge = choose_hedge(board, tier, now_ns)
            if hedge is None:
                if choice is None:
                    tier.has_waited = False
                    idle.add(tier.number)
                    return False
                if isinstance(choice, Refusal):
                    idle.add(tier.number)
                    if choice.is_short:
                        board.short.add(tier.number)
                    if choice.wait_ns is not None:
                        self._ask_later(tier, now_ns, choice.wait_ns)
                    return False
                piece = board.take(choice.job, choice.chunk, choice.size_bytes)
                self._start(tier, choice.job, piece, _FIRST, now_ns, is_trial)
                return not is_trial and len(tier.reads) < tier.width.reads
        assert hedge.piece is not None
        job = board.jobs[hedge.piece.job]
        self._start(tier, job, hedge.piece, ReadKind.HEDGE, now_ns, is_trial)
        return True

    def _ask_after_pause(self, tier: Tier) -> None:
        """A tier that is down is asked when its pause is over."""
        retry_ns = tier.health.retry_ns
        if tier.is_present and retry_ns is not None and tier.ask_ns != retry_ns:
            tier.ask_ns = retry_ns
            self.timers.add(retry_ns, Timer.TIER, tier.number)

    def _ask_later(self, tier: Tier, now_ns: int, wait_ns: float) -> None:
        when_ns = now_ns + round(min(max(wait_ns, _ASK_NS_MIN), _ASK_NS_MAX))
        if not tier.ask_ns or when_ns < tier.ask_ns:
            tier.ask_ns = when_ns
            self.timers.add(when_ns, Timer.TIER, tier.number)

    def _start(
        self, tier: Tier, job: Job, piece: Piece, kind: ReadKind, now_ns: int, is_trial: bool
    ) -> None:
        board = self._board
        number = self._next_read
        self._next_read = number + 1
        tier_number, chunk = tier.number, piece.chunk
        beside = len(tier.reads) + 1
        expected_ns = int(tier.speed.read_ns(piece.end - piece.begin, beside))
        into = _CHUNK
        if kind is not _FIRST or job.is_pooled or job.torn:
            into = self._take_memory(job, piece, kind)
        read = Read(number, tier_number, piece, kind, into, now_ns, now_ns + expected_ns, beside)
        if is_trial:
            read.is_trial = tier.health.take(now_ns)
        read.share_ns = tier.share_ns(now_ns)
        tier.has_waited = False
        board.idle.discard(tier_number)
        board.reads[number] = tier.reads[number] = read
        piece.reads.append(read)
        if kind is _FIRST:
            board.add_flow(piece, now_ns, expected_ns)
            if board.hedge_credit < _CREDIT_MAX:
                board.hedge_credit += _CREDIT_SHARE
        self.update_hedgeable(job, piece)
        self.timers.add(now_ns + late_after_ns(expected_ns), _READ, number)
        self.actions.append(
            StartRead(number, tier_number, job.number, chunk, piece.begin, piece.end, kind, into)
        )

    def _take_memory(self, job: Job, piece: Piece, kind: ReadKind) -> Memory:
        """Where the bytes of a read go, that is not simply the chunk's memory."""
        board = self._board
        if kind is not _FIRST or job.is_torn(piece):
            assert board.scratch > 0
            board.scratch -= 1
            return Memory.SCRATCH
        if not job.needs_buffer(piece.chunk):
            return _CHUNK
        assert board.buffers > 0
        board.buffers -= 1
        job.take_buffer(piece.chunk)
        if job.is_unread(piece.chunk):  # a part was taken, and the rest needs no buffer any more
            for number in job.holders[piece.chunk].tiers:
                if number in board.short and job.may_give(number, piece.chunk):
                    self.ask(board.tiers[number])
        return Memory.NEW

    def update_hedgeable(self, job: Job, piece: Piece) -> None:
        """A range may be repeated while fewer than the most reads bring it, if it has other holders
        and somebody waits."""
        hedgeable = self._board.hedgeable
        count = len(piece.reads)
        if (
            count < config.SCHEDULE_COPIES_MAX
            and not job.is_idle
            and len(job.holders[piece.chunk].tiers) > count
        ):
            for read in piece.reads:
                hedgeable.add(read)
        else:
            for read in piece.reads:
                hedgeable.discard(read)

    def _is_live(self, timer: Timer, number: int, when_ns: int) -> bool:
        """Whether a timer still means something."""
        if timer is Timer.READ:
            read = self._board.reads.get(number)
            return read is not None and not read.is_stalled
        tier = self._board.tiers.get(number)
        return tier is not None and tier.ask_ns == when_ns
