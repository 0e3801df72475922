"""The second names of closed files: what they say, and which of them a start follows."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.blob_files import Foreign
from kvfs.blobs import BlobDirectory
from kvfs.kept import Kept, keep
from kvfs.settings.words import DirectoryConfig

KEPT = Kept("store.run.1f", 2**63, 2**40, 1_796_070_073_123_456_789, -5, b"r" * 16, b"m" * 8)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BlobDirectory]:
    opened = BlobDirectory.open(DirectoryConfig(tmp_path / "store"))
    yield opened
    opened.close()


def test_a_name_says_all() -> None:
    assert Kept.parse(KEPT.name) == KEPT
    assert KEPT.name.startswith("store.run.1f.")
    assert len(KEPT.name) < 128


@pytest.mark.parametrize("name", ["", "a.b.c", "a.b.c.", "a.b.c.00", f"{KEPT.name}0", "a.b.c.zz"])
def test_other_names_say_nothing(name: str) -> None:
    assert Kept.parse(name) is None


def test_the_next_run_finds_it_and_no_other(directory: BlobDirectory) -> None:
    staged = directory.stage()
    os.write(staged.fd, b"closed")
    os.close(staged.fd)
    kept = replace(KEPT, stage=staged.name)
    assert keep(directory, kept)
    assert directory.kept_names() == []  # of this run
    assert directory.purge_staging() == 0
    left = Foreign()
    assert (directory.purge_foreign(left), left.count) == (0, 0)
    directory.close()
    again = BlobDirectory.open(directory.config)
    try:
        assert [Kept.parse(name) for name in again.kept_names()] == [kept]
        assert again.purge_staging() == 2
        assert os.listdir(directory.path / "staging") == []
    finally:
        again.close()
    directory._lock_fd = os.open(os.devnull, os.O_RDONLY)  # for the fixture to close


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links_says_no(
    directory: BlobDirectory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert not keep(directory, KEPT)


def test_a_full_disk_is_told(directory: BlobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="No space left"):
        keep(directory, KEPT)
