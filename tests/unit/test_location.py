"""Which nodes are asked for a file."""

import random
from collections.abc import Collection
from dataclasses import replace
from typing import cast

from kvfs.cluster.location import Location
from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_HOLDERS_ASKED_MAX
from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.members import Member
from kvfs.meta.redis import RedisEngine
from kvfs.replicate import HolderState


class FakeEngine:
    def __init__(self, held_by: list[bytes]) -> None:
        self._held_by = held_by
        self.others: set[bytes] = set()
        self.is_away = False

    def copies(self, digest: bytes) -> list[bytes]:
        return self._held_by

    def known_copies(self, digests: list[bytes]) -> list[set[bytes]]:
        if self.is_away:
            raise Unavailable("the server does not answer")
        return [set(self._held_by) for _ in digests]

    ask_copies = known_copies

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

    @property
    def me(self) -> Member:
        return self.members[0]

    @property
    def present(self) -> list[Member]:
        return self.members

    def others(self) -> dict[bytes, Member]:
        return {member.node_id: member for member in self.members[1:]}

    def staying(self) -> dict[bytes, Member]:
        return {i: m for i, m in self.others().items() if not m.is_leaving}

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


def test_a_copy_on_a_node_that_leaves_is_read_but_not_counted_on() -> None:
    engine = FakeEngine([bytes([n]) * 16 for n in (0, 1, 9)])
    membership = FakeMembership(3)
    place = location(engine, membership)
    assert place.held_elsewhere([b"d", b"e"]) == {b"d", b"e"}
    membership.members[1] = replace(membership.members[1], is_leaving=True)
    assert place.held_elsewhere([b"d"]) == set()
    assert place.holders(b"d") == membership.members[1:2]
    place.give_up([b"d"])
    assert engine.others == {membership.members[2].node_id}
    states = [(h.node_id[0], h.state, h.is_this) for h in place.copies([b"d"])[0]]
    assert states == [
        (0, HolderState.PRESENT, True),
        (1, HolderState.LEAVING, False),
        (9, HolderState.GONE, False),
    ]


def test_without_the_server_nothing_is_known_to_be_elsewhere() -> None:
    engine = FakeEngine([bytes([1]) * 16])
    engine.is_away = True
    assert location(engine, FakeMembership(2)).held_elsewhere([b"d"]) == set()


def test_who_cannot_be_asked_keeps_nobody_from_asking_others() -> None:
    class Choosy(FakeMembership):
        def client(self, member: Member) -> Member:
            if member == self.members[1]:
                raise InvalidInput(member.address, "must have an IP address")
            return super().client(member)

    membership = Choosy(4)
    place = location(FakeEngine([m.node_id for m in membership.members]), membership)
    assert set(place.whom_to_ask(b"d")) == set(membership.members[2:])
