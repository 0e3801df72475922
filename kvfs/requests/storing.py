"""New files: staged, filled by the client, and published or dropped."""

import os
from typing import Any

import trio

from kvfs.arguments import checked_digest
from kvfs.config import CHUNK_BYTES_MAX, DESCRIPTORS_PER_MESSAGE_MAX, STAGES_PER_CLIENT_MAX
from kvfs.errors import InvalidInput
from kvfs.meta.contract import ChunkInfo
from kvfs.names import check_publishable
from kvfs.requests.session import Operations, Session
from kvfs.stage import Content
from kvfs.stored import allocated_bytes
from kvfs.wire import check_batch, unpack_record


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


OPERATIONS: Operations = {
    "stage": ((list,), _stage),
    "discard": ((list,), _discard),
    "publish": ((list,), _publish),
}
