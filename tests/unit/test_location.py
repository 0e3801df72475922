"""Which nodes are asked for a file."""

import random
from collections.abc import Collection
from typing import cast

from kvfs.cluster.location import Location
from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_HOLDERS_ASKED_MAX
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine


class FakeEngine:
    def __init__(self, held_by: list[bytes]) -> None:
        self._held_by = held_by
        self.others: set[bytes] = set()

    def copies(self, digest: bytes) -> list[bytes]:
        return self._held_by

    def end_copies(self, digests: list[bytes], others: Collection[bytes]) -> list[bytes]:
        self.others = set(others)
        return digests


class FakeMembership:
    """The first of the members is this node."""

    def __init__(self, count: int) -> None:
        self.members = [
            Member(bytes([n]) * 16, f"10.0.0.{n}:1", "", "", "", 0) for n in range(count)
        ]
        self.connected: set[Member] = set()

    def others(self) -> dict[bytes, Member]:
        return {member.node_id: member for member in self.members[1:]}

    def client(self, member: Member) -> Member:
        self.connected.add(member)
        return member


def location(engine: FakeEngine, membership: FakeMembership, seed: int = 1) -> Location:
    return Location(cast(RedisEngine, engine), cast(Membership, membership), random.Random(seed))


def test_who_holds_it_and_is_there_is_asked() -> None:
    engine = FakeEngine([bytes([n]) * 16 for n in (0, 2, 3, 9)])  # this node, and one that is gone
    membership = FakeMembership(5)
    place = location(engine, membership)
    assert place.holders(b"d") == membership.members[2:4]
    assert set(place.whom_to_ask(b"d")) == set(membership.members[2:4])
    assert place.give_up([b"d"]) == [b"d"]
    assert engine.others == {member.node_id for member in membership.members[1:]}


def test_of_what_everybody_has_few_are_connected_to_and_all_have_their_share() -> None:
    membership = FakeMembership(100)
    place = location(FakeEngine([m.node_id for m in membership.members]), membership)
    assert len(set(place.whom_to_ask(b"d"))) == CLUSTER_HOLDERS_ASKED_MAX
    assert len(membership.connected) == CLUSTER_HOLDERS_ASKED_MAX
    for _ in range(200):
        place.whom_to_ask(b"d")
    assert membership.connected == set(membership.members[1:])
