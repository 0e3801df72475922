"""Fixtures: one mount for a whole module of tests, and a directory in it for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import MountProcess


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountProcess]:
    """A serving mount that the tests of a module share, gone afterwards."""
    base: Path = tmp_path_factory.mktemp("mounted")
    store = base / "store"
    mount = MountProcess(store, base / "mnt", ["--store", str(store)], base / "mount.log", None)
    try:
        mount.wait_serving()
        yield mount
    finally:
        mount.close()


@pytest.fixture
def place(mounted: MountProcess, request: pytest.FixtureRequest) -> Path:
    """An empty directory in the mount."""
    directory = mounted.mountpoint / request.node.name
    directory.mkdir()
    return directory
