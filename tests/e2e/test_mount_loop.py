"""Nothing that people or engines ask of a mount holds its event loop for long.

The promise is 10 ms. A step may take twice that here, of processor time, and be blocked for longer,
since the machine may be busy; what a warning says is in the log (`kvfs.watchdog`). Run any other
test of a mount with `KVFS_LOOP_LIMIT_MS=10` in the environment to see what it meets.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kvfs.client import Client
from kvfs.client_files import StagedFile
from kvfs.meta.contract import ChunkInfo
from kvfs.names import chunk_key, chunk_path, namespace_path
from kvfs.watchdog import LIMIT_VARIABLE
from tests.conftest import StartMount
from tests.mounts import MountProcess

MIB = 1024 * 1024
NAMESPACE = namespace_path("org/model", "f" * 32)
TOGETHER = 16  # files published together, as the bridge does


@pytest.fixture
def watched(start_mount: StartMount, monkeypatch: pytest.MonkeyPatch) -> MountProcess:
    """A mount whose log has a warning, which fails the test, when its loop was held."""
    monkeypatch.setenv(LIMIT_VARIABLE, "20,500")
    mount = start_mount()
    monkeypatch.delenv(LIMIT_VARIABLE)
    return mount


def publish(
    store: Path,
    names: list[bytes],
    content: Callable[[bytes], bytes],
    describe: Callable[[bytes], ChunkInfo | None] = lambda name: None,
) -> None:
    """Store small files as a client."""
    with Client(store) as client:
        for start in range(0, len(names), TOGETHER):
            batch = names[start : start + TOGETHER]
            staged = client.stage([100] * len(batch))
            files = []
            for name, file in zip(batch, staged, strict=True):
                data = content(name)
                os.pwrite(file.fd, data, 0)
                digest = xxhash.xxh3_128_digest(data)
                files.append(StagedFile(file.token, name, digest, len(data), describe(name)))
            client.publish(files)
            for file in staged:
                os.close(file.fd)


def write(path: Path, size_mib: int) -> None:
    piece = os.urandom(MIB)
    with open(path, "wb", buffering=0) as file:
        for number in range(size_mib):
            file.write(piece[number:] + piece[:number])


def test_long_directories(watched: MountProcess) -> None:
    names = [b"many/%06d" % number for number in range(10_000)]
    publish(watched.store, names, lambda name: b"equal")
    directory = watched.mountpoint / "many"
    assert len(os.listdir(directory)) == len(names)
    assert sum(entry.stat().st_size for entry in os.scandir(directory)) == 5 * len(names)
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number % 3 == 0:
                os.unlink(entry.path)
    assert len(os.listdir(directory)) == len(names) - (len(names) + 2) // 3


def test_the_view_of_many_chunks(watched: MountProcess) -> None:
    keys = [chunk_key(number.to_bytes(8, "big"), 0, 0) for number in range(500)]
    names = {chunk_path(NAMESPACE, key): key for key in keys}

    def describe(name: bytes) -> ChunkInfo:
        return ChunkInfo(names[name].encode(), b"", 0, 256, 0, 0, b"")

    publish(watched.store, list(names), lambda name: name, describe)
    (model,) = (watched.mountpoint / ".kvfs" / "prefixes").iterdir()
    assert sorted(os.listdir(model)) == sorted(keys)
    for key in keys[:100]:
        assert os.listdir(model / key) == ["info.json"]
        assert b'"token_end": 256' in (model / key / "info.json").read_bytes()


def test_requests_for_thousands_of_names(watched: MountProcess) -> None:
    names = [b"d/%06d" % number for number in range(2_000)]
    publish(watched.store, names, lambda name: name)
    with Client(watched.store) as client:
        assert client.lookup(names) == [len(name) for name in names]
        client.touch(names)
        assert client.pin(names) == len(names)
        assert client.evict(names) == 0
        assert client.unpin(names) == len(names)
        assert client.evict(names) == len(names)
        client.gc()
    assert os.listdir(watched.mountpoint / "d") == []


def test_large_files(watched: MountProcess) -> None:
    file = watched.mountpoint / "large"
    write(file, 200)
    with open(file, "rb") as reader:  # which keeps the old bytes
        write(file, 200)
        assert len(reader.read(MIB)) == MIB
    os.unlink(file)
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    for _ in range(200):
        os.write(fd, bytes(MIB))
    os.ftruncate(fd, 100)
    os.close(fd)
    assert file.stat().st_size == 100
    write(file, 200)
    os.truncate(file, 0)
    assert (watched.mountpoint / ".kvfs" / "status.json").read_bytes()


def test_large_files_that_are_never_published(watched: MountProcess) -> None:
    with Client(watched.store) as client:
        (staged,) = client.stage([256 * MIB])
        for number in range(256):
            os.pwrite(staged.fd, bytes(MIB), number * MIB)
        client.discard([staged.token])
        os.close(staged.fd)
        (left,) = client.stage([256 * MIB])
        for number in range(256):
            os.pwrite(left.fd, bytes(MIB), number * MIB)
        os.close(left.fd)
    end_s = time.monotonic() + 30
    while any((watched.store / "staging").iterdir()):  # the client has gone, and its file with it
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_eviction_of_many_small_files(
    start_mount: StartMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "20,500")
    mount = start_mount(config='max_bytes = "80MiB"\n')
    publish(mount.store, [b"s/%06d" % number for number in range(2_000)], lambda name: name)
    write(mount.mountpoint / "large", 70)
    assert len((mount.mountpoint / "large").read_bytes()) == 70 * MIB
    with Client(mount.store) as client:
        assert client.status()["counters"]["evicted_files"] > 500
