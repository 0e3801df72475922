"""Where clients are sent, and when a file that they read elsewhere is to be here as well."""

from collections.abc import Sequence
from typing import cast

import pytest

from kvfs.cluster.location import Location
from kvfs.cluster.referrals import Referrals
from kvfs.errors import Unavailable
from kvfs.meta.contract import Blob, Inode, MetaEngine
from kvfs.neighbours import Referral
from kvfs.peers.address import Address
from kvfs.peers.client import PeerClient
from kvfs.peers.messages import Range

DIGESTS = [bytes([n]) * 16 for n in range(4)]
HERE, KNOWN, UNKNOWN, NOWHERE = DIGESTS
ASKED, OTHER = b"a" * 16, b"o" * 16  # nodes that have the one that is known


class FakeMeta:
    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        return [Blob(d, 8, 4096, 0) if d == HERE else None for d in digests]


class FakePeer:
    def tickets(
        self, ranges: Sequence[Range], deadline_s: float
    ) -> tuple[Address, list[bytes | None]]:
        return Address("10.0.0.1", 7), [b"t" * 32 for _ in ranges]


class FakeLocation:
    """Of one file it is known who has it, of one it is not while the server is away."""

    def __init__(self) -> None:
        self.learned: list[Sequence[bytes]] = []
        self.peer = FakePeer()

    def learn(self, digests: Sequence[bytes]) -> None:
        self.learned.append(list(digests))

    def choose(self, digest: bytes) -> dict[bytes, PeerClient]:
        if digest == UNKNOWN:
            raise Unavailable("the metadata server does not answer")
        peer = cast(PeerClient, self.peer)
        return {ASKED: peer, OTHER: peer} if digest == KNOWN else {}


def inode(digest: bytes) -> Inode:
    return Inode(7, 0o100644, 0, 0, 1, 8, 0, 0, 0, digest=digest)


async def refer(
    copy_after: int, times: int
) -> tuple[list[dict[bytes, Referral]], list[bytes], FakeLocation]:
    """Who is referred each time, what is wanted here by then, and what was asked."""
    location, wanted = FakeLocation(), list[bytes]()
    referrals = Referrals(
        cast(MetaEngine, FakeMeta()), cast(Location, location), wanted.extend, copy_after
    )
    found = [await referrals.refer(map(inode, DIGESTS)) for _ in range(times)]
    return found, wanted, location


async def test_what_is_elsewhere_as_far_as_is_known_is_referred() -> None:
    found, _, location = await refer(0, 1)
    assert found == [{KNOWN: Referral((ASKED, OTHER), "10.0.0.1:7", b"t" * 32)}]
    assert location.learned == [[KNOWN, UNKNOWN, NOWHERE]]  # in one go


@pytest.mark.parametrize(("copy_after", "wanted"), [(0, 0), (1, 5), (2, 2), (5, 1), (6, 0)])
async def test_what_is_read_again_and_again_is_wanted_here(copy_after: int, wanted: int) -> None:
    _, asked_for, _ = await refer(copy_after, 5)
    assert asked_for == [KNOWN] * wanted
