"""What the metadata knows of tiers, for one node: which of them hold what, and what is to be copied
to them. Part of the metadata contract (`kvfs.meta.contract`), whose words hold here as well.

A file whose bytes lie only in tiers keeps its names: its blob is not in use *here*, so
`MetaEngine.blobs` says None of it, and eviction does not see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Holding:
    """A blob that tiers have. Bit n of the mask stands for the tier with number n."""

    digest: bytes
    size_bytes: int
    mask: int


@dataclass(frozen=True, slots=True)
class HoldingChange:
    """Tiers that turned out to have a blob, and not to have it."""

    digest: bytes
    size_bytes: int
    gained: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What is known to lie in one tier."""

    blobs: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlobUse:
    """How the files are used that hold a blob, here or elsewhere."""

    used_ns: int  # the newest of them
    is_pinned: bool  # one of them


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A blob whose names live on without a copy here. `directory`: where the file lies that the
    caller takes away now, and then buries; None when it is doomed, or there is none."""

    digest: bytes
    directory: int | None


class TierRecords(Protocol):
    """All of it is this node's own, also in a cluster."""

    def tier_numbers(self, places: Sequence[bytes]) -> list[int]:
        """A number below `TIERS_MAX` for each tier, by its name and where it is: the same at every
        call, whatever the order. At most `TIERS_MAX`. Numbers of tiers that are not named any more
        are given to others once there is no free one, and what was known of those is forgotten."""
        ...

    def tier_masks(self, digests: Sequence[bytes]) -> list[int]:
        """Which tiers have each of these, as far as is known. A microsecond for each."""
        ...

    def note_holdings(self, changes: Sequence[HoldingChange]) -> None:
        """Tiers have, or have not, these."""
        ...

    def holdings(self, after: bytes, limit: int) -> list[Holding]:
        """All that tiers hold, in order of digests, those behind `after`."""
        ...

    def tier_loads(self) -> dict[int, TierLoad]:
        """What is known to lie in each tier, by its number."""
        ...

    def uses_of(self, digests: Sequence[bytes]) -> list[BlobUse | None]:
        """How each of these is used; None of what no file holds."""
        ...

    def give_up(self, digests: Sequence[bytes]) -> list[GivenUp]:
        """Give up the copies here of those that tiers hold as well; their names stay. What is
        pinned stays here. Those that are not here, and only in tiers, are among the answers."""
        ...

    def promise(self, digests: Sequence[bytes]) -> None:
        """Note what is to be copied to tiers, until `fulfil`."""
        ...

    def promised(self, after: bytes, limit: int) -> list[bytes]:
        """What is still to be copied, in order, those behind `after`."""
        ...

    def fulfil(self, digests: Sequence[bytes]) -> None:
        """These were copied, or will not be."""
        ...
