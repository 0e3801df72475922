"""The other nodes as takers of copies: how much room each has, and the hints that they are sent.

A hint is no order: who gets one looks for itself whether it wants the bytes. Words to peers are
said in worker threads, each with a deadline; a peer that does not answer has no room.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from kvfs.cluster.membership import Membership
from kvfs.config import PEER_ROOM_S, PEER_ROOMS_ASKED_MAX, PEER_WORD_S
from kvfs.errors import KvfsError
from kvfs.meta.members import Member
from kvfs.replicate import rank

_WORDS_MAX = 8  # said at the same time
_NO_ROOM = -1  # not even for a file without bytes
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Room:
    """What a node said that it could still store, less what it was sent since."""

    free_bytes: int
    until_s: float


class Takers:
    """In the node's thread."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rooms: dict[bytes, _Room] = {}
        self._owed: Counter[bytes] = Counter()  # bytes on their way to a node
        self._limiter = trio.CapacityLimiter(_WORDS_MAX)

    async def with_room(
        self, targets: Sequence[bytes], count: int, size_bytes: int
    ) -> tuple[bytes, ...]:
        """The first so many of some nodes that have room for a blob, which is then counted."""
        found: list[bytes] = []
        targets = targets[:PEER_ROOMS_ASKED_MAX]
        while len(found) < count and targets:
            step = count - len(found)
            await self._ask_rooms(targets[:step])
            found += [node for node in targets[:step] if self._take_room(node, size_bytes)]
            targets = targets[step:]
        return tuple(found)

    async def roomiest(self, size_bytes: int, but: Collection[bytes] = ()) -> bytes | None:
        """The node that has most room, if it is enough for a blob, which is then on its way there
        until `settle`. Of a large cluster some are asked, and more where they are full."""
        mine = self._membership.me.node_id
        left = rank(mine, self._membership.staying().keys() - set(but))
        while left:
            asked, left = left[:PEER_ROOMS_ASKED_MAX], left[PEER_ROOMS_ASKED_MAX:]
            await self._ask_rooms(asked)
            best = max(asked, key=self._room_of)
            if self._take_room(best, size_bytes):
                self._owed[best] += size_bytes
                return best
        return None

    def settle(self, node_id: bytes, size_bytes: int) -> None:
        """A blob has arrived that was on its way to a node, or will not."""
        self._owed[node_id] -= size_bytes
        self._owed = +self._owed

    def forget_rooms(self) -> None:
        """Ask anew who has room."""
        self._rooms.clear()

    async def hint(
        self, wanted: Mapping[bytes, Sequence[bytes]], *, spare_only: bool = False
    ) -> None:
        """Tell nodes of digests that they are to have, with `spare_only` at the cost of nothing
        that they have; one that is away is left out."""
        members = self._membership.staying()
        async with trio.open_nursery() as nursery:
            for node_id, digests in wanted.items():
                if node_id in members:
                    nursery.start_soon(self._hint, members[node_id], digests, spare_only)

    async def _hint(self, member: Member, digests: Sequence[bytes], spare_only: bool) -> None:
        try:
            client = self._membership.client(member)
            await trio.to_thread.run_sync(
                partial(client.hint, digests, PEER_WORD_S, spare_only=spare_only),
                limiter=self._limiter,
                abandon_on_cancel=True,
            )
        except KvfsError as error:
            log.info("%s was told nothing of %d copies: %s", member.address, len(digests), error)

    def _room_of(self, node_id: bytes) -> int:
        room = self._rooms.get(node_id)
        return _NO_ROOM if room is None else room.free_bytes

    def _take_room(self, node_id: bytes, size_bytes: int) -> bool:
        """Count a blob, if there is room for it."""
        room = self._rooms.get(node_id)
        if room is None or room.free_bytes < size_bytes:
            return False
        room.free_bytes -= size_bytes
        return True

    async def _ask_rooms(self, node_ids: Collection[bytes]) -> None:
        """Know of these nodes how much room they have."""
        now_s = trio.current_time()
        self._rooms = {node: room for node, room in self._rooms.items() if room.until_s > now_s}
        async with trio.open_nursery() as nursery:
            for node_id in node_ids:
                member = self._membership.staying().get(node_id)
                if member is not None and node_id not in self._rooms:
                    nursery.start_soon(self._ask_room, member)

    async def _ask_room(self, member: Member) -> None:
        try:
            client = self._membership.client(member)
            health = await trio.to_thread.run_sync(
                client.health, PEER_WORD_S, limiter=self._limiter, abandon_on_cancel=True
            )
            free_bytes = health.free_bytes
        except KvfsError as error:
            log.info("%s does not say how much room it has: %s", member.address, error)
            free_bytes = _NO_ROOM
        free_bytes -= self._owed[member.node_id]
        self._rooms[member.node_id] = _Room(free_bytes, trio.current_time() + PEER_ROOM_S)
