"""One read: a tier's call, and whether what it brought is what was wanted."""

import logging
import time
from dataclasses import dataclass

import xxhash

from kvfs.config import TRANSFER_PIECE_BYTES
from kvfs.errors import TierBusy, TierTrouble
from kvfs.hashers import PieceDigest
from kvfs.schedule import Outcome, StartRead
from kvfs.settings.words import TierKind
from kvfs.tiers.contract import Tier
from kvfs.transfer.job import Task
from kvfs.transfer.memory import Memory, Part

log = logging.getLogger(__name__)

# Where a call costs little, large ranges are read by several, so that what has come is hashed
# meanwhile, and a read that is not wanted any more ends soon.
_IN_PIECES = (TierKind.MEMORY, TierKind.NVME, TierKind.SHARED)


class Read:
    """A range of a chunk that a tier brings."""

    __slots__ = (
        "begin", "chunk", "end", "is_cancelled", "memory", "number", "task", "tier", "tier_number",
    )  # fmt: skip

    def __init__(self, action: StartRead, tier: Tier, task: Task, memory: Memory) -> None:
        self.number = action.read
        self.tier_number = action.tier
        self.tier = tier
        self.task = task
        self.chunk = action.chunk
        self.begin = action.begin
        self.end = action.end
        self.memory = memory
        self.is_cancelled = False  # set under the transfer's lock, and looked at without

    def carry_out(self) -> Outcome:
        """Blocks until the tier's call ended. Nothing writes to the memory after that.

        A read that was not wanted any more says nothing of its tier when it failed; when it did
        not, it may be said to have landed with wrong bytes, since nobody keeps it.
        """
        try:
            outcome = self._fetch()
        except TierBusy:  # who uses the tier beside us is not its fault
            outcome = Outcome.CANCELLED
        except TierTrouble as error:
            if self.is_cancelled or time.monotonic() >= self.task.end_s:
                outcome = Outcome.CANCELLED
            else:
                log.info("kvfs: a read is repeated elsewhere: %s", error)
                outcome = Outcome.FAILED
        except Exception:
            # The edge of this thread: a tier that does not keep its contract costs reads of it.
            log.exception("kvfs: tier %s failed in an unforeseen way", self.tier.name)
            outcome = Outcome.FAILED
        return outcome

    def _fetch(self) -> Outcome:
        wanted = self.task.job.chunks[self.chunk]
        hashing = PieceDigest()
        try:
            outcome = self._fill(wanted.digest, hashing)
        finally:
            found = hashing.digest()  # not before this may the memory be used otherwise
        is_whole = self.end - self.begin == wanted.size_bytes
        if outcome is not Outcome.LANDED or not is_whole or self.is_cancelled:
            return outcome
        return Outcome.LANDED if found == wanted.digest else Outcome.CORRUPT

    def _fill(self, digest: bytes, hashing: PieceDigest) -> Outcome:
        target = self.memory.view[self.begin : self.end]
        step = TRANSFER_PIECE_BYTES if self.tier.kind in _IN_PIECES else len(target)
        is_whole = len(target) == self.task.job.chunks[self.chunk].size_bytes
        at = 0
        while at < len(target):
            left_s = self.task.end_s - time.monotonic()
            if self.is_cancelled or left_s <= 0:
                return Outcome.CANCELLED
            rest = len(target) - at
            piece = target[at : at + (step if rest > step + step // 4 else rest)]
            if not self.tier.read_into(digest, self.begin + at, piece, left_s):
                return Outcome.MISSING
            if is_whole and not self.is_cancelled:
                hashing.add(piece)
            at += len(piece)
        return Outcome.LANDED


@dataclass(frozen=True, slots=True)
class Check:
    """A chunk that was read in parts, to be compared with its digest."""

    task: Task
    chunk: int
    parts: tuple[Part, ...]  # in order, all of it

    def carry_out(self) -> Outcome:
        """The bytes do not change meanwhile: they are held."""
        hashing = xxhash.xxh3_128()
        for part in self.parts:
            hashing.update(part.memory.view[part.begin : part.end])
        is_right = hashing.digest() == self.task.job.chunks[self.chunk].digest
        return Outcome.LANDED if is_right else Outcome.CORRUPT
