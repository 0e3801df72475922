"""What a node answers its clients: one handler an operation, and the types of its arguments."""

import errno
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from kvfs.arguments import (
    checked_digest,
    checked_digests,
    checked_ino,
    checked_limit,
    checked_path,
    checked_paths,
)
from kvfs.config import (
    BATCH_ITEMS_MAX,
    CHUNK_BYTES_MAX,
    COPIES_ASKED_MAX,
    DESCRIPTORS_PER_MESSAGE_MAX,
    FRAME_BYTES_MAX,
    STAGES_PER_CLIENT_MAX,
)
from kvfs.errors import Corrupt, InvalidInput, NamespaceError
from kvfs.meta.contract import ChunkInfo, Inode
from kvfs.names import check_publishable, escape
from kvfs.node import Node, Referral
from kvfs.stage import Content, Stage
from kvfs.status import status_of
from kvfs.stored import allocated_bytes
from kvfs.upkeep import collect_garbage, rebuild
from kvfs.wire import (
    PROTOCOL,
    Request,
    check_batch,
    pack_chunk_entry,
    pack_entry,
    pack_holder,
    pack_record,
    unpack_chunk_keys,
    unpack_record,
)


@dataclass(slots=True, eq=False)
class Session:
    """One client's connection: who it is, and the stages that it has not published yet."""

    node: Node
    uid: int
    gid: int
    stages: dict[int, Stage] = field(default_factory=dict)
    # Begins anywhere, so that a token of an earlier connection is none of this one's.
    serial: int = field(default_factory=lambda: secrets.randbits(48))

    def close(self) -> None:
        """Drop what the client left unfinished."""
        for stage in self.stages.values():
            self.node.discard(stage)
        self.stages.clear()


# How many items are worked on before everyone else has a turn: a few milliseconds' worth.
_TOUCHED_AT_ONCE = 256
_LISTED_AT_ONCE = 256
_PATHS_AT_ONCE = 64
_PINNED_AT_ONCE = 32
_EVICTED_AT_ONCE = 16

Handler = Callable[[Session, list[Any], list[int]], Awaitable[Any]]


async def answer(session: Session, request: Request, descriptors: list[int]) -> Any:
    """Do what a client asks; the result. Descriptors for the client are added to `descriptors`, and
    are the caller's to close. Raises `KvfsError` and OSError."""
    handler = _HANDLERS.get(request.operation)
    if handler is None:
        raise InvalidInput(
            request.operation[:80], "no such operation; client and node differ in version"
        )
    kinds, function = handler
    arguments = request.arguments
    if len(arguments) != len(kinds) or any(
        type(value) is not kind for value, kind in zip(arguments, kinds, strict=True)
    ):
        raise InvalidInput(request.operation, "wrong arguments; client and node differ in version")
    session.node.refresh()
    return await function(session, arguments, descriptors)


def _existing_inode(node: Node, path: bytes) -> Inode:
    """What a path names: ENOENT when it is nothing."""
    inode = node.meta.resolve([checked_path(path)])[0]
    if inode is None:
        raise NamespaceError(errno.ENOENT, path)
    return inode


# The handlers, each named as its operation.
async def _hello(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    if arguments[0] != PROTOCOL:
        raise InvalidInput(
            "hello", f"the client speaks protocol {arguments[0]}, this node {PROTOCOL}; upgrade one"
        )
    return [PROTOCOL, session.node.store_id]


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
    paths, is_use = arguments
    found = session.node.meta.resolve(checked_paths(paths, DESCRIPTORS_PER_MESSAGE_MAX))
    return await _open_found(session.node, found, {}, descriptors, is_use=is_use)


async def _open_nearest(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node = session.node
    found = node.meta.resolve(checked_paths(arguments[0], DESCRIPTORS_PER_MESSAGE_MAX))
    referrals = await node.refer(inode for inode in found if inode is not None)
    return await _open_found(node, found, referrals, descriptors, is_use=True)


async def _open_found(
    node: Node,
    found: Sequence[Inode | None],
    referrals: Mapping[bytes, Referral],
    descriptors: list[int],
    *,
    is_use: bool,
) -> list[list[Any] | None]:
    """Size and digest of each published file, and of those that are referred to another node where
    and by which ticket; the others come here and get a descriptor."""
    opened: list[list[Any] | None] = []
    used = []
    await node.bring(i for i in found if i is not None and i.digest not in referrals)
    for inode in found:
        if inode is None or not inode.is_published:
            opened.append(None)
        elif (referral := referrals.get(inode.digest)) is not None:
            opened.append([inode.size_bytes, inode.digest, referral.address, referral.ticket])
        elif (fd := node.open_inode(inode)) is not None:
            descriptors.append(fd)
            used.append(inode.ino)
            opened.append([inode.size_bytes, inode.digest])
        else:
            opened.append(None)
    if is_use:
        node.touch(used)
    return opened


async def _stage(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    node = session.node
    sizes = arguments[0]
    check_batch(sizes, int, DESCRIPTORS_PER_MESSAGE_MAX, "sizes")
    if len(session.stages) + len(sizes) > STAGES_PER_CLIENT_MAX:
        raise InvalidInput(
            "stage", f"at most {STAGES_PER_CLIENT_MAX} files at a time; publish first"
        )
    tokens: list[int] = []
    try:
        for size_bytes in sizes:
            if not 0 <= size_bytes <= CHUNK_BYTES_MAX:
                raise InvalidInput("size", f"{size_bytes} is not in 0..{CHUNK_BYTES_MAX}")
            stage = node.stage(size_bytes)
            session.serial += 1
            session.stages[session.serial] = stage
            tokens.append(session.serial)
            await node.reserve(stage, size_bytes)
        for token in tokens:
            descriptors.append(os.dup(session.stages[token].fd))
    except BaseException:
        _drop_stages(session, tokens)
        raise
    return tokens


def _drop_stages(session: Session, tokens: list[int]) -> None:
    for token in tokens:
        stage = session.stages.pop(token, None)
        if stage is not None:
            session.node.discard(stage)


async def _discard(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    check_batch(arguments[0], int, STAGES_PER_CLIENT_MAX, "tokens")
    _drop_stages(session, arguments[0])
    return None


async def _publish(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    check_batch(arguments[0], list, STAGES_PER_CLIENT_MAX, "files")
    node = session.node
    try:
        contents = [_content(session, item) for item in arguments[0]]
        for content in contents:  # a client may write more than it staged for
            written_bytes = allocated_bytes(os.fstat(content.stage.fd))
            if written_bytes > content.stage.reserved_bytes:
                await node.reserve(content.stage, written_bytes)
        if len({id(content.stage) for content in contents}) != len(contents):
            raise InvalidInput("publish", "a token is named twice")
        if node.config.fsync:
            for content in contents:
                await trio.to_thread.run_sync(os.fsync, content.stage.fd)
        await node.publisher.prepare(contents)
        node.publisher.publish(contents)
    finally:
        # Used up, whatever failed: a client that was refused does not say what is left.
        tokens = [item[0] for item in arguments[0] if item and type(item[0]) is int]
        for stage in [session.stages.pop(token) for token in set(tokens) & session.stages.keys()]:
            if stage.is_open:
                node.discard(stage)
            else:
                node.reclaim.close(stage.fd)
    return None


def _content(session: Session, item: list[Any]) -> Content:
    if list(map(type, item[:4])) != [int, bytes, bytes, int] or len(item) != 5:
        raise InvalidInput("publish", "is not [token, path, digest, size, chunk]")
    token, path, digest, size_bytes, chunk = item
    stage = session.stages.get(token)
    if stage is None:
        raise InvalidInput("token", f"{token} is not staged on this connection")
    checked_digest(digest)
    if size_bytes > CHUNK_BYTES_MAX:
        raise InvalidInput("size", f"{size_bytes} is more than {CHUNK_BYTES_MAX}")
    if os.fstat(stage.fd).st_size != size_bytes:
        raise InvalidInput("size", f"the staged file does not hold {size_bytes} bytes")
    return Content(
        stage,
        digest,
        size_bytes,
        session.node.now_ns(),
        path=check_publishable(path),
        uid=session.uid,
        gid=session.gid,
        chunk=None if chunk is None else unpack_record(ChunkInfo, chunk),
    )


async def _report_corrupt(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    digest = checked_digest(arguments[0])
    try:
        await session.node.check_content(digest, again=True)
    except Corrupt:
        return True
    return False


async def _touch(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    # The last first, so that the first of all is the most recent.
    async for part in _in_turns(checked_paths(arguments[0])[::-1], _TOUCHED_AT_ONCE):
        found = session.node.meta.resolve(part[::-1])
        session.node.touch([inode.ino for inode in found if inode is not None])
    return None


async def _stat(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    inode = session.node.meta.resolve([checked_path(arguments[0])])[0]
    return None if inode is None else pack_record(inode)


async def _list(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    path, after, limit = arguments
    meta = session.node.meta
    parent = _existing_inode(session.node, path).ino
    listed: list[Any] = []
    async for wanted in _in_turns(range(checked_limit(limit)), _LISTED_AT_ONCE):
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
    async for part in _in_turns(parents, _LISTED_AT_ONCE // 4):
        for parent in part:
            listed.append(await _list_children(session.node, ino, parent, 0, limit))
    return listed


async def _list_children(
    node: Node, namespace: int, parent: bytes, after: int, limit: int
) -> list[Any]:
    listed: list[Any] = []
    async for wanted in _in_turns(range(limit), _LISTED_AT_ONCE):
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


async def _paths_of(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    """A page may be shorter than its limit: an empty one is the end."""
    digest, ino, parent, name, limit = arguments
    checked_digest(digest)
    after = (checked_ino(ino), checked_ino(parent), name)
    listed: list[Any] = []
    listed_bytes = 0
    async for wanted in _in_turns(range(checked_limit(limit)), _PATHS_AT_ONCE):
        page = session.node.meta.held_paths(digest, after, len(wanted))
        listed += [[held.ino, held.parent, held.name, held.path] for held in page]
        listed_bytes += sum(len(held.path) for held in page)
        if len(page) < len(wanted) or listed_bytes > FRAME_BYTES_MAX // 4:
            break
        after = (page[-1].ino, page[-1].parent, page[-1].name)
    return listed


async def _set_pinned(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    meta = session.node.meta
    pinned = 0
    async for part in _in_turns(checked_paths(arguments[0]), _PINNED_AT_ONCE):
        for inode in meta.resolve(part):
            if inode is not None and inode.is_regular:
                meta.set_pinned(inode.ino, arguments[1])
                pinned += 1
    return pinned


async def _evict(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    evicted = 0
    async for part in _in_turns(checked_paths(arguments[0]), _EVICTED_AT_ONCE):
        inos = {
            inode.ino
            for inode in session.node.meta.resolve(part)
            if inode is not None and inode.is_published and not inode.pinned
        }
        session.node.drop_files(list(inos))
        evicted += len(inos)
    return evicted


async def _in_turns(items: Sequence[Any], size: int) -> AsyncIterator[Any]:
    """Parts of a long list; everyone else has a turn between them."""
    for start in range(0, len(items), size):
        if start:
            await trio.lowlevel.checkpoint()
        yield items[start : start + size]


async def _verify(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return [await _verify_one(session.node, path) for path in checked_paths(arguments[0])]


async def _verify_one(node: Node, path: bytes) -> bool | str | None:
    """A text says why a file cannot be read, which says nothing of its bytes."""
    inode = node.meta.resolve([path])[0]  # one by one: it may go while others are read
    if inode is None or not inode.is_published:
        return None
    if node.directory_of(inode.digest) is None:
        return None if node.neighbours is not None else "its directory is not there"
    try:
        fd = node.open_unchecked(inode)
        if fd is None:
            return False
        os.close(fd)
        await node.check_content(inode.digest, again=True)
    except Corrupt:
        return False
    except OSError as error:
        node.note_unreadable(inode.digest, error)
        return error.strerror or "cannot be read"
    return True


async def _gc(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return asdict(await collect_garbage(session.node))


async def _rebuild(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return await rebuild(session.node)


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


async def _leave(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    neighbours = session.node.neighbours
    if neighbours is None:
        home = escape(os.fsencode(session.node.config.home))
        raise InvalidInput(home, "is in no cluster, so there is nothing to leave")
    return neighbours.leave(begin=arguments[0])


async def _status(session: Session, arguments: list[Any], descriptors: list[int]) -> Any:
    return status_of(session.node)


_HANDLERS: dict[str, tuple[tuple[type, ...], Handler]] = {
    "hello": ((int,), _hello),
    "sizes": ((list,), _sizes),
    "chunk_sizes": ((bytes, bytes, int, list), _chunk_sizes),
    "open": ((list, bool), _open),
    "open_nearest": ((list,), _open_nearest),
    "stage": ((list,), _stage),
    "discard": ((list,), _discard),
    "publish": ((list,), _publish),
    "report_corrupt": ((bytes,), _report_corrupt),
    "touch": ((list,), _touch),
    "stat": ((bytes,), _stat),
    "list": ((bytes, bytes, int), _list),
    "children": ((bytes, bytes, int, int), _children),
    "children_of": ((bytes, list, int), _children_of),
    "chunk": ((bytes,), _chunk),
    "blobs": ((list,), _blobs),
    "paths_of": ((bytes, int, int, bytes, int), _paths_of),
    "set_pinned": ((list, bool), _set_pinned),
    "evict": ((list,), _evict),
    "verify": ((list,), _verify),
    "gc": ((), _gc),
    "rebuild": ((), _rebuild),
    "copies": ((list,), _copies),
    "leave": ((bool,), _leave),
    "status": ((), _status),
}
