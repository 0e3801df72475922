"""Which `kvfs` starts a node: this environment's, the PATH's, or none, which is said."""

import contextlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.client import Client
from kvfs.errors import Unavailable
from kvfs.settings.words import DirectoryConfig
from kvfs.start import node_command
from tests.processes import wait_until


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


@pytest.fixture
def slow_command(tmp_path: Path, without_lmdb: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `kvfs` that notes its starts in the file `starts` beside it, and goes on when there is a
    file `go`: a node that rebuilds first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "kvfs"
    command.write_text(
        f"#!/bin/sh\necho $$ >> {folder}/starts\n"
        f"while [ -d {folder} ] && [ ! -e {folder}/go ]; do /bin/sleep 0.02; done\n"
        f'exec {sys.executable} -m kvfs "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return command


def starts_of(command: Path) -> list[int]:
    return [int(line) for line in (command.parent / "starts").read_text().split()]


def test_a_node_that_takes_longer_than_a_call_is_left_to_start(
    tmp_path: Path, slow_command: Path
) -> None:
    with Client(tmp_path / "store", start=True, deadline_s=0.4) as client:
        begin_s = time.monotonic()
        with pytest.raises(Unavailable, match=r"is still starting.*Try again"):
            client.status()
        assert time.monotonic() - begin_s < 5  # the call's deadline, not one of its own

        def is_told_again() -> bool:
            with pytest.raises(Unavailable) as told:
                client.status()
            return "is still starting" in str(told.value)

        wait_until(is_told_again)  # in between it backs off
        (pid,) = starts_of(slow_command)
        (slow_command.parent / "go").touch()

        def is_served() -> bool:
            with contextlib.suppress(Unavailable):
                return bool(client.status()["pid"] == pid)
            return False

        wait_until(is_served)
    assert starts_of(slow_command) == [pid]
    os.kill(pid, signal.SIGTERM)


def test_a_store_that_another_process_makes_ready_is_not_started_time_and_again(
    tmp_path: Path, slow_command: Path
) -> None:
    store = tmp_path / "store"
    (slow_command.parent / "go").touch()
    with (
        contextlib.closing(BlobDirectory.open(DirectoryConfig(store))),
        Client(store, start=True, deadline_s=4.0) as client,
    ):
        for _ in range(2):
            wait_until(lambda: time.monotonic() > client._calls.retry_at_s)
            with pytest.raises(Unavailable, match=r"another node has it.* socket was removed.*log"):
                client.status()
    assert len(starts_of(slow_command)) == 1
