"""Which of the other nodes have the bytes of a file."""

import logging
import random
from collections.abc import Sequence

from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_HOLDERS_ASKED_MAX
from kvfs.errors import InvalidInput, KvfsError, Unavailable
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from kvfs.peers.client import PeerClient
from kvfs.replicate import Holder, HolderState

log = logging.getLogger(__name__)


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
        """As `choose`, without their ids."""
        return list(self.choose(digest).values())

    def choose(self, digest: bytes) -> dict[bytes, PeerClient]:
        """Some of the holders by their ids, in an order by chance, so that all carry their share;
        of what everybody has, few are connected to."""
        holders = self.holders(digest)
        self._rng.shuffle(holders)
        chosen: dict[bytes, PeerClient] = {}
        for member in holders:
            try:
                chosen[member.node_id] = self._membership.client(member)
            except InvalidInput as error:  # it is configured otherwise than this node
                log.info("%s cannot be asked: %s", member.address, error)
            if len(chosen) == CLUSTER_HOLDERS_ASKED_MAX:
                break
        return chosen

    def client_of(self, node_id: bytes) -> PeerClient:
        """What asks another node. Raises `Unavailable` when it is not there, or cannot be asked."""
        member = self._membership.others().get(node_id)
        if member is None:
            raise Unavailable(f"node {node_id.hex()} is not there")
        try:
            return self._membership.client(member)
        except InvalidInput as error:
            raise Unavailable(str(error)) from error

    def learn(self, digests: Sequence[bytes]) -> None:
        """Have it known who has these, in one round trip; of some it stays unknown while the
        server does not answer."""
        try:
            self._engine.known_copies(digests)
        except KvfsError as error:
            log.info("who else has what is not known: %s", error)

    def give_up(self, digests: Sequence[bytes]) -> list[bytes]:
        """Give up this node's copies of those digests that other nodes hold as well and will go on
        holding, and say which. Their blobs are doomed."""
        return self._engine.end_copies(digests, self._membership.staying())

    def held_elsewhere(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of the digests that others hold as well and will go on holding; none of them while
        the server does not answer."""
        others = self._membership.staying().keys()
        try:
            found = self._engine.known_copies(digests)
        except KvfsError as error:
            log.info("who else has what is not known: %s", error)
            return set()
        return {digest for digest, ids in zip(digests, found, strict=True) if ids & others}

    def copies(self, digests: Sequence[bytes]) -> list[list[Holder]]:
        """Which nodes have the bytes of each digest, this one among them. Raises `Unavailable`."""
        known = {member.node_id: member for member in self._membership.present}
        return [
            [self._holder(node_id, known.get(node_id)) for node_id in sorted(ids)]
            for ids in self._engine.ask_copies(digests)
        ]

    def _holder(self, node_id: bytes, member: Member | None) -> Holder:
        is_this = node_id == self._membership.me.node_id
        if member is None:
            return Holder(node_id, HolderState.GONE, is_this=is_this)
        state = HolderState.LEAVING if member.is_leaving else HolderState.PRESENT
        return Holder(node_id, state, member.host, member.address, member.store, is_this)
