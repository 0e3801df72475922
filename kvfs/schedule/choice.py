"""What a tier with a free slot reads next: the rules, each a function over the board.

**The next unread chunk.** Jobs in their order; in a job, its first unread chunk that the tier
holds. Whole, while so much is unread that all tiers together are busy for longer than this read.

**No tail to who would finish it last.** Towards the end of a job a tier leaves a chunk to others
when the time until they come to it, and then read it, is shorter than its own; it looks at the jobs
behind, a few. When there is more to do than would fit into its read, and the few are all like that,
it takes from the last of them: a tier is not idle while there is work.

**Splitting.** When all that is unread and under way would be done sooner than this tier with a
whole chunk more, it takes the part that it can read until then besides what it reads already, as
the others do. Parts begin and end on pages, are no smaller than the tier's latency is worth, and
are no more than a few for each chunk.

**Memory.** A chunk for which there is no memory now is passed over; chunks behind it that have
theirs are not held up by it.

**Price.** A tier that costs takes a chunk when those that cost nothing would be busy with it for
longer than its price, or where there are none; towards the end, prices count as time. Who costs
nothing leaves nothing to who does.

What a tier left to others that cost no more it takes when they have not come to it in the time that
they were expected to; a chunk with which some tier failed goes to the first that may give it.

**Hedges.** A tier that finds nothing repeats, of the reads under way, the one that gains most: the
time that it is expected to take still, less the time of the new read, some more, and its price; one
that only waits for memory does so while some read is late. A read that is late is expected to take
as long again as it is late. One that is very late goes before unread chunks, within a credit that
is a small part of all reads.
"""

from typing import NamedTuple

from kvfs import config
from kvfs.schedule.board import Board
from kvfs.schedule.jobs import Job
from kvfs.schedule.reads import Read
from kvfs.schedule.tiers import Tier

_PAGE = config.PAGE_BYTES
_WHOLE_SHARE = 0.85  # who may take so much of a chunk takes all of it


class Choice(NamedTuple):
    """So many bytes of an unread chunk of a job, at most."""

    job: Job
    chunk: int
    size_bytes: int


class Refusal(NamedTuple):
    """There is something that the tier may not take now: it is left to others, and worth asking
    again after so long; or there is no memory for it."""

    wait_ns: float | None
    is_short: bool = False


def choose_unread(board: Board, tier: Tier, now_ns: int) -> Choice | Refusal | None:
    """An unread chunk, or part of one; None where there is none that the tier holds.

    Most of what the schedule costs is here: what does not change from job to job is looked up once.
    """
    jobs, number, speed, rate = tier.jobs, tier.number, tier.speed, board.rate
    together = len(tier.reads) + 1
    seen = short = ahead_bytes = size_bytes = 0
    took_ns = 0.0
    refusal: Refusal | None = None
    last: Choice | None = None
    if jobs and not jobs[-1][2].unread_count:
        tier.unlist_read()
    at = len(jobs)
    while at and seen < config.SCHEDULE_JOBS_EXAMINED:
        at -= 1
        job = jobs[at][2]
        if not job.unread_count:
            tier.unlist_at(at)
            continue
        if job.is_idle and refusal is not None:
            break
        chunk = job.next_for(number)
        if chunk < 0:
            tier.unlist_at(at)
            continue
        if (job.is_pooled or job.torn) and (board.buffers <= 0 or board.scratch <= 0):
            chunk = job.with_memory(number, chunk, board.buffers > 0, board.scratch > 0)
            if chunk < 0:
                short += 1
                if short >= config.SCHEDULE_JOBS_SHORT_EXAMINED:
                    break
                continue
        seen += 1
        ahead_bytes += job.unread_bytes
        size_bytes = job.rest_of(chunk) if job.splits else job.chunks[chunk].size_bytes
        took_ns = speed.latency_ns + together * size_bytes * speed.ns_per_byte
        if not tier.has_price:
            if took_ns * rate <= ahead_bytes:
                return Choice(job, chunk, size_bytes)
            if took_ns * rate <= board.unread_bytes and not job.troubles:
                # Much is unread in all: nothing is split, only the job's tail is left to others.
                holders = job.holders[chunk]
                if now_ns >= holders.stale_ns:
                    holders.refresh(board.tiers, now_ns)
                rival = holders.first
                if rival is None or rival is tier or tier.has_waited:
                    return Choice(job, chunk, size_bytes)
                wait_ns = ahead_bytes / holders.rate
                if took_ns <= wait_ns + rival.read_ns(size_bytes):
                    return Choice(job, chunk, size_bytes)
                last = Choice(job, chunk, size_bytes)
                if refusal is None:
                    refusal = Refusal(wait_ns)
                continue
        cost_ns = tier.cost_ns(size_bytes)
        found = _weigh(board, tier, job, chunk, ahead_bytes, cost_ns, now_ns)
        if isinstance(found, Choice):
            return found
        refusal = refusal or found
        if not cost_ns:
            last = Choice(job, chunk, size_bytes)
    if last is not None and took_ns * rate <= board.unread_bytes:
        return last
    if short:
        return Refusal(refusal.wait_ns if refusal is not None else None, is_short=True)
    return refusal


def _weigh(
    board: Board,
    tier: Tier,
    job: Job,
    chunk: int,
    ahead_bytes: int,
    cost_ns: float,
    now_ns: int,
) -> Choice | Refusal:
    """Whether a tier takes a chunk that is one of the last, or that costs."""
    size_bytes = job.rest_of(chunk)
    whole = Choice(job, chunk, size_bytes)
    if job.is_idle or chunk in job.troubles:
        return whole
    holders = job.holders[chunk]
    holders.refresh(board.tiers, now_ns)
    is_among = holders.is_free != tier.has_price  # else it costs, and others do not
    others_rate = holders.rate - tier.rate if is_among else holders.rate
    rival = holders.first if holders.first is not tier else holders.second
    if rival is None or others_rate <= 0:
        return whole
    if not is_among and cost_ns > size_bytes / others_rate:
        return Refusal(ahead_bytes / others_rate)
    part_bytes = _part(board, tier, job, chunk, holders.rate, now_ns)
    if part_bytes < size_bytes:
        return Choice(job, chunk, part_bytes)
    if tier.has_waited and is_among:
        return whole
    own_bytes = tier.left_bytes(now_ns) if is_among else 0.0
    left_bytes = board.unread_bytes + board.flying_bytes(now_ns) - own_bytes
    left_ns = max(left_bytes, size_bytes) / others_rate
    rival_ns = rival.done_ns(size_bytes, now_ns) + rival.cost_ns(size_bytes)
    if tier.done_ns(size_bytes, now_ns) + cost_ns <= max(left_ns, rival_ns):
        return whole
    return Refusal(left_ns)


def _part(board: Board, tier: Tier, job: Job, chunk: int, rate: float, now_ns: int) -> int:
    """How much of a chunk a tier takes so that all that is left ends at the same time; its size for
    all of it, also where that part would be too small."""
    size_bytes = job.rest_of(chunk)
    speed = tier.speed
    left_ns = (board.unread_bytes + board.flying_bytes(now_ns)) / rate
    ns_per_byte = speed.ns_per_byte * (len(tier.reads) + 1)
    fits_bytes = (left_ns - speed.latency_ns) / speed.ns_per_byte - tier.left_bytes(now_ns)
    if fits_bytes >= _WHOLE_SHARE * size_bytes:
        return size_bytes
    split = job.splits.get(chunk)
    trouble = job.troubles.get(chunk)
    least = max(config.SCHEDULE_PIECE_BYTES_MIN, speed.latency_ns / ns_per_byte)
    if (
        size_bytes < 2 * least
        or (split is not None and split.cut >= config.SCHEDULE_PIECES_MAX)
        or (trouble is not None and trouble.is_whole)
    ):
        return size_bytes
    part_bytes = int(fits_bytes) // _PAGE * _PAGE
    return part_bytes if least <= part_bytes <= size_bytes - least else size_bytes


def choose_late(board: Board, tier: Tier) -> Read | None:
    """A read that is late, to be repeated before other work."""
    for read in board.hedgeable.earliest(config.SCHEDULE_HEDGES_EXAMINED):
        if not read.is_late:
            return None
        if _may_repeat(board, tier, read):
            return read
    return None


def choose_hedge(board: Board, tier: Tier, now_ns: int, *, is_trial: bool = False) -> Read | None:
    """The read that gains most by being repeated; for a trial any will do."""
    best: Read | None = None
    best_ns = 0.0
    if board.scratch <= 0:
        if len(board.hedgeable):
            board.short.add(tier.number)
        return None
    half = config.SCHEDULE_HEDGES_EXAMINED // 2
    for reads in (board.hedgeable.earliest(half), board.hedgeable.latest(half)):
        for read in reads:
            size_bytes = read.size_bytes
            took_ns = tier.read_ns(size_bytes) * (1 + config.SCHEDULE_HEDGE_GAIN_MIN)
            gain_ns = read.left_ns(now_ns) - took_ns - tier.cost_ns(size_bytes)
            if (gain_ns > best_ns or is_trial) and _may_repeat(board, tier, read):
                best, best_ns = read, max(gain_ns, best_ns)
    return best


def _may_repeat(board: Board, tier: Tier, read: Read) -> bool:
    piece = read.piece
    assert piece is not None, "what is not wanted is not hedgeable"
    return board.jobs[piece.job].may_give(tier.number, piece.chunk) and all(
        other.tier != tier.number for other in piece.reads
    )
