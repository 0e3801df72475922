"""What a node wants of what brings files here ahead of their readers, `kvfs.prefetch.runner`."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvfs.meta.contract import Inode


class Ahead(Protocol):
    """In the node's thread."""

    def expect(self, inodes: Iterable[Inode]) -> None:
        """Requests that wait in an engine will read these files, in this order. Takes no time;
        what is here already costs nothing. Of too many the last are forgotten."""

    def note_awaited(self, inodes: Iterable[Inode]) -> None:
        """Readers are about to wait for the bytes of these files, which need not be here. Takes no
        time."""

    def note_elsewhere(self, size_bytes: int, tiers: int, *, is_at_peers: bool) -> None:
        """A client reads so many bytes by itself, from the tiers of this mask or other nodes."""

    async def warm(self, inodes: Sequence[Inode], patience_s: float) -> set[bytes]:
        """Bring these files here, for so long; the digests of those that are still on their way,
        and go on coming. What is neither among them nor here nobody gives."""

    def describe(self) -> dict[str, object]:
        """For `kvfs status`."""
