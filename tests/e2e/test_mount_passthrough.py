"""Reads that the kernel serves by itself, on a real mount; skipped where it cannot."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.mounts import MountProcess, describe
from tests.processes import wait_until

MIB = 1024 * 1024


@pytest.fixture
def mounted(start_mount) -> MountProcess:  # type: ignore[no-untyped-def]  # a fixture's callable
    mount: MountProcess = start_mount()
    why_not = describe(mount)["why_not_passthrough"]
    if why_not is not None:
        pytest.skip(f"no passthrough here: {why_not}")
    return mount


@pytest.fixture
def place(mounted: MountProcess) -> Iterator[Path]:
    yield mounted.mountpoint


def open_in_passthrough(mount: MountProcess, path: Path) -> int:
    """Open a file for reading once the kernel serves it; right after a change Python does."""
    descriptors = []

    def is_served_by_kernel() -> bool:
        descriptors.append(os.open(path, os.O_RDONLY))
        if describe(mount)["open_in_passthrough"]:
            return True
        os.close(descriptors.pop())
        return False

    wait_until(is_served_by_kernel)
    return descriptors[0]


def test_bytes_are_right_by_read_and_by_mapping(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(5 * MIB + 77)
    (place / "a").write_bytes(data)
    fd = open_in_passthrough(mounted, place / "a")
    assert os.pread(fd, len(data), 0) == data
    assert os.pread(fd, 100, len(data) - 50) == data[-50:]
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[:] == data
    os.close(fd)
    wait_until(lambda: describe(mounted)["open_in_passthrough"] == 0)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_a_writer_gets_a_version_of_its_own(mounted: MountProcess, place: Path, flags: int) -> None:
    (place / "a").write_bytes(b"old " * 5000)
    reader = open_in_passthrough(mounted, place / "a")
    writer = os.open(place / "a", flags)
    os.pwrite(writer, b"new!", 0)
    os.close(writer)
    assert os.pread(reader, 4, 0) == b"old "
    assert (place / "a").read_bytes()[:4] == b"new!"
    os.truncate(place / "a", 2)
    assert os.pread(reader, 4, 0) == b"old "
    assert (place / "a").read_bytes() == b"ne"
    os.close(reader)


def test_a_file_that_goes_stays_readable(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(MIB)
    for name in ("unlinked", "evicted", "replaced"):
        (place / name).write_bytes(data)
    readers = [open_in_passthrough(mounted, place / "unlinked")]
    readers += [os.open(place / name, os.O_RDONLY) for name in ("evicted", "replaced")]
    (place / "unlinked").unlink()
    (place / "other").write_bytes(b"other")
    os.rename(place / "other", place / "replaced")
    with Client(mounted.store) as client:
        client.evict([b"evicted"])
    for reader in readers:
        assert os.pread(reader, len(data), 0) == data
        os.close(reader)


def test_a_killed_node_leaves_readers_their_files(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(MIB)
    (place / "a").write_bytes(data)
    reader = open_in_passthrough(mounted, place / "a")
    mounted.kill()
    assert os.pread(reader, len(data), 0) == data
    os.close(reader)  # asks nobody


def test_a_corrupt_blob_is_refused_at_open(start_mount, mounted: MountProcess) -> None:  # type: ignore[no-untyped-def]  # as above
    data = os.urandom(MIB)
    (mounted.mountpoint / "a").write_bytes(data)
    assert mounted.stop() == 0
    (blob,) = (mounted.store / "blobs").glob("*/*/*")
    with open(blob, "r+b") as file:
        file.seek(4321)
        file.write(bytes([data[4321] ^ 8]))
    again = start_mount(store=mounted.store, allow="its bytes changed")
    with pytest.raises(OSError):
        (again.mountpoint / "a").read_bytes()
    wait_until(lambda: not (again.mountpoint / "a").exists())


def test_switched_off_all_is_served_from_python(start_mount) -> None:  # type: ignore[no-untyped-def]  # as above
    mount: MountProcess = start_mount(config="[mount]\npassthrough = false\n")
    data = os.urandom(MIB)
    (mount.mountpoint / "a").write_bytes(data)
    with open(mount.mountpoint / "a", "rb") as file:
        assert file.read() == data
        status = describe(mount)
    assert status["reads"] == "python"
    assert "switched off" in str(status["why_not_passthrough"])
    assert status["open_in_passthrough"] == 0
