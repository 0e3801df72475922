"""What the prefetch is told, and what it decides.

Blobs are digests. Where they can be had is a mask with a bit for each *source*, a tier or the other
nodes; the numbers are the caller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Cause(IntEnum):
    """Why a blob is wanted here, the most urgent first."""

    EXPECTED = 0  # a request that waits in an engine will read it
    WARM = 1  # a person says so
    CHILD = 2  # it continues a chunk that was just read
    SUCCESSOR = 3  # it used to be read after the file that was just read

    @property
    def is_guess(self) -> bool:
        return self >= Cause.CHILD


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file whose bytes are not here, with a bit for each source that has them."""

    ino: int
    digest: bytes
    size_bytes: int
    sources: int


class Files(Protocol):
    """What is known of files at the moment. None of it fails: what cannot be said is not there."""

    def children(self, ino: int, limit: int) -> Sequence[int] | None:
        """The chunks that continue a chunk, at most `limit`, the last used first; None for a file
        that is no chunk."""

    def lacking(self, inos: Sequence[int]) -> Sequence[Wanted]:
        """In this order, what of these files is not here and may be fetched on a guess."""

    def is_here(self, digest: bytes) -> bool:
        """Whether this node has a blob."""


# Events -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Used:
    """Somebody begins to read these files, or to wait for them. Told at once: it costs little."""

    inos: Sequence[int]


@dataclass(frozen=True, slots=True)
class Read:
    """A file was read, as `Used` has said; what may come next is guessed. Told later, when there is
    time for it, in order. `reader`: who, if it is known; the same number for the same one."""

    ino: int
    digest: bytes
    at_ns: int
    reader: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """These are to come here, in this order: EXPECTED or WARM."""

    cause: Cause
    blobs: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Some of what was brought is to be looked at: whether it is still here. Told now and then."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A promotion is over. Told once for each, of cancelled ones too."""

    digest: bytes
    is_here: bool


@dataclass(frozen=True, slots=True)
class Look:
    """How things are now. `busy`: the sources that somebody reads from, other than promotions.
    `spare_bytes`: how much more may come here at the cost of nothing that is here."""

    busy: int
    spare_bytes: int


Event = Used | Read | Asked | Ended | Look | Sweep


# Actions ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Promote:
    """Bring a file's bytes here from some of these sources, behind whatever else these are asked
    for."""

    blob: Wanted
    sources: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Cancel:
    """A promotion is not worth it any more; `Ended` is still to come."""

    digest: bytes


Action = Promote | Cancel


@dataclass(slots=True)
class Tally:
    """What was done for one cause since the start."""

    started: int = 0
    started_bytes: int = 0
    arrived: int = 0
    arrived_bytes: int = 0
    used: int = 0  # read by somebody when they were here, or on their way
    used_bytes: int = 0
    wasted: int = 0  # gone again before anybody read them
    wasted_bytes: int = 0
    cancelled: int = 0
    failed: int = 0
    dropped: int = 0  # never begun: too many waited, or for too long
