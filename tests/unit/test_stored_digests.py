"""Digests of stored files, read or mapped."""

import mmap
import os
from pathlib import Path

import pytest
import xxhash

from kvfs import stored
from kvfs.file_io import is_cached


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


def test_what_memory_has_not_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping it would wait for the disk, and nobody else could run."""
    piece = 1024 * mmap.PAGESIZE  # no large page of the cache reaches over one
    content = os.urandom(3 * piece - 5)
    with open(file, "wb") as written:
        written.write(content)
        written.flush()
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), piece, piece, os.POSIX_FADV_DONTNEED)
        if is_cached(written.fileno(), piece, piece):
            pytest.skip("this file system keeps all in memory")
    mapped: list[int] = []
    real_mmap = mmap.mmap

    def note(fd: int, length: int, *, prot: int, offset: int) -> mmap.mmap:
        mapped.append(offset)
        return real_mmap(fd, length, prot=prot, offset=offset)

    monkeypatch.setattr(stored, "_MAPPED_BYTES", piece)
    monkeypatch.setattr(mmap, "mmap", note)
    with open(file, "rb") as opened:
        digest = stored.digest_own_file(opened.fileno())
    assert digest == xxhash.xxh3_128(content).digest()
    assert mapped == [0, 2 * piece]
