"""Bytes from one open file to another, and who may still write to one."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import Corrupt
from kvfs.stored import copy_bytes, may_have_writer

DATA = os.urandom(5_000_000)


@pytest.fixture(params=["one file system", "two"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A file that holds DATA, and an empty one."""
    source = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    if request.param == "two":
        target = os.memfd_create("target")
        assert os.fstat(target).st_dev != os.fstat(source).st_dev
    else:
        target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    os.write(source, DATA)
    yield source, target
    os.close(source)
    os.close(target)


@pytest.mark.parametrize("size_bytes", [0, 1, 4_500_000, len(DATA)])
def test_the_start_of_a_file_is_copied(files: tuple[int, int], size_bytes: int) -> None:
    copy_bytes(*files, size_bytes)
    assert os.pread(files[1], len(DATA) + 1, 0) == DATA[:size_bytes]


def test_a_file_that_is_shorter_is_told(files: tuple[int, int]) -> None:
    with pytest.raises(Corrupt, match="ended"):
        copy_bytes(*files, len(DATA) + 1)


def test_whether_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(writer, b"data")
    reader = os.open(path, os.O_RDONLY)
    try:
        assert may_have_writer(reader)
        with mmap.mmap(writer, 4) as mapped:
            os.close(writer)
            assert may_have_writer(reader)
            mapped[:4] = b"more"
        assert not may_have_writer(reader)
        os.close(os.open(path, os.O_WRONLY))  # no lease is left
    finally:
        os.close(reader)
