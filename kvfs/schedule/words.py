"""What the schedule is told, and what it decides.

Tiers, jobs and reads are numbers: tiers and jobs have theirs from the caller, reads get one each. A
job's and a read's is never used again. A chunk is its place in its job's list.

Nobody changes these. Those of which there is one for each read are not frozen all the same: that
would cost a microsecond and a half for each.
"""

from dataclasses import dataclass
from enum import Enum

from kvfs import config


@dataclass(frozen=True, slots=True)
class TierTerms:
    """What a tier can do and what it costs.

    Costs are in seconds of a job's time: so much sooner must the job be done by a read for it to be
    worth its price. Speed and latency are what is expected before anything was measured.
    """

    reads_max: int = 8  # at the same time
    request_cost_s: float = 0.0
    gib_cost_s: float = 0.0
    bytes_per_s: float = config.SCHEDULE_BYTES_PER_S
    latency_s: float = config.SCHEDULE_LATENCY_S


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a job: `tiers` hold it, at least one."""

    size_bytes: int
    tiers: tuple[int, ...]


class Outcome(Enum):
    """How a read ended."""

    LANDED = "landed"  # all its bytes; of a whole chunk, with the right digest
    MISSING = "missing"  # the tier does not have it
    CORRUPT = "corrupt"  # the tier has other bytes under this name
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReadKind(Enum):
    """Why a read is made."""

    FIRST = "first"
    HEDGE = "hedge"  # of bytes that another read brings as well, perhaps later


class Memory(Enum):
    """Where a read's bytes go. No two reads under way write to the same bytes."""

    NEW = "new"  # a buffer of the pool, which is the chunk's from now on
    CHUNK = "chunk"  # the chunk's: what its job brought, or its buffer
    SCRATCH = "scratch"  # the read's own: another read may still write to the chunk's


# Events -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TierUp:
    """A tier is there. Told of one that is there already, its terms are replaced."""

    tier: int
    terms: TierTerms


@dataclass(frozen=True, slots=True)
class TierDown:
    """A tier is gone until `TierUp`: nothing is read from it, and what was under way is read
    elsewhere."""

    tier: int


@dataclass(frozen=True, slots=True)
class JobAdded:
    """Chunks to be read, in this order. A step of priority is worth seconds of waiting;
    `config.SCHEDULE_PRIORITY_IDLE` is for what is read only while nothing else is wanted.

    The chunks bring their own memory; those of a pooled job do not, and each takes a buffer of the
    pool with its first read."""

    job: int
    chunks: tuple[Chunk, ...]
    priority: int = 0
    is_pooled: bool = False


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """Nobody wants a job any more. One that has ended already is no error."""

    job: int


@dataclass(slots=True, unsafe_hash=True)
class ReadEnded:
    """The slot of a read is free again. Told once for each read, of cancelled ones too."""

    read: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ChunkChecked:
    """The answer to `CheckChunk`: LANDED or CORRUPT."""

    job: int
    chunk: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """So many buffers of the pool more, and so much scratch, may be used: each counts one read into
    `Memory.NEW` or `Memory.SCRATCH`. Told at first of all that there is, then of each that comes
    back, in whatever way; the schedule gives none back by itself. What is below 0 is taken back:
    no more than the schedule has left."""

    buffers: int = 0
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: told at `Schedule.wake_ns` at the latest."""


Event = TierUp | TierDown | JobAdded | JobCancelled | ReadEnded | ChunkChecked | MemoryFreed | Tick


# Actions ------------------------------------------------------------------------------------------
@dataclass(slots=True, unsafe_hash=True)
class StartRead:
    """A tier reads the bytes of a chunk from `begin` up to `end`."""

    read: int
    tier: int
    job: int
    chunk: int
    begin: int
    end: int
    kind: ReadKind
    into: Memory


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Its bytes are not wanted any more; `ReadEnded` is still to come."""

    read: int


@dataclass(slots=True, unsafe_hash=True)
class KeepRead:
    """The bytes of a read that landed are those of its chunk. Of a read that landed without this,
    they are not."""

    read: int


@dataclass(frozen=True, slots=True)
class CheckChunk:
    """All ranges of a chunk that was read in parts are there: compare its digest, and answer with
    `ChunkChecked`."""

    job: int
    chunk: int


@dataclass(slots=True, unsafe_hash=True)
class ChunkDone:
    """A chunk is there, whole and right."""

    job: int
    chunk: int


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """No tier could give a chunk."""

    job: int
    chunk: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Each chunk is done or lost; `lost` in rising order."""

    job: int
    lost: tuple[int, ...]


Action = StartRead | CancelRead | KeepRead | CheckChunk | ChunkDone | ChunkLost | JobEnded
