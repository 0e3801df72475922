"""What a start that fails leaves of the trust in a store's metadata."""

import errno
from pathlib import Path

import pytest

from kvfs.life import running
from kvfs.settings.words import Config, DirectoryConfig
from tests.own_node import chunk_file, store


def restarted_machine(config: Config) -> None:
    mark = config.home / "meta" / "running"
    if mark.exists() and mark.read_text() != "rebuilding":
        mark.write_text("another boot")


async def test_names_are_trusted_after_a_start_that_failed_and_a_crash_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config((DirectoryConfig(tmp_path / "a"),))
    async with running(config) as node:
        store(node, b"precious", b"data")

    async def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EADDRINUSE, "no")

    with monkeypatch.context() as patched:
        patched.setattr("kvfs.life.serve_clients", fail)
        with pytest.raises(BaseExceptionGroup):
            async with running(config):
                pass
    restarted_machine(config)
    async with running(config) as node:
        assert node.meta.resolve([b"precious"])[0] is not None
        assert node.notices == []


async def test_a_rebuild_that_is_cut_short_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("rebuilding names from chunk files")
    config = Config((DirectoryConfig(tmp_path / "a"),))
    path, data = chunk_file(1)
    async with running(config) as node:
        store(node, path, data)
    (config.home / "meta" / "data.mdb").unlink()

    class Killed(Exception):
        pass

    async def fail(*arguments: object) -> int:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("kvfs.life.rebuild", fail)
        with pytest.raises(Killed):
            async with running(config):
                pass
    async with running(config) as node:
        assert node.meta.resolve([path])[0] is not None
        [notice] = node.notices
        assert notice.startswith("names were not all rebuilt: 1 chunk files")
