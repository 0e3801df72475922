"""Reading blobs on a disk that fails: a miss, or a word about one file, and nothing else."""

import errno
import os
import threading

import pytest

from kvfs import blob_files, checks, chunk_files
from kvfs.chunk import ChunkHeader
from kvfs.digest import digest_of
from kvfs.errors import Corrupt
from kvfs.meta.contract import ROOT_INO
from kvfs.names import chunk_key
from kvfs.node import Node
from kvfs.requests import listing
from tests.own_node import (
    ask,
    blob_path,
    chunk_file,
    fail_with,
    load,
    stage_in,
    store,
)


async def test_a_blob_that_cannot_be_opened_is_a_miss_among_others(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be read: Input/output error")
    for name in (b"bad", b"good", b"worse"):
        store(node, name, name)
    bad = {os.fspath(blob_path(node, digest_of(name))) for name in (b"bad", b"worse")}
    opening = fail_with(errno.EIO, lambda path: path in bad, blob_files.open_blob_file)
    with monkeypatch.context() as patch:
        patch.setattr(blob_files, "open_blob_file", opening)
        assert [load(node, name) for name in (b"bad", b"good", b"worse")] == [None, b"good", None]
        with pytest.raises(OSError, match="Input/output error"):
            await node.open_content(node.meta.resolve([b"bad"])[0].ino)  # type: ignore[union-attr]
    assert (node.counters.unreadable_blobs, node.counters.open_misses) == (2, 2)
    assert load(node, b"bad") == b"bad"  # it kept its name: the disk may be back


async def test_one_unreadable_blob_does_not_end_a_verification(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be read|its bytes changed")
    for name in (b"first", b"unreadable", b"bad", b"last"):
        store(node, name, name)
    blob_path(node, digest_of(b"bad")).write_bytes(b"BAD")
    store(node, b"absent", b"absent", 1)
    node.directories[1] = None  # type: ignore[index]  # as if its disk were not mounted
    digest_file = checks.digest_file

    def read(fd: int) -> bytes:
        if os.pread(fd, 100, 0) == b"unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest_file(fd)

    monkeypatch.setattr(checks, "digest_file", read)
    found = await ask(
        node, "verify", [b"first", b"unreadable", b"bad", b"absent", b"last", b"none"]
    )
    assert found == [
        True, "Input/output error", False, "its directory is not there", True, None,
    ]  # fmt: skip


async def test_a_chunk_whose_header_cannot_be_read_is_published_all_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("its header cannot be read: .*Input/output error")
    path, data = chunk_file(1)
    monkeypatch.setattr(
        chunk_files, "read_header", fail_with(errno.EIO, lambda *_: True, chunk_files.read_header)
    )
    above = node.meta.make_directories(os.path.dirname(path), 0o755, 0, 0, 1)
    made = node.meta.make(above.ino, os.path.basename(path), 0o100644, 0, 0, 1)
    stage = stage_in(node, 0, data)
    published = await node.publish_stage(stage, made.ino, 5)
    os.close(stage.fd)
    assert published.digest == digest_of(data)
    assert load(node, path) == data
    assert node.meta.chunk(made.ino) is None


async def test_a_chunks_header_is_read_beside_the_loop(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = chunk_file(1)
    threads = []
    read_header = chunk_files.read_header

    def read(fd: int, size_bytes: int) -> ChunkHeader:
        threads.append(threading.current_thread())
        return read_header(fd, size_bytes)

    monkeypatch.setattr(chunk_files, "read_header", read)
    above = node.meta.make_directories(os.path.dirname(path), 0o755, 0, 0, 1)
    made = node.meta.make(above.ino, b"draft", 0o100644, 0, 0, 1)
    stage = stage_in(node, 0, data)
    await node.publish_stage(stage, made.ino, 5)
    os.close(stage.fd)
    assert (threads, node.meta.chunk(made.ino)) == ([], None)
    renamed = node.rename(above.ino, b"draft", above.ino, os.path.basename(path))
    await node.chunk_files.index(renamed.moved)
    assert threads and threading.main_thread() not in threads
    info = node.meta.chunk(made.ino)
    assert info is not None and info.key == chunk_key(bytes([1]) * 16, 0, 0).encode()


async def test_bytes_that_come_again_say_nothing_of_the_copy_that_lay_there(
    node: Node, allow_warnings: list[str]
) -> None:
    allow_warnings.append("its bytes changed")
    data = b"bytes" * 1000
    store(node, b"old", data)
    blob_path(node, digest_of(data)).write_bytes(b"BYTES" * 1000)
    made = node.meta.make(ROOT_INO, b"new", 0o100644, 0, 0, 1)
    stage = stage_in(node, 0, data)
    await node.publish_stage(stage, made.ino, 5)
    os.close(stage.fd)
    with pytest.raises(Corrupt):
        await node.open_content(made.ino)


async def test_paths_of_equal_bytes_come_in_pages(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [b"d/%03d" % number for number in range(300)]
    for path in paths:
        store(node, path, b"same")
    monkeypatch.setattr(listing, "FRAME_BYTES_MAX", 4 * 300)  # of paths, 60 fill it
    found: list[bytes] = []
    after: list[object] = [0, 0, b""]
    while page := await ask(node, "paths_of", digest_of(b"same"), *after, 100):
        assert isinstance(page, list) and len(page) <= 64
        found += [path for *_, path in page]
        after = page[-1][:3]
    assert found == paths
