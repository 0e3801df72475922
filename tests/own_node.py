"""What tests do to a node in their own process; the fixture `node` in tests/fault makes one."""

import os
from collections.abc import Callable
from pathlib import Path

from kvfs.chunk import ChunkHeader, TensorSpec, encode_header
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.meta.contract import Inode
from kvfs.names import chunk_key, chunk_path, namespace_path
from kvfs.node import Node
from kvfs.requests.answer import answer
from kvfs.requests.session import Session
from kvfs.stage import Content, Stage
from kvfs.wire import Request


def stage_in(node: Node, index: int, data: bytes) -> Stage:
    """A filled stage in one of the directories, with its room reserved."""
    directory = node.directories[index]
    assert directory is not None
    staged = directory.stage()
    stage = Stage(index, staged.name, staged.fd)
    node.space.begin_stage(stage)
    os.write(stage.fd, data)
    node.space.reserve(stage, MIB)
    return stage


def content_of(
    node: Node, path: bytes, data: bytes, index: int = 0, digest: bytes = b""
) -> Content:
    stage = stage_in(node, index, data)
    return Content(stage, digest or digest_of(data), len(data), 5, path=path)


def store(node: Node, path: bytes, data: bytes, index: int = 0, digest: bytes = b"") -> Inode:
    content = content_of(node, path, data, index, digest)
    try:
        (inode,) = node.publisher.publish([content])
    finally:
        os.close(content.stage.fd)
    return inode


def load(node: Node, path: bytes) -> bytes | None:
    (inode,) = node.meta.resolve([path])
    fd = None if inode is None else node.contents.open_inode(inode)
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()


def blob_path(node: Node, digest: bytes, index: int = 0) -> Path:
    directory = node.directories[index]
    assert directory is not None
    return Path(directory.blob_path(digest))


def put_orphan(node: Node, digest: bytes, data: bytes = b"orphan", index: int = 0) -> Path:
    """A blob that no metadata knows."""
    path = blob_path(node, digest, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def chunk_file(number: int, engine: str = "e") -> tuple[bytes, bytes]:
    """The path and the bytes of a chunk file; `engine` is what else tells two of them apart."""
    key, payload = chunk_key(bytes([number]) * 16, 0, 0), bytes(64)
    header = ChunkHeader(
        model="m", fingerprint="f", key=key, parent="", token_start=0, token_end=16, group=0,
        shard=0, engine=engine, digest=digest_of(payload), token_ids=None,
        tensors=(TensorSpec("t", "U8", (64,)),),
    )  # fmt: skip
    return chunk_path(namespace_path("m", "f"), key), encode_header(header) + payload


def fail_with(code: int, fails: Callable[..., bool], function: Callable[..., object]) -> object:
    """The function, but an OSError where its arguments are such."""

    def call(*arguments: object, **options: object) -> object:
        if fails(*arguments):
            raise OSError(code, os.strerror(code))
        return function(*arguments, **options)

    return call


async def ask(node: Node, operation: str, *arguments: object) -> object:
    """What the node answers a client."""
    return await answer(Session(node, 0, 0), Request(1, operation, list(arguments)), [])
