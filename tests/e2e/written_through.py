"""Files of a mount whose writes the kernel serves by itself, as tests make and read them."""

import os
from pathlib import Path

import pytest
import xxhash

from kvfs.client import Client
from kvfs.config import MIB
from tests.mounts import MountProcess, describe

LARGE = 3 * MIB  # published as it is
SMALL = 50_000  # published as a copy


def require_through(mount: MountProcess) -> MountProcess:
    """The mount, if the kernel serves its writes."""
    with open(mount.mountpoint / "probe", "wb"):
        is_served_by_kernel = describe(mount)["open_in_passthrough"] == 1
    os.unlink(mount.mountpoint / "probe")
    if not is_served_by_kernel:
        pytest.skip(f"no passthrough of writes here: {describe(mount)['why_not_passthrough']}")
    return mount


def make(path: Path, data: bytes, flags: int = 0) -> int:
    """A descriptor of a new file, open for writing only, that holds data."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    assert os.write(fd, data) == len(data)
    return fd


def stored(mount: MountProcess, name: bytes) -> bytes | None:
    """What a client of the node reads, checked against the digest as engines do."""
    with Client(mount.store) as client:
        (opened,) = client.open([name])
        if opened is None:
            return None
        with opened:
            data = os.pread(opened.fd, opened.size_bytes, 0)
    return data if xxhash.xxh3_128(data).digest() == opened.digest else b"wrong bytes"
