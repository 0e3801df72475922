"""What an engine asks before and while it reads: which files are there, their descriptors, and that
they were used, or found corrupt."""

from typing import Any

import trio

from kvfs.arguments import checked_digest, checked_path, checked_paths
from kvfs.config import BATCH_ITEMS_MAX, BRING_WAIT_S, DESCRIPTORS_PER_MESSAGE_MAX
from kvfs.errors import Corrupt, InvalidInput
from kvfs.located import COMING
from kvfs.node import Node
from kvfs.requests.session import Operations, Session
from kvfs.requests.turns import in_turns
from kvfs.wire import unpack_chunk_keys

_TOUCHED_AT_ONCE = 256  # before everyone else has a turn: a few milliseconds' worth


async def _sizes(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return _counted(session.node, session.node.meta.sizes(checked_paths(arguments[0])))


async def _chunk_sizes(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    namespace, *fields = arguments
    checked_path(namespace)
    keys = unpack_chunk_keys(fields)
    hashes = len(keys.hashes) // keys.hash_bytes  # that many, also without parts to make keys of
    if max(len(keys), hashes) > BATCH_ITEMS_MAX:
        raise InvalidInput("keys", f"are {len(keys)}; ask for at most {BATCH_ITEMS_MAX} at a time")
    return _counted(session.node, session.node.meta.chunk_sizes(namespace, keys))


def _counted(node: Node, sizes: list[int | None]) -> list[int | None]:
    node.counters.lookups += len(sizes)
    node.counters.lookup_hits += len(sizes) - sizes.count(None)
    return sizes


async def _open(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """Size, digest and directory of each published file, whose descriptors go along. What is on its
    way here is waited for as long as the client says, and goes on to come."""
    paths, is_use, wait_s = arguments
    if not 0 <= wait_s <= BRING_WAIT_S:
        raise InvalidInput("wait", f"is {wait_s} s; from 0 to {BRING_WAIT_S} s are answered")
    node = session.node
    found = node.meta.resolve(checked_paths(paths, DESCRIPTORS_PER_MESSAGE_MAX))
    with trio.move_on_after(wait_s) as waiting:
        await node.bring(inode for inode in found if inode is not None)
    opened: list[list[Any] | int | None] = []
    used = []
    for inode in found:
        fd = None
        if inode is not None and inode.is_published:
            fd = node.contents.open_inode(inode)
        if inode is None or fd is None:
            is_coming = waiting.cancelled_caught and inode is not None and inode.is_published
            opened.append(COMING if is_coming else None)
            continue
        descriptors.append(fd)
        used.append(inode.ino)
        blob = node.meta.blobs([inode.digest])[0]
        assert blob is not None, "it was opened just now"
        opened.append([inode.size_bytes, inode.digest, blob.directory])
    if is_use:
        node.touch(used, session.reader)
    return opened


async def _report_corrupt(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    digest = checked_digest(arguments[0])
    try:
        await session.node.contents.check(digest, again=True)
    except Corrupt:
        return True
    return False


async def _touch(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    # The last first, so that the first of all is the most recent.
    async for part in in_turns(checked_paths(arguments[0])[::-1], _TOUCHED_AT_ONCE):
        found = session.node.meta.resolve(part[::-1])
        session.node.touch([inode.ino for inode in found if inode is not None])
    return None


OPERATIONS: Operations = {
    "sizes": ((list,), _sizes),
    "chunk_sizes": ((bytes, bytes, int, list), _chunk_sizes),
    "open": ((list, bool, float), _open),
    "report_corrupt": ((bytes,), _report_corrupt),
    "touch": ((list,), _touch),
}
