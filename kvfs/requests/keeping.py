"""What a person has done to files and to the store: pinned, evicted, warmed, verified, cleaned,
rebuilt."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvfs.arguments import checked_paths
from kvfs.config import WARM_REPLY_S, WARM_WINDOW_FILES
from kvfs.errors import Corrupt
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.requests.session import Operations, Session
from kvfs.requests.turns import in_turns
from kvfs.upkeep import collect_garbage, rebuild
from kvfs.warm import Warmth

# How many items are worked on before everyone else has a turn: a few milliseconds' worth.
_PINNED_AT_ONCE = 32
_EVICTED_AT_ONCE = 16
_WARMED_AT_ONCE = 256


async def _set_pinned(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    meta = session.node.meta
    pinned = 0
    async for part in in_turns(checked_paths(arguments[0]), _PINNED_AT_ONCE):
        for inode in meta.resolve(part):
            if inode is not None and inode.is_regular:
                meta.set_pinned(inode.ino, arguments[1])
                pinned += 1
    return pinned


async def _evict(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return (await _evict_copies(session, arguments, descriptors))[0]


async def _evict_copies(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """How many were evicted, and how many of these tiers or other nodes have: their names stay."""
    evicted = named = 0
    async for part in in_turns(checked_paths(arguments[0]), _EVICTED_AT_ONCE):
        inos = {
            inode.ino
            for inode in session.node.meta.resolve(part)
            if inode is not None and inode.is_published and not inode.pinned
        }
        named += session.node.drop_files(list(inos))
        evicted += len(inos)
    return [evicted, named]


async def _warm(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """How near each file is after a moment, in which what is not here is on its way; a `Warmth`."""
    node = session.node
    inodes: list[Inode | None] = []
    async for part in in_turns(checked_paths(arguments[0], WARM_WINDOW_FILES), _WARMED_AT_ONCE):
        inodes += node.meta.resolve(part)
    published = [inode for inode in inodes if inode is not None and inode.is_published]
    here = _here(node, published)
    node.renew([inode.ino for inode in published if inode.digest in here])
    away = [inode for inode in published if inode.digest not in here]
    nearness = dict.fromkeys(here, Warmth.HERE)
    if away and node.ahead is not None:
        nearness |= dict.fromkeys(await node.ahead.warm(away, WARM_REPLY_S), Warmth.COMING)
        nearness |= dict.fromkeys(_here(node, away), Warmth.BROUGHT)
    return [
        nearness.get(inode.digest, Warmth.MISSING)
        if inode is not None and inode.is_published
        else Warmth.GONE
        for inode in inodes
    ]


def _here(node: Node, inodes: Sequence[Inode]) -> set[bytes]:
    digests = [inode.digest for inode in inodes]
    return {d for d, is_here in zip(digests, node.is_here(digests), strict=True) if is_here}


async def _verify(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return [await _verify_one(session.node, path) for path in checked_paths(arguments[0])]


async def _verify_one(node: Node, path: bytes) -> bool | str | None:
    """A text says why a file cannot be read, which says nothing of its bytes."""
    inode = node.meta.resolve([path])[0]  # one by one: it may go while others are read
    if inode is None or not inode.is_published:
        return None
    if node.contents.directory_of(inode.digest) is None:
        is_alone = node.neighbours is None and node.tiering is None
        return "its directory is not there" if is_alone else None
    try:
        fd = node.contents.open_unchecked(inode)
        if fd is None:
            return False
        os.close(fd)
        await node.contents.check(inode.digest, again=True)
    except Corrupt:
        return False
    except OSError as error:
        node.contents.note_unreadable(inode.digest, error)
        return error.strerror or "cannot be read"
    return True


async def _gc(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return asdict(await collect_garbage(session.node))


async def _rebuild(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return await rebuild(session.node)


OPERATIONS: Operations = {
    "set_pinned": ((list, bool), _set_pinned),
    "evict": ((list,), _evict),
    "evict_copies": ((list,), _evict_copies),
    "warm": ((list,), _warm),
    "verify": ((list,), _verify),
    "gc": ((), _gc),
    "rebuild": ((), _rebuild),
}
