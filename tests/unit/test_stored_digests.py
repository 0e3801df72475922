"""Digests of stored files, read or mapped."""

import mmap
import os
from pathlib import Path

import pytest
import xxhash

from kvfs import stored


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def digest_both_ways(file: Path) -> tuple[bytes, bytes]:
    with open(file, "rb") as opened:
        return stored.digest_file(opened.fileno()), stored.digest_own_file(opened.fileno())


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, 300_001])
def test_a_mapped_file_has_the_digest_of_its_bytes(file: Path, size_bytes: int) -> None:
    content = os.urandom(size_bytes)
    file.write_bytes(content)
    assert digest_both_ways(file) == (xxhash.xxh3_128(content).digest(),) * 2


def test_a_file_longer_than_what_is_mapped_at_a_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_MAPPED_BYTES", 2 * mmap.PAGESIZE)
    content = os.urandom(5 * mmap.PAGESIZE + 7)
    file.write_bytes(content)
    assert digest_both_ways(file) == (xxhash.xxh3_128(content).digest(),) * 2


@pytest.mark.parametrize("error", [OSError(19, "no such device"), ValueError("it is shorter")])
def test_what_cannot_be_mapped_is_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    content = os.urandom(10_000)
    file.write_bytes(content)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert digest_both_ways(file) == (xxhash.xxh3_128(content).digest(),) * 2
