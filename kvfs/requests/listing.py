"""What is where: names in directories, chunks behind chunks, blobs, and the names of a digest."""

import errno
from typing import Any

from kvfs.arguments import checked_digest, checked_digests, checked_ino, checked_limit, checked_path
from kvfs.config import BATCH_ITEMS_MAX, FRAME_BYTES_MAX
from kvfs.errors import InvalidInput, NamespaceError
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.requests.session import Operations, Session
from kvfs.requests.turns import in_turns
from kvfs.wire import check_batch, pack_chunk_entry, pack_entry, pack_record

# How many items are worked on before everyone else has a turn: a few milliseconds' worth.
_LISTED_AT_ONCE = 256
_PATHS_AT_ONCE = 64


async def _stat(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    inode = session.node.meta.resolve([checked_path(arguments[0])])[0]
    return None if inode is None else pack_record(inode)


async def _list(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    path, after, limit = arguments
    meta = session.node.meta
    parent = _existing_inode(session.node, path).ino
    listed: list[Any] = []
    async for wanted in in_turns(range(checked_limit(limit)), _LISTED_AT_ONCE):
        page = meta.entries(parent, after, len(wanted))
        listed += map(pack_entry, page)
        if len(page) < len(wanted):
            break
        after = page[-1].name
    return listed


async def _children(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    namespace, parent, after, limit = arguments
    ino = _existing_inode(session.node, namespace).ino
    return await _list_children(session.node, ino, parent, checked_ino(after), checked_limit(limit))


async def _children_of(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    namespace, parents, limit = arguments
    check_batch(parents, bytes, BATCH_ITEMS_MAX, "parents")
    if len(parents) * checked_limit(limit) > BATCH_ITEMS_MAX:
        raise InvalidInput("limit", f"parents times limit exceed {BATCH_ITEMS_MAX}")
    ino = _existing_inode(session.node, namespace).ino
    listed = []
    async for part in in_turns(parents, _LISTED_AT_ONCE // 4):
        for parent in part:
            listed.append(await _list_children(session.node, ino, parent, 0, limit))
    return listed


async def _list_children(
    node: Node, namespace: int, parent: bytes, after: int, limit: int
) -> list[Any]:
    listed: list[Any] = []
    async for wanted in in_turns(range(limit), _LISTED_AT_ONCE):
        page = node.meta.children(namespace, parent, after, len(wanted))
        listed += map(pack_chunk_entry, page)
        if len(page) < len(wanted):
            break
        after = page[-1].inode.ino
    return listed


async def _chunk(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    inode = session.node.meta.resolve([checked_path(arguments[0])])[0]
    info = None if inode is None else session.node.meta.chunk(inode.ino)
    return None if info is None else pack_record(info)


async def _blobs(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    found = session.node.meta.blobs(checked_digests(arguments[0]))
    return [None if blob is None else pack_record(blob) for blob in found]


async def _is_here(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return session.node.is_here(checked_digests(arguments[0]))


async def _paths_of(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """A page may be shorter than its limit: an empty one is the end."""
    digest, ino, parent, name, limit = arguments
    checked_digest(digest)
    after = (checked_ino(ino), checked_ino(parent), name)
    listed: list[Any] = []
    listed_bytes = 0
    async for wanted in in_turns(range(checked_limit(limit)), _PATHS_AT_ONCE):
        page = session.node.meta.held_paths(digest, after, len(wanted))
        listed += [[held.ino, held.parent, held.name, held.path] for held in page]
        listed_bytes += sum(len(held.path) for held in page)
        if len(page) < len(wanted) or listed_bytes > FRAME_BYTES_MAX // 4:
            break
        after = (page[-1].ino, page[-1].parent, page[-1].name)
    return listed


def _existing_inode(node: Node, path: bytes) -> Inode:
    """What a path names: ENOENT when it is nothing."""
    inode = node.meta.resolve([checked_path(path)])[0]
    if inode is None:
        raise NamespaceError(errno.ENOENT, path)
    return inode


OPERATIONS: Operations = {
    "stat": ((bytes,), _stat),
    "list": ((bytes, bytes, int), _list),
    "children": ((bytes, bytes, int, int), _children),
    "children_of": ((bytes, list, int), _children_of),
    "chunk": ((bytes,), _chunk),
    "blobs": ((list,), _blobs),
    "is_here": ((list,), _is_here),
    "paths_of": ((bytes, int, int, bytes, int), _paths_of),
}
