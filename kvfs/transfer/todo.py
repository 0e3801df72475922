"""What a transfer's threads are to do, when its state has changed."""

from dataclasses import dataclass, field

from kvfs.tiers.contract import Tier
from kvfs.transfer.job import Task
from kvfs.transfer.memory import Memory, Part
from kvfs.transfer.reads import Check, Read


@dataclass(frozen=True, slots=True)
class Handover:
    """A chunk that is there. `copies`: parts that lie elsewhere than in `target`, to be copied
    there first. All of this memory is held until it is told that it was done."""

    task: Task
    chunk: int
    target: Memory
    copies: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A tier gave wrong bytes."""

    number: int
    tier: Tier
    digest: bytes


@dataclass(frozen=True, slots=True)
class Gone:
    """A tier has a blob no more."""

    number: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Over:
    """A job is to be told that it is over."""

    task: Task


Work = Check | Handover | Wrong | Gone | Over


@dataclass(slots=True)
class Todo:
    """What is to be done without the lock. Reads wait for tiers, the rest for callbacks at most."""

    reads: list[Read] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    quiet: list[Task] = field(default_factory=list)  # nothing writes to their memory any more
    is_unbalanced: bool = False  # the pool is to get something, or to give


@dataclass(slots=True)
class Tally:
    """What is counted, for people."""

    landed_chunks: int = 0
    landed_bytes: int = 0
    lost_chunks: int = 0
    copied_bytes: int = 0
