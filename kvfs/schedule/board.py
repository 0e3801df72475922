"""What the schedule knows at one moment: tiers, jobs, reads, and sums over them."""

from kvfs import config
from kvfs.schedule.jobs import Job
from kvfs.schedule.reads import Hedgeable, Piece, Read
from kvfs.schedule.tiers import Holders, Tier

_FRESH_NS = round(config.SCHEDULE_RATES_FRESH_S * 1e9)
_UNBOUNDED = float("inf")


class Board:
    """The common state of the schedule's parts. Sums are kept as things change."""

    __slots__ = (
        "_base_ns", "_flow", "_flow_end", "_flows", "buffers", "hedge_credit", "hedgeable",
        "holders", "idle", "jobs", "rate", "reads", "scratch", "short", "tiers", "unread_bytes",
        "unread_count",
    )  # fmt: skip

    def __init__(self, scratch: int | None) -> None:
        self.tiers: dict[int, Tier] = {}
        self.jobs: dict[int, Job] = {}
        self.reads: dict[int, Read] = {}
        self.holders: dict[tuple[int, ...], Holders] = {}
        self.hedgeable = Hedgeable()
        self.idle: set[int] = set()  # tiers that have a free slot and found nothing for it
        self.short: set[int] = set()  # of them, those that found something, but no memory for it
        self.buffers = 0  # of the pool, that chunks may take
        self.scratch = _UNBOUNDED if scratch is None else float(scratch)  # reads that may use it
        self.rate = 0.0  # of all tiers, bytes in a nanosecond
        self.unread_count = 0  # chunks, of all jobs
        self.unread_bytes = 0  # of jobs that somebody waits for
        # What is under way is a sum of lines over time, each range counted once. Their times count
        # from when there was none, so that the sums stay exact enough.
        self._flows = 0
        self._flow = self._flow_end = 0.0
        self._base_ns = 0
        self.hedge_credit = 0.0  # so many reads of late bytes may be made before other work

    def take(self, job: Job, chunk: int, size_bytes: int) -> Piece:
        """Take a range of an unread chunk."""
        count_before = job.unread_count
        begin, end = job.take(chunk, size_bytes)
        self.unread_count += job.unread_count - count_before
        if not job.is_idle:
            self.unread_bytes -= end - begin
        piece = job.pieces[chunk, begin] = Piece(job.number, chunk, begin, end)
        return piece

    def add_flow(self, piece: Piece, now_ns: int, expected_ns: int) -> None:
        """A range is expected to come in that time, evenly."""
        if not self._flows:
            self._base_ns = now_ns
            self._flow = self._flow_end = 0.0
        self._flows += 1
        piece.flow = (piece.end - piece.begin) / max(1, expected_ns)
        piece.flow_end = piece.flow * (now_ns - self._base_ns + expected_ns)
        self._flow += piece.flow
        self._flow_end += piece.flow_end

    def end_flow(self, piece: Piece) -> None:
        """It has come, or nobody knows when it does."""
        if piece.flow:
            self._flows -= 1
            self._flow -= piece.flow
            self._flow_end -= piece.flow_end
            piece.flow = 0.0

    def flying_bytes(self, now_ns: int) -> float:
        """How many bytes under way have not come yet, by what is expected."""
        return max(0.0, self._flow_end - self._flow * (now_ns - self._base_ns))

    def end_piece(self, job: Job, piece: Piece) -> None:
        """A range is under way no more."""
        del job.pieces[piece.chunk, piece.begin]
        self.end_flow(piece)

    def put_back(self, job: Job, chunk: int, begin: int, end: int) -> None:
        """A range is unread again, and known to the tiers that hold it."""
        bytes_before, count_before = job.unread_bytes, job.unread_count
        job.put_back(chunk, begin, end)
        self._count(job, bytes_before, count_before)
        for number in job.holders[chunk].tiers:
            if job.may_give(number, chunk):
                self.tiers[number].list_job(job.entry)

    def drop(self, job: Job, chunk: int) -> None:
        """What is unread of a chunk is not wanted any more."""
        bytes_before, count_before = job.unread_bytes, job.unread_count
        job.drop(chunk)
        self._count(job, bytes_before, count_before)

    def add_job(self, job: Job) -> None:
        """A job begins."""
        self.jobs[job.number] = job
        self._count(job, 0, 0)
        for holders in {id(holders): holders for holders in job.holders}.values():
            if not holders.users:
                for number in holders.tiers:
                    self.tiers[number].users += 1
            holders.users += 1
        entry = job.entry
        for number in job.tiers:
            self.tiers[number].list_job(entry)

    def remove_job(self, job: Job) -> None:
        """A job is over: nothing of it is kept."""
        del self.jobs[job.number]
        self.unread_count -= job.unread_count
        if not job.is_idle:
            self.unread_bytes -= job.unread_bytes
        entry = job.entry
        for number in job.listed:
            self.tiers[number].unlist(entry)
        job.listed.clear()
        for holders in {id(holders): holders for holders in job.holders}.values():
            holders.users -= 1
            if not holders.users:
                del self.holders[holders.tiers]
                for number in holders.tiers:
                    self.tiers[number].users -= 1

    def holders_of(self, tiers: tuple[int, ...]) -> Holders:
        """Those of some tiers that are known, as one; the same tiers give the same object."""
        found = self.holders.get(tiers)
        if found is None:
            known = tuple(sorted({number for number in tiers if number in self.tiers}))
            found = self.holders.get(known)
            if found is None:
                found = self.holders[known] = Holders(known)
        return found

    def update_rate(self, tier: Tier, now_ns: int) -> None:
        """What a tier gives may have changed; looked at again when this is stale."""
        tier.stale_ns = now_ns + _FRESH_NS
        rate = tier.measured_rate()
        self.rate = max(0.0, self.rate + rate - tier.rate)
        tier.rate = rate

    def sum_rates(self) -> None:
        """A tier came or went: count anew."""
        for tier in self.tiers.values():
            tier.stale_ns = 0
            tier.rate = tier.measured_rate()
        self.rate = sum(tier.rate for tier in self.tiers.values())
        for holders in self.holders.values():
            holders.forget()

    def _count(self, job: Job, bytes_before: int, count_before: int) -> None:
        self.unread_count += job.unread_count - count_before
        if not job.is_idle:
            self.unread_bytes += job.unread_bytes - bytes_before
