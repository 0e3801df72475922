"""Reading through a shared descriptor: whole, wherever the pages are, and closed with the last."""

import os
from pathlib import Path

import pytest
import trio

from kvfs.config import MIB
from mount import content
from mount.content import OpenBytes, write_whole


@pytest.fixture
def fd(tmp_path: Path) -> int:
    (tmp_path / "a").write_bytes(os.urandom(3 * MIB + 100))
    return os.open(tmp_path / "a", os.O_RDWR)


def is_closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("cached", [True, False])
async def test_reads_are_whole(fd: int, cached: bool) -> None:
    opened = OpenBytes(fd)
    data = os.pread(fd, 4 * MIB, 0)
    os.fsync(fd)
    for offset in (0, 1, MIB, 3 * MIB, 3 * MIB + 99, 3 * MIB + 100, 5 * MIB):
        for size in (1, 4096, MIB, 2 * MIB):
            if not cached:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert bytes(await opened.read(offset, size)) == data[offset : offset + size]
    opened.retire()
    assert is_closed(fd)


async def test_a_file_system_that_cannot_say_is_read_anyway(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(95, "not supported")

    data = os.pread(fd, 4 * MIB, 0)
    monkeypatch.setattr(content.os, "preadv", refuse)
    opened = OpenBytes(fd)
    assert await opened.read(100, 2 * MIB) == data[100 : 2 * MIB + 100]
    opened.retire()


async def test_it_is_closed_after_its_last_read(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = trio.Event()
    started = trio.Event()

    async def slow(function: object, *arguments: object, **options: object) -> bytes:
        started.set()
        await go_on.wait()
        return b"late"

    opened = OpenBytes(fd)
    monkeypatch.setattr(OpenBytes, "_read_cached", lambda self, offset, size: None)
    monkeypatch.setattr(content.trio.to_thread, "run_sync", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opened.read, 0, 10)
        await started.wait()
        opened.retire()
        assert not is_closed(fd)
        go_on.set()
    assert is_closed(fd)


def test_writes_are_whole_even_when_single_calls_are_short(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(content.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    write_whole(fd, b"x" * 4500, 7)
    assert os.pread(fd, 4500, 7) == b"x" * 4500
    os.close(fd)
