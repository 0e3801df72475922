"""What a transfer is asked for, and what it says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvfs.schedule import Outcome, TierView
from kvfs.settings.words import TierKind
from kvfs.tiers.counters import TierCounters


@dataclass(frozen=True, slots=True)
class WantedChunk:
    """A blob that a job is to read, whole: its digest is checked.

    `tiers`: numbers of those that hold it; a number that no tier has counts for nothing, and a
    chunk without tiers is lost at once. `memory`: where its bytes go, writable, in one piece and at
    least so long; the caller's, and for nothing else until the job `is_quiet`. None with a
    transfer that has a pool.
    """

    digest: bytes
    size_bytes: int
    tiers: tuple[int, ...]
    memory: memoryview | None = None


class Slot(Protocol):
    """A buffer of a pool. Its holder alone touches it, until it goes back."""

    @property
    def memory(self) -> memoryview: ...


class Pool(Protocol):
    """Buffers of one size that chunks get when their reads start. Called on any thread, by several
    at the same time; must not block, nor call the transfer."""

    @property
    def slot_bytes(self) -> int: ...

    def take_nowait(self) -> Slot | None: ...

    def give_back(self, slot: Slot, /) -> None: ...


class Ending(Enum):
    """Why a job is over."""

    DONE = "done"  # each chunk landed or was lost
    CANCELLED = "cancelled"
    LATE = "late"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended. `lost`: places of the chunks that were not handed over, in rising order; all
    others were.

    `why` says of each of them: CORRUPT when some tier had wrong bytes for it, FAILED when some tier
    failed with it or is down, MISSING when no tier has it, CANCELLED when the job ended before.
    """

    ending: Ending
    lost: tuple[int, ...]
    why: Mapping[int, Outcome]


@dataclass(frozen=True, slots=True)
class TransferTierView:
    """One tier: what the schedule knows of it, and what it counts itself."""

    number: int
    name: str
    kind: TierKind
    schedule: TierView
    counters: TierCounters


@dataclass(frozen=True, slots=True)
class TransferView:
    """A transfer at one moment; the last four since it began."""

    tiers: tuple[TransferTierView, ...]
    jobs: int
    unread_chunks: int
    unread_bytes: int
    reads: int  # under way, with those that are not wanted any more and have not ended
    threads: int
    slots: int  # of the pool, that the transfer or who got chunks from it has
    scratch_reads: int  # that have memory of their own
    landed_chunks: int  # handed over
    landed_bytes: int
    lost_chunks: int
    copied_bytes: int  # from where a repeated read brought them to where they were wanted
