"""Who counts as there when the list of members was lost."""

from typing import cast

import trio
import trio.testing

from kvfs.cluster.membership import Membership
from kvfs.config import CLUSTER_LEASE_S
from kvfs.meta.members import Member, Members
from kvfs.peers.client import PeerClient

ME, A, B = (Member(bytes([n]) * 16, f"10.0.0.{n}:1", "", "", "", 0) for n in range(3))


class Listed:
    """The server's list, as a test wants it."""

    def __init__(self) -> None:
        self.listed: tuple[Member, ...] = (ME,)
        self.was_away = False

    def renew(self) -> tuple[Member, ...]:
        return self.listed


def others_after(*lists: tuple[tuple[Member, ...], bool, float]) -> list[set[bytes]]:
    """The others that count after each renewal: what is listed, whether this node was away, and
    how long it is since the one before."""
    found = []

    async def run() -> None:
        members = Listed()
        membership = Membership(
            cast(Members, members), ME, {}, lambda member: cast(PeerClient, None)
        )
        for listed, was_away, passed_s in lists:
            clock.jump(passed_s)
            members.listed, members.was_away = listed, was_away
            await membership.renew()
            found.append(set(membership.others()))

    clock = trio.testing.MockClock()
    trio.run(run, clock=clock)
    return found


def test_who_goes_is_gone_at_once() -> None:
    found = others_after(((ME, A, B), False, 0), ((ME, B), False, 1))
    assert found == [{A.node_id, B.node_id}, {B.node_id}]


def test_who_is_not_listed_yet_after_all_were_lost_counts_for_a_while() -> None:
    found = others_after(
        ((ME, A, B), False, 0),
        ((ME,), True, 1),
        ((ME, A), False, 1),
        ((ME, A), False, CLUSTER_LEASE_S),
    )
    assert found == [
        {A.node_id, B.node_id},
        {A.node_id, B.node_id},
        {A.node_id, B.node_id},
        {A.node_id},
    ]


def test_who_came_back_and_goes_then_is_gone_at_once() -> None:
    found = others_after(
        ((ME, A), False, 0), ((ME,), True, 1), ((ME, A), False, 1), ((ME,), False, 1)
    )
    assert found[1:] == [{A.node_id}, {A.node_id}, set()]


def test_who_is_missed_counts_no_longer_for_being_missed_again() -> None:
    half_s = 0.6 * CLUSTER_LEASE_S
    found = others_after(
        ((ME, A), False, 0), ((ME,), True, 1), ((ME,), True, half_s), ((ME,), True, half_s)
    )
    assert found == [{A.node_id}, {A.node_id}, {A.node_id}, set()]
