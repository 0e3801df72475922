"""What a client asks that reads from several places at once: where the bytes of files are, what the
node's tiers are, and tickets for what peers have."""

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from kvfs.arguments import checked_digest, checked_digests, checked_paths
from kvfs.config import (
    BATCH_ITEMS_MAX,
    CHUNK_BYTES_MAX,
    DESCRIPTORS_PER_MESSAGE_MAX,
    LOCATE_WAIT_S,
    PEER_TICKETS_ASKED_MAX,
    TIERS_MAX,
)
from kvfs.errors import InvalidInput, Unavailable
from kvfs.located import NOWHERE, LocatedFile, pack_file, pack_tier
from kvfs.meta.contract import DIGEST_BYTES, Inode
from kvfs.neighbours import Neighbours, Referral
from kvfs.node import Node
from kvfs.peers.messages import NODE_ID_BYTES, Range
from kvfs.requests.session import Operations, Session
from kvfs.requests.turns import in_turns
from kvfs.wire import check_batch

_EXPECTED_AT_ONCE = 256  # before everyone else has a turn: a few milliseconds' worth


async def _locate(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node = session.node
    inodes = node.meta.resolve(checked_paths(arguments[0], DESCRIPTORS_PER_MESSAGE_MAX))
    published = [inode for inode in inodes if inode is not None and inode.is_published]
    referrals = await node.refer(published)
    held = _numbers_of_tiers(node, [inode.digest for inode in published])
    with trio.move_on_after(LOCATE_WAIT_S) as waiting:
        await node.bring(i for i in published if i.digest not in referrals and not held[i.digest])
    places: dict[bytes, int] = {}
    files: list[Any] = []
    for inode in inodes:
        file = None
        if inode is not None and inode.is_published:
            referral = referrals.get(inode.digest)
            file = _located(session, inode, held[inode.digest], referral, descriptors)
            if file is None and waiting.cancelled_caught:  # it may still come
                file = LocatedFile(inode.size_bytes, inode.digest, None, NOWHERE, (), ())
        files.append(None if file is None else pack_file(file, places))
    return [node.started_ns, list(places), files]


def _located(
    session: Session,
    inode: Inode,
    tiers: tuple[int, ...],
    referral: Referral | None,
    descriptors: list[int],
) -> LocatedFile | None:
    """Where a file is, and a use of it, with its descriptor where it is here; None when it is
    nowhere."""
    node, size_bytes, digest = session.node, inode.size_bytes, inode.digest
    if referral is not None:
        node.note_read([inode.ino], session.reader)
        _note_elsewhere(node, size_bytes, tiers, is_at_peers=True)
        peers, address, ticket = referral.nodes, referral.address, referral.ticket
        return LocatedFile(size_bytes, digest, None, NOWHERE, tiers, peers, address, ticket)
    blob = node.meta.blobs([digest])[0]
    if blob is not None or not tiers:
        fd = node.contents.open_inode(inode)
        if fd is not None:
            descriptors.append(fd)
            node.touch([inode.ino], session.reader)
            assert blob is not None
            return LocatedFile(size_bytes, digest, fd, blob.directory, tiers, ())
    if not tiers:
        return None
    node.touch([inode.ino], session.reader)  # which counts for what stays in the tier
    _note_elsewhere(node, size_bytes, tiers, is_at_peers=False)
    return LocatedFile(size_bytes, digest, None, NOWHERE, tiers, ())


def _note_elsewhere(
    node: Node, size_bytes: int, tiers: tuple[int, ...], *, is_at_peers: bool
) -> None:
    if node.ahead is not None:
        mask = sum(1 << number for number in tiers)
        node.ahead.note_elsewhere(size_bytes, mask, is_at_peers=is_at_peers)


def _numbers_of_tiers(node: Node, digests: Sequence[bytes]) -> Mapping[bytes, tuple[int, ...]]:
    """Of the tiers that hold each digest, as far as the node knows."""
    tiering = node.tiering
    if tiering is None:
        return dict.fromkeys(digests, ())
    holdings = tiering.holdings
    masks = holdings.masks(digests)
    return {digest: holdings.numbers_of(mask) for digest, mask in zip(digests, masks, strict=True)}


async def _tiers(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node = session.node
    told = () if node.tiering is None else node.tiering.tiers
    return [node.started_ns, [pack_tier(one.number, one.config) for one in told]]


async def _expect(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """Whether anything is done about files that somebody will read."""
    ahead, meta, paths = session.node.ahead, session.node.meta, checked_paths(arguments[0])
    if ahead is None:
        return False
    async for part in in_turns(paths, _EXPECTED_AT_ONCE):
        ahead.expect(i for i in meta.resolve(part) if i is not None and i.is_published)
    return True


async def _note_gone(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """A client did not get blobs from tiers that should have them. The node asks these itself."""
    check_batch(arguments[0], list, BATCH_ITEMS_MAX, "blobs")
    gone = [_checked_gone(item) for item in arguments[0]]
    if session.node.tiering is not None:
        await session.node.tiering.ask_again(gone)
    return None


def _checked_gone(item: list[Any]) -> tuple[int, bytes]:
    if list(map(type, item)) != [int, bytes] or item[0] not in range(TIERS_MAX):
        raise InvalidInput("blob", "is not [number of a tier, digest]")
    return item[0], checked_digest(item[1])


async def _peer_tickets(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node_id, items = arguments
    check_batch(items, list, PEER_TICKETS_ASKED_MAX, "ranges")
    neighbours = _neighbours(session, node_id)
    address, tickets = await neighbours.tickets(node_id, [_checked_range(item) for item in items])
    return [address, tickets]


async def _peer_sizes(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node_id, digests = arguments
    checked_digests(digests)
    return await _neighbours(session, node_id).sizes_at(node_id, digests)


def _neighbours(session: Session, node_id: bytes) -> Neighbours:
    if len(node_id) != NODE_ID_BYTES:
        raise InvalidInput("node id", f"has {len(node_id)} bytes; {NODE_ID_BYTES} are needed")
    if session.node.neighbours is None:
        raise Unavailable("the node is in no cluster")
    return session.node.neighbours


def _checked_range(item: list[Any]) -> Range:
    if list(map(type, item)) == [bytes, int, int]:
        digest, offset, length = item
        is_inside = 0 <= offset < offset + length <= CHUNK_BYTES_MAX
        if len(digest) == DIGEST_BYTES and is_inside:
            return Range(digest, offset, length)
    raise InvalidInput("range", "is not [digest, offset, length] of bytes in a file")


OPERATIONS: Operations = {
    "expect": ((list,), _expect),
    "locate": ((list,), _locate),
    "tiers": ((), _tiers),
    "note_gone": ((list,), _note_gone),
    "peer_tickets": ((bytes, list), _peer_tickets),
    "peer_sizes": ((bytes, list), _peer_sizes),
}
