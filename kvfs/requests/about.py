"""What a node says of itself and of its cluster, and leaving that."""

import os
from typing import Any

from kvfs.arguments import checked_digests
from kvfs.config import COPIES_ASKED_MAX
from kvfs.errors import InvalidInput
from kvfs.names import escape
from kvfs.requests.session import Operations, Session
from kvfs.status import status_of
from kvfs.wire import PROTOCOL, pack_holder


async def _hello(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    if arguments[0] != PROTOCOL:
        raise InvalidInput(
            "hello", f"the client speaks protocol {arguments[0]}, this node {PROTOCOL}; upgrade one"
        )
    return [PROTOCOL, session.node.store_id]


async def _status(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return status_of(session.node)


async def _copies(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """For each digest the numbers of its holders in the list that follows; None: no cluster."""
    digests = checked_digests(arguments[0])
    if len(digests) > COPIES_ASKED_MAX:
        raise InvalidInput("digests", f"are {len(digests)}; ask for {COPIES_ASKED_MAX} at a time")
    if session.node.neighbours is None:
        return None
    found = session.node.neighbours.copies(digests)
    holders = {holder.node_id: holder for copies in found for holder in copies}
    numbers = {node_id: number for number, node_id in enumerate(holders)}
    return [
        [[numbers[holder.node_id] for holder in copies] for copies in found],
        [pack_holder(holder) for holder in holders.values()],
    ]


async def _tiers_of(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """For each digest the names of the tiers that hold it; None for a node without tiers."""
    digests = checked_digests(arguments[0])
    tiering = session.node.tiering
    if tiering is None:
        return None
    holdings = tiering.holdings
    names = {one.number: one.name for one in tiering.tiers}
    return [
        [names[number] for number in holdings.numbers_of(mask)] for mask in holdings.masks(digests)
    ]


async def _leave(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    neighbours = session.node.neighbours
    if neighbours is None:
        home = escape(os.fsencode(session.node.config.home))
        raise InvalidInput(home, "is in no cluster, so there is nothing to leave")
    return neighbours.leave(begin=arguments[0])


OPERATIONS: Operations = {
    "hello": ((int,), _hello),
    "status": ((), _status),
    "copies": ((list,), _copies),
    "tiers_of": ((list,), _tiers_of),
    "leave": ((bool,), _leave),
}
