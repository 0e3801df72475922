"""What a node wants of the other nodes of its cluster, whatever joins it to them."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.arriving import Arriving
from kvfs.meta.contract import Inode
from kvfs.peers.messages import Range
from kvfs.replicate import Holder


@dataclass(frozen=True, slots=True)
class Referral:
    """Where a client gets a file's bytes by itself: from these nodes. The ticket is for the stream
    of the first of them, at `address`."""

    nodes: tuple[bytes, ...]  # by their ids, at least one
    address: str  # `host:port`
    ticket: bytes


class Neighbours(Protocol):
    """The other nodes of a cluster."""

    def refresh(self) -> None:
        """Know all that they did until now."""

    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, as far as any node has them."""

    async def refer(self, inodes: Iterable[Inode]) -> dict[bytes, Referral]:
        """For those of these files whose bytes another node has, and this one has not: where a
        client gets them, by digest."""

    async def tickets(
        self, node_id: bytes, ranges: Sequence[Range]
    ) -> tuple[str, list[bytes | None]]:
        """Tickets of another node for a client, and the address of the stream that takes them; None
        for what it has not. Raises `Unavailable` when it is not there, or may not be read."""

    async def sizes_at(self, node_id: bytes, digests: Sequence[bytes]) -> list[int | None]:
        """The sizes of blobs that another node has. Raises `Unavailable`."""

    @property
    def fetching(self) -> int:
        """How many files are on their way here, or wait for that."""

    async def begin(self, inode: Inode) -> Arriving | None:
        """A published file's bytes as they come from another node, or None: all are here, or no
        node has them."""

    def stop_fetching(self) -> None:
        """Let nobody wait any more for what other nodes have."""

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up the copies here of those digests that others have as well, and say which."""

    def held_elsewhere(self, digests: Sequence[bytes]) -> Container[bytes]:
        """Those of the digests that others have as well, as far as it is known; never fails."""

    def published(self, inode: Inode) -> None:
        """A file has got its bytes here: others may have to have them as well. Takes no time."""

    def copies(self, digests: Sequence[bytes]) -> list[list[Holder]]:
        """Which nodes have the bytes of each digest."""

    def leave(self, *, begin: bool) -> dict[str, object]:
        """Begin to leave, or only say how far it is; see `kvfs.cluster.drain`."""

    def describe(self) -> dict[str, object]:
        """For `kvfs status`."""
