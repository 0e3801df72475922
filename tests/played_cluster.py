"""One node of a cluster whose others are played, for tests of its tasks on a clock that jumps."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import trio
import trio.testing

from kvfs.cluster.membership import Membership
from kvfs.cluster.takers import Takers
from kvfs.config import MIB
from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.contract import Blob, HeldPath, Inode
from kvfs.meta.members import Member, Members
from kvfs.meta.redis import RedisEngine
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Health

FILE = 0o100644


def node_id(number: int) -> bytes:
    return bytes([number]) * 16


ME = node_id(0)


@dataclass
class Peer:
    """Another node: it fetches what it is told to, if it has room."""

    member: Member
    world: "World"
    free_bytes: int = 1000 * MIB
    is_away: bool = False
    is_deaf: bool = False  # it takes hints and does nothing
    heard: list[bytes] = field(default_factory=list)
    spare_only: set[bool] = field(default_factory=set)  # as the hints said

    def hint(self, digests: Sequence[bytes], deadline_s: float, *, spare_only: bool) -> None:
        if self.is_away:
            raise Unavailable("away")
        self.spare_only.add(spare_only)
        self.heard += digests
        for digest in digests:
            if not self.is_deaf:
                self.free_bytes -= self.world.sizes[digest]
                self.world.held.setdefault(digest, set()).add(self.member.node_id)

    def health(self, deadline_s: float) -> Health:
        if self.is_away:
            raise Unavailable("away")
        return Health(max(0, self.free_bytes), 0.0, 1.0)

    def abandon(self) -> None:
        pass


class World:
    """This node, number 0, and others; what each holds. Plays the engine and the members' list."""

    def __init__(self, others: int) -> None:
        members = [
            Member(node_id(n), f"h{n}:1", "", f"h{n}", f"/s{n}", 1) for n in range(others + 1)
        ]
        self.me = members[0]
        self.peers = {m.node_id: Peer(m, self) for m in members[1:]}
        self.held: dict[bytes, set[bytes]] = {}
        self.sizes: dict[bytes, int] = {}
        self.paths: dict[bytes, bytes] = {}
        self.is_away = False
        self.is_list_away = False
        self.asked = 0  # digests, of the server
        self.membership = Membership(cast(Members, self), self.me, {}, self.connect)
        self.takers = Takers(self.membership)
        self.open_blobs: set[bytes] = set()
        self.directories: list[object] = [object()]
        self.engine = cast(RedisEngine, self)

    def connect(self, member: Member) -> PeerClient:
        if member.address == "of no such form":
            raise InvalidInput(member.address, "is no address")
        return cast(PeerClient, self.peers[member.node_id])

    def store(self, number: int, path: bytes, size_bytes: int = MIB, by: int = 0) -> Inode:
        digest = number.to_bytes(16, "big")
        self.held.setdefault(digest, set()).add(node_id(by))
        self.sizes[digest], self.paths[digest] = size_bytes, path
        return Inode(number, FILE, 0, 0, 1, size_bytes, 0, 0, 0, digest=digest)

    def end(self, peer: bytes) -> None:
        """A node is gone with all that it has."""
        self.peers[peer].is_away = True

    def counts(self) -> list[int]:
        alive = {ME} | {i for i, peer in self.peers.items() if not peer.is_away}
        return [len(held & alive) for _, held in sorted(self.held.items())]

    # As the list of members.
    was_away = False

    def renew(self) -> tuple[Member, ...]:
        if self.is_list_away:
            raise Unavailable("the metadata server does not answer")
        return (self.me, *(p.member for p in self.peers.values() if not p.is_away))

    def describe(self, me: Member) -> None:
        self.me = me

    # As the engine.
    def _ask(self) -> None:
        if self.is_away:
            raise Unavailable("the metadata server does not answer")

    def ask_copies(self, digests: Sequence[bytes]) -> list[set[bytes]]:
        self._ask()
        self.asked += len(digests)
        return [set(self.held.get(digest, ())) for digest in digests]

    known_copies = ask_copies

    def own_blobs(self, after: bytes, limit: int) -> list[Blob]:
        mine = sorted(d for d, held in self.held.items() if ME in held and d > after)
        return [Blob(d, self.sizes[d], self.sizes[d], 0, 1) for d in mine[:limit]]

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        return [Blob(d, 1, 1, 0, 1) if ME in self.held.get(d, ()) else None for d in digests]

    def held_paths(self, digest: bytes, after: Any, limit: int) -> list[HeldPath]:
        self._ask()
        path = self.paths.get(digest)
        return [HeldPath(1, 1, b"f", path)] if path else []


async def renew_always(world: World) -> None:
    while True:
        with suppress(Unavailable):
            await world.membership.renew()
        await trio.sleep(0.5)
