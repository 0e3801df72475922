"""Which `kvfs` starts a node: this environment's, the PATH's, or none, which is said."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.errors import Unavailable
from kvfs.start import node_command


@pytest.fixture
def without_lmdb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lmdb" else object()
    )


def test_an_environment_with_all_that_a_node_needs_starts_it_itself() -> None:
    assert node_command() == [sys.executable, "-m", "kvfs"]


@pytest.mark.usefixtures("without_lmdb")
def test_another_environment_uses_the_command_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "kvfs"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvfs "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_command() == [str(command)]
    with Client(tmp_path / "store", start=True) as client:
        assert client.lookup([b"kv"]) == [None]


@pytest.mark.usefixtures("without_lmdb")
def test_without_either_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    store = tmp_path / "store"
    store.mkdir()
    with Client(store, start=True) as client, pytest.raises(Unavailable, match="lmdb or trio"):
        client.lookup([b"kv"])
