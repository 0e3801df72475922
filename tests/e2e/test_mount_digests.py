"""The digest that is ready at a close is the one of the file's bytes, however they were written."""

import errno
import os
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.digest import digest_of
from tests.mounts import MountProcess


def put(path: Path, parts: list[tuple[int, bytes]], size_bytes: int | None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for offset, data in parts:
        os.pwrite(fd, data, offset)
    if size_bytes is not None:
        os.ftruncate(fd, size_bytes)
    os.close(fd)


def test_a_length_that_no_directory_holds_is_refused(start_mount) -> None:  # type: ignore[no-untyped-def]  # a fixture's callable
    """Holes cost nothing to make, but a close() hashes them."""
    mount: MountProcess = start_mount(config="max_bytes = 67108864\n")
    path = mount.mountpoint / "sparse"
    with open(path, "w+b") as file:
        file.write(b"kept")
        file.flush()
        for size_bytes in (1 << 40, 1 << 62):
            with pytest.raises(OSError) as refused:
                os.ftruncate(file.fileno(), size_bytes)
            assert refused.value.errno == errno.EFBIG
        with pytest.raises(OSError) as refused:
            os.pwrite(file.fileno(), b"x", 1 << 40)
        assert refused.value.errno == errno.EFBIG
    with pytest.raises(OSError):
        os.truncate(path, 1 << 40)
    assert path.read_bytes() == b"kept"
    os.truncate(path, 1 << 20)
    assert path.stat().st_size == 1 << 20


@pytest.mark.parametrize(
    ("parts", "size_bytes"),
    [
        ([(0, b"a" * 70_000), (70_000, b"b" * 5)], None),
        ([(0, b"a" * 700_000), (700_000, b"b" * 700_000)], None),
        ([(0, b"abc"), (1, b"x")], None),
        ([(5, b"late"), (0, b"early")], None),
        ([(0, b"abc"), (10, b"behind a hole")], None),
        ([(0, b"abcdef")], 3),
        ([(0, b"abcdef")], 6),
        ([(0, b"abcdef")], 9),
        ([(0, b"abcdef")], 0),
        ([], 5),
        ([], None),
    ],
)
def test_a_published_file_has_the_digest_of_its_bytes(
    start_mount,  # type: ignore[no-untyped-def]  # a fixture's callable
    parts: list[tuple[int, bytes]],
    size_bytes: int | None,
) -> None:
    mount: MountProcess = start_mount()
    put(mount.mountpoint / "f", parts, size_bytes)
    expected = bytearray()
    for offset, data in parts:
        expected += bytes(max(0, offset + len(data) - len(expected)))
        expected[offset : offset + len(data)] = data
    if size_bytes is not None:
        expected = expected[:size_bytes] + bytes(max(0, size_bytes - len(expected)))
    with Client(mount.store) as client:
        inode = client.stat(b"f")
        assert inode is not None and inode.digest == digest_of(bytes(expected))
    assert (mount.mountpoint / "f").read_bytes() == expected
    put(mount.mountpoint / "f", [(len(expected), b"more")], None)
    with Client(mount.store) as client:
        inode = client.stat(b"f")
        assert inode is not None and inode.digest == digest_of(bytes(expected) + b"more")
