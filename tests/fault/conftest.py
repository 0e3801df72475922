"""A node in the test's own process, so that its disk can fail at a chosen moment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.meta.lmdb import LmdbEngine
from kvfs.node import Node
from kvfs.settings.words import Config, DirectoryConfig


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with two directories, without its socket and its background tasks."""
    configs = (DirectoryConfig(tmp_path / "one"), DirectoryConfig(tmp_path / "two"))
    directories = [BlobDirectory.open(config) for config in configs]
    engine = LmdbEngine.open(tmp_path / "one" / "meta")
    yield Node(Config(configs), list(directories), engine)
    engine.close()
    for directory in directories:
        directory.close()
