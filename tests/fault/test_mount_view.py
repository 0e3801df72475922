"""Requests on `.kvfs` that come while another one reads: each gets what it asked for."""

import os
import threading
from pathlib import Path

import pytest
import trio
import xxhash

from kvfs.chunk import ChunkHeader, TensorSpec, chunk_info, encode_header
from kvfs.life import running
from kvfs.names import chunk_key, chunk_path, namespace_path
from kvfs.node import Node
from kvfs.settings.words import Config, DirectoryConfig
from kvfs.stage import Content
from mount import view as module
from mount.view import View

NAMESPACE = namespace_path("org/model", "f" * 32)


def store_chunk(node: Node, number: int) -> bytes:
    """Publish a chunk of one token; its key."""
    key = chunk_key(bytes([number]) * 8, 0, 0)
    payload = bytes([number]) * 4096
    header = ChunkHeader(
        model="org/model",
        fingerprint="f" * 32,
        key=key,
        parent="",
        token_start=0,
        token_end=1,
        group=0,
        shard=0,
        engine="test",
        digest=xxhash.xxh3_128_digest(payload),
        token_ids=(number,),
        tensors=(TensorSpec("kv", "U8", (4096,)),),
    )
    data = encode_header(header) + payload
    stage = node.stage()
    os.pwrite(stage.fd, data, 0)
    digest = xxhash.xxh3_128_digest(data)
    content = Content(
        stage, digest, len(data), 0, path=chunk_path(NAMESPACE, key), chunk=chunk_info(header)
    )
    node.publisher.publish([content])
    os.close(stage.fd)
    return key.encode()


async def number_of(view: View, *names: bytes) -> int:
    number = view.root().st_ino
    for name in names:
        number = (await view.lookup(number, name)).st_ino
    return number


async def test_two_opens_at_once_get_their_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Config((DirectoryConfig(tmp_path / "store", min_free=0),))) as node:
        keys = [store_chunk(node, number) for number in (1, 2)]
        view = View(node)
        places = [b"prefixes", NAMESPACE.removeprefix(b"kv/")]
        numbers = [await number_of(view, *places, key, b"tokens") for key in keys]
        view._written.clear()  # as if they had not been looked at
        both_read = threading.Barrier(2)
        read_header = module.read_header

        def read_together(fd: int, size_bytes: int) -> ChunkHeader:
            both_read.wait(10)
            return read_header(fd, size_bytes)

        monkeypatch.setattr(module, "read_header", read_together)
        handles: dict[int, int] = {}

        async def open_one(number: int) -> None:
            handles[number] = (await view.open(number, os.O_RDONLY)).fh

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(open_one, number)
        assert [bytes(view.read(handles[n], 0, 100)) for n in numbers] == [b"1\n", b"2\n"]
        for number in numbers:
            view.release(handles[number])


async def test_a_forget_in_the_middle_of_a_look_up_takes_no_number_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Config((DirectoryConfig(tmp_path / "store", min_free=0),))) as node:
        key = store_chunk(node, 1)
        view = View(node)
        directory = await number_of(view, b"prefixes", NAMESPACE.removeprefix(b"kv/"), key)
        number = await number_of(view, b"prefixes", NAMESPACE.removeprefix(b"kv/"), key, b"tokens")
        view._written.clear()  # as if it had not been looked at
        read_header = module.read_header

        def read_slowly(fd: int, size_bytes: int) -> ChunkHeader:
            trio.from_thread.run_sync(view.forget, number, 1)  # of the look-up before
            return read_header(fd, size_bytes)

        monkeypatch.setattr(module, "read_header", read_slowly)
        assert (await view.lookup(directory, b"tokens")).st_ino == number
        assert (await view.getattr(number)).st_size == len(b"1\n")
