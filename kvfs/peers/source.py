"""What a peer server needs of its node, and no more."""

from collections.abc import Sequence
from typing import Protocol

from kvfs.peers.messages import Health


class Source(Protocol):
    """The blobs of a node. Called in several threads at a time; `KvfsError` and OSError say that it
    could not."""

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        """The size in bytes of each blob that is here, whole and finished; None for the others."""

    def open(self, digest: bytes) -> int | None:
        """A new descriptor of a whole, finished blob, which the server closes; None: not here."""

    def check(self, digest: bytes) -> None:
        """Before a part of a blob goes out, which its reader cannot check by itself: return when
        all of it was found right once, or that takes long. Raises `Corrupt`."""

    def hinted(self, digests: Sequence[bytes], *, spare_only: bool) -> None:
        """A peer thinks that these blobs will be wanted here soon."""

    def health(self) -> Health:
        """How the node is now."""
