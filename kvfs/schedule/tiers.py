"""The tiers as the schedule sees them, and what those that hold the same chunks do together."""

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from kvfs import config
from kvfs.health import Health, HealthState
from kvfs.schedule.speed import Speed
from kvfs.schedule.width import Width
from kvfs.schedule.words import TierTerms

if TYPE_CHECKING:
    from kvfs.schedule.jobs import Job
    from kvfs.schedule.reads import Read

_FRESH_NS = round(config.SCHEDULE_RATES_FRESH_S * 1e9)
_GIB = float(config.GIB)
_RATE = attrgetter("rate")


class Tier:
    """One tier: what it can do, what it does, and the jobs that want something of it."""

    __slots__ = (
        "_at_ns", "_share_ns", "ask_ns", "bytes_read", "has_price", "has_waited", "health",
        "hedges_lost", "hedges_won", "is_present", "jobs", "late", "number", "rate", "reads",
        "reads_ended", "speed", "stale_ns", "terms", "users", "width",
    )  # fmt: skip

    def __init__(self, number: int, terms: TierTerms) -> None:
        self.number = number
        self.set_terms(terms)
        self.is_present = True
        self.health = Health()
        self.width = Width(terms.reads_max)
        self.speed = Speed(terms.latency_s * 1e9, 1e9 / terms.bytes_per_s)
        self.reads: dict[int, Read] = {}  # slots in use, by cancelled reads too
        self.late = 0  # of them, that are late
        self._at_ns = 0
        self._share_ns = 0.0  # so long a read would have had all of it, that was there all along
        self.jobs: list[tuple[float, int, Job]] = []  # the next one last; see `list_job`
        self.stale_ns = 0  # when to look at its rate again
        self.rate = 0.0  # bytes in a nanosecond; set by the schedule with their sum
        self.has_waited = False  # for others to take what it left to them
        self.ask_ns = 0  # it is to be asked again then; 0: no such time
        self.users = 0  # sets of holders that it is in
        self.reads_ended = 0
        self.bytes_read = 0
        self.hedges_won = 0
        self.hedges_lost = 0

    def share_ns(self, now_ns: int) -> float:
        """How long a read would have had the tier for itself, that was one of its reads until now:
        each has the same share at a time. To be asked before their number changes."""
        busy = len(self.reads)
        if busy:
            self._share_ns += (now_ns - self._at_ns) / busy
        self._at_ns = now_ns
        return self._share_ns

    def left_bytes(self, now_ns: int) -> float:
        """How much the tier has to give still for its reads, by what it is expected to give."""
        share_ns = self.share_ns(now_ns) - self.speed.latency_ns
        ns_per_byte = self.speed.ns_per_byte
        left = 0.0
        for read in self.reads.values():
            given = max(0.0, share_ns - read.share_ns) / ns_per_byte
            left += max(0.0, read.size_bytes - given)
        return left

    def done_ns(self, size_bytes: int, now_ns: int) -> float:
        """How long until its reads are done, and one more."""
        speed = self.speed
        return speed.latency_ns + (self.left_bytes(now_ns) + size_bytes) * speed.ns_per_byte

    def set_terms(self, terms: TierTerms) -> None:
        """What the tier can do and costs is this from now on."""
        self.terms = terms
        self.has_price = terms.request_cost_s > 0 or terms.gib_cost_s > 0

    def list_job(self, entry: "tuple[float, int, Job]") -> None:
        """The tier may have something for a job."""
        listed = entry[2].listed
        if self.number not in listed:
            listed.add(self.number)
            insort(self.jobs, entry)

    def unlist(self, entry: "tuple[float, int, Job]") -> None:
        """The job is over; the caller sees to `job.listed`."""
        at = bisect_left(self.jobs, entry)
        assert self.jobs[at][2] is entry[2]
        del self.jobs[at]

    def unlist_read(self) -> None:
        """Of the next jobs, forget those of which nothing is unread."""
        jobs, number = self.jobs, self.number
        while jobs and not jobs[-1][2].unread_count:
            jobs.pop()[2].listed.discard(number)

    def unlist_at(self, at: int) -> None:
        """The job there needs nothing of it, for now or for ever."""
        self.jobs.pop(at)[2].listed.discard(self.number)

    def is_usable(self, now_ns: int) -> bool:
        """Whether something may be read from it, soon if not now."""
        return self.is_present and self.health.state(now_ns) is not HealthState.DOWN

    def read_ns(self, size_bytes: int) -> float:
        """How long one more read is expected to take."""
        return self.speed.read_ns(size_bytes, len(self.reads) + 1)

    def cost_ns(self, size_bytes: int) -> float:
        """The price of a read, as time of a job."""
        terms = self.terms
        if not self.has_price:
            return 0.0
        return 1e9 * (terms.request_cost_s + terms.gib_cost_s * size_bytes / _GIB)

    def measured_rate(self) -> float:
        """Bytes in a nanosecond, of as many reads and as large as there were lately; 0 of a tier
        that is not up, or where all that is under way is late."""
        busy = len(self.reads)
        if not self.is_present or not self.health.is_up or (busy and self.late >= busy):
            return 0.0
        return self.speed.rate()


class Holders:
    """Tiers that hold the same chunks, as of some milliseconds ago: how fast they are together, and
    the two fastest. Of those that cost nothing, if there are any (`is_free`); else of all."""

    __slots__ = ("first", "is_free", "rate", "second", "stale_ns", "tiers", "users")

    def __init__(self, tiers: tuple[int, ...]) -> None:
        self.tiers = tiers
        self.users = 0  # jobs
        self.rate = 0.0
        self.is_free = False
        self.first: Tier | None = None
        self.second: Tier | None = None
        self.stale_ns = 0  # when to look at the tiers again

    def refresh(self, table: dict[int, Tier], now_ns: int) -> None:
        """Look at the tiers again, if that is long ago."""
        if now_ns < self.stale_ns:
            return
        self.stale_ns = now_ns + _FRESH_NS
        tiers = [table[number] for number in self.tiers]
        tiers = [tier for tier in tiers if tier.rate]
        free = [tier for tier in tiers if not tier.has_price]
        self.is_free = bool(free)
        tiers = free or tiers
        self.rate = sum([tier.rate for tier in tiers])
        self.first = max(tiers, key=_RATE, default=None)
        rest = [tier for tier in tiers if tier is not self.first]
        self.second = max(rest, key=_RATE, default=None)

    def forget(self) -> None:
        """What was found does not hold any more: a tier came or went."""
        self.stale_ns = 0
