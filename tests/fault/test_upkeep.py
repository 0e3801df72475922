"""gc and rebuild while files come and go, and on a disk that fails."""

import errno
import os
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs import blob_files, upkeep
from kvfs.digest import digest_of
from kvfs.node import Change, Node
from kvfs.upkeep import collect_garbage, rebuild
from tests.own_node import blob_path, chunk_file, fail_with, load, put_orphan, store


async def test_an_orphan_that_is_published_during_gc_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = (bytes(16), bytes(15) + b"\1")  # in one directory, which is one batch
    for digest in digests:
        put_orphan(node, digest, b"orphan")
    unlink, unlinked = os.unlink, []

    def unlink_slowly(path: str) -> None:
        if threading.current_thread() is not threading.main_thread() and not unlinked:
            unlinked.append(path)
            left = next(d for d in digests if blob_path(node, d).exists())
            trio.from_thread.run_sync(store, node, b"now live", b"orphan", 0, left)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_slowly)
    collected = await collect_garbage(node)
    assert unlinked
    assert collected.orphan_blobs == 1
    assert load(node, b"now live") == b"orphan"


async def test_gc_leaves_what_a_rebuild_is_about_to_name(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = chunk_file(1)
    put_orphan(node, digest_of(data), data)
    go_on, reading = threading.Event(), trio.Event()
    read_publications = upkeep._read_publications
    rebuilt = []

    def read(*arguments: object) -> object:
        found = read_publications(*arguments)  # type: ignore[arg-type]  # as they came
        trio.from_thread.run_sync(reading.set)
        go_on.wait(20)
        return found

    async def run_rebuild() -> None:
        rebuilt.append(await rebuild(node))

    monkeypatch.setattr(upkeep, "_read_publications", read)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_rebuild)
        await reading.wait()
        nursery.start_soon(collect_garbage, node)
        await wait_all_tasks_blocked()  # gc is at the lock
        go_on.set()
    assert rebuilt == [1]
    assert load(node, path) == data


def test_a_blob_that_goes_while_its_directory_is_read_is_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put_orphan(node, bytes(15) + bytes([number]))
    gone = blob_path(node, bytes(15) + b"\1")
    matches = blob_files._BLOB_NAME.fullmatch

    class Names:
        @staticmethod
        def fullmatch(name: str) -> object:
            gone.unlink(missing_ok=True)  # eviction, just now
            return matches(name)

    directory = node.directories[0]
    assert directory is not None
    monkeypatch.setattr(blob_files, "_BLOB_NAME", Names)
    (batch,) = directory.scan()
    assert sorted(digest[-1] for digest, _ in batch) == [0, 2]


def test_what_took_a_blobs_place_is_put_aside(node: Node, allow_warnings: list[str]) -> None:
    allow_warnings.append("in the way of a blob")
    directory = node.directories[0]
    assert directory is not None
    path = put_orphan(node, bytes(16))
    path.unlink()
    os.mkfifo(path)
    assert directory.trash(bytes(16)) is None
    assert not path.exists()
    assert len(os.listdir(directory.path / "quarantine")) == 1


async def test_a_link_in_place_of_a_fan_out_directory_is_not_followed(
    node: Node, tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("is a symbolic link in the way of a blob")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    data = b"not to be told to a person as foreign"
    first = digest_of(data).hex()[:2]
    directory = node.directories[0]
    assert directory is not None
    (directory.path / "blobs" / first).symlink_to(elsewhere)
    store(node, b"f", data)
    assert list(elsewhere.iterdir()) == []
    assert load(node, b"f") == data
    assert (await collect_garbage(node)).left_count == 0


async def test_gc_names_so_many_of_what_it_leaves_and_counts_the_rest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_files, "FOREIGN_SHOWN_MAX", 2)
    directory = node.directories[0]
    assert directory is not None
    for name in "abc":
        (directory.path / "blobs" / name).touch()
    collected = await collect_garbage(node)
    assert (len(collected.left), collected.left_count) == (2, 3)


def test_a_staging_file_that_goes_while_they_are_purged_is_no_fault(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = node.directories[0]
    assert directory is not None
    dead = [directory.path / "staging" / f"{directory.store_id}.dead.{n}" for n in range(2)]
    for path in dead:
        path.touch()
    unlink = os.unlink

    def unlink_all(path: str) -> None:
        for other in dead:
            if other.exists():
                unlink(other)
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_all)
    assert directory.purge_staging() == 0


async def test_rebuilt_names_are_told_and_are_the_most_recent(node: Node) -> None:
    path, data = chunk_file(1)
    put_orphan(node, digest_of(data), data)
    node.now_ns = lambda: 1_000_000
    node.touch([store(node, b"used", b"used").ino])
    changes: list[Change] = []
    node.watch(changes.append)
    assert await rebuild(node) == 1
    (inode, used) = node.meta.resolve([path, b"used"])
    assert inode is not None and used is not None
    assert inode.used_ns > used.used_ns
    assert [(change.name, change.ino) for change in changes] == [
        (os.path.basename(path), inode.ino)
    ]


async def test_a_rebuild_leaves_names_that_exist_alone(node: Node) -> None:
    path, newer = chunk_file(1, "newer")
    _, orphan = chunk_file(1, "older")
    kept = store(node, path, newer)
    put_orphan(node, digest_of(orphan), orphan)
    assert await rebuild(node) == 0
    assert node.meta.resolve([path])[0] == kept
    assert load(node, path) == newer


async def test_a_rebuild_passes_over_what_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be read")
    path, data = chunk_file(1)
    put_orphan(node, digest_of(data), data)
    bad = put_orphan(node, bytes(16), data)
    opening = fail_with(errno.EIO, lambda path: path == os.fspath(bad), blob_files.open_blob_file)
    monkeypatch.setattr(blob_files, "open_blob_file", opening)
    assert await rebuild(node) == 1
    assert load(node, path) == data


async def test_gc_goes_on_after_what_it_cannot_remove(
    node: Node, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be removed: Input/output error")
    paths = [os.fspath(put_orphan(node, bytes([number]) * 16)) for number in range(3)]
    rename = fail_with(errno.EIO, lambda source, _: source == paths[1], os.rename)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert (await collect_garbage(node)).orphan_blobs == 2
    assert (await collect_garbage(node)).orphan_blobs == 1
