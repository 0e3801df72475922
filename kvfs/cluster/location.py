"""Which of the other nodes have the bytes of a file."""

import random
from collections.abc import Sequence

from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_HOLDERS_ASKED_MAX
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from kvfs.peers.client import PeerClient


class Location:
    """Puts together what the names' server knows of copies, and who is there."""

    def __init__(
        self, engine: RedisEngine, membership: Membership, rng: random.Random | None = None
    ) -> None:
        """`rng` chooses whom to ask."""
        self._engine = engine
        self._membership = membership
        self._rng = rng or random.Random()

    def holders(self, digest: bytes) -> list[Member]:
        """The other nodes that have a blob, and are there."""
        others = self._membership.others()
        return [others[node] for node in self._engine.copies(digest) if node in others]

    def whom_to_ask(self, digest: bytes) -> list[PeerClient]:
        """Some of them, by chance, so that all carry their share; of what everybody has, few are
        connected to."""
        holders = self.holders(digest)
        chosen = self._rng.sample(holders, min(len(holders), CLUSTER_HOLDERS_ASKED_MAX))
        return [self._membership.client(member) for member in chosen]

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up this node's copies of those digests that other nodes hold as well, and say
        which. Their blobs are doomed."""
        return self._engine.end_copies(digests, self._membership.others())
