"""A store of several directories, the disk of one of which takes no more files, or has gone."""

import errno
import json
import logging
import resource
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvfs.config import MIB
from kvfs.node import Node
from tests.commands import kvfs_json
from tests.conftest import StartMount
from tests.disks import small_disk
from tests.own_node import blob_path, load, store
from tests.processes import wait_until

TOLD = "no file can be made in"


def directories_of(node: Node, count: int) -> set[int]:
    """Where so many stages are made, all of them at once."""
    stages = [node.stage() for _ in range(count)]
    for stage in stages:
        node.discard(stage)
    return {stage.directory for stage in stages}


def test_a_directory_that_takes_no_file_is_avoided(
    node: Node, tmp_path: Path, allow_warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    allow_warnings.append(TOLD)
    assert directories_of(node, 4) == {0, 1}
    staging = tmp_path / "two" / "staging"
    staging.rmdir()
    staging.touch()
    with caplog.at_level(logging.WARNING):
        assert directories_of(node, 4) == {0}
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{TOLD} {tmp_path / 'two'}: [Errno {errno.ENOTDIR}]")


def test_it_is_tried_again_later(
    node: Node, tmp_path: Path, allow_warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_warnings.append(TOLD)
    monkeypatch.setattr("kvfs.space.DIRECTORY_AVOIDED_S", 0.0)
    staging = tmp_path / "two" / "staging"
    staging.rename(tmp_path / "kept")
    assert directories_of(node, 4) == {0}
    (tmp_path / "kept").rename(staging)
    assert directories_of(node, 4) == {0, 1}


def test_where_no_directory_takes_a_file_the_last_one_says_why(
    node: Node, tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append(TOLD)
    for name in ("one", "two"):
        (tmp_path / name / "staging").rmdir()
    with pytest.raises(FileNotFoundError):
        node.stage()
    (tmp_path / "one" / "staging").mkdir()
    assert directories_of(node, 2) == {0}


def test_a_process_without_descriptors_blames_no_directory(node: Node) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            node.stage()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert directories_of(node, 4) == {0, 1}


def test_a_directory_that_has_gone_keeps_its_figures(
    node: Node, tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append(TOLD)
    free = node.space.statfs().free_bytes
    shutil.rmtree(tmp_path / "two")
    for directory in node.directories:
        assert directory is not None
        directory.note_freed()
    assert node.space.statfs().free_bytes == pytest.approx(free, rel=0.5)
    assert directories_of(node, 4) == {0}


def test_a_directory_that_is_away_for_a_while_costs_no_names(
    node: Node, tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("cannot be read: No such file|has lost its file")
    away, lost = store(node, b"away", b"x" * 9000, 1), store(node, b"lost", b"y" * 9000, 1)
    directory = tmp_path / "two"
    directory.rename(tmp_path / "kept")
    assert load(node, b"away") is None
    directory.mkdir()  # as a mount point is, without its disk
    assert load(node, b"away") is None
    directory.rmdir()
    (tmp_path / "kept").rename(directory)
    assert load(node, b"away") == b"x" * 9000
    blob_path(node, lost.digest, 1).unlink()
    assert load(node, b"lost") is None
    assert node.meta.resolve([b"away", b"lost"]) == [node.meta.inode(away.ino), None]


def test_a_mount_writes_on_when_one_disk_turns_read_only_and_when_it_has_gone(
    start_mount: StartMount, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        mount = start_mount(extra_stores=(disk,), allow=f"{TOLD}|cannot be read|lost its file")
        before = _write(mount.mountpoint, "before")
        status = json.loads((mount.mountpoint / ".kvfs" / "status.json").read_bytes())
        assert all(directory["used_bytes"] > 2 * MIB for directory in status["directories"])
        assert _doctor(mount.store, code=0) == "1 beside the first, takes files"
        wait_until(lambda: _is_read_only_now(disk))  # nobody writes there any more
        during = _write(mount.mountpoint, "during")
        for file, data in {**before, **during}.items():
            assert file.read_bytes() == data
        assert _doctor(mount.store, code=1) == f"{disk}: Read-only file system"
    after = _write(mount.mountpoint, "after")  # it has gone
    for file, data in {**during, **after}.items():
        assert file.read_bytes() == data
    assert _doctor(mount.store, code=1).startswith(f"{disk} is not there")
    assert set(mount.mountpoint.iterdir()) >= {*before, *during, *after}


def _doctor(store: Path, code: int) -> str:
    """What `kvfs doctor` finds of a store's other directories."""
    findings = kvfs_json("doctor", store=store, code=code)["findings"]
    return str(next(f["found"] for f in findings if f["check"] == "more directories"))


def _is_read_only_now(disk: Path) -> bool:
    """Have a disk take nothing any more, unless somebody has a file of it open for writing."""
    words = ["mount", "-o", "remount,ro", disk]
    return subprocess.run(words, capture_output=True, timeout=30).returncode == 0


def _write(mountpoint: Path, name: str) -> dict[Path, bytes]:
    """Files of some MiB, in each directory where there are several."""
    files = {
        mountpoint / f"{name}{number}": name.encode() * (MIB // 2 + number) for number in range(6)
    }
    with ExitStack() as stack:  # open at once, so that they are spread
        for file, data in files.items():
            stack.enter_context(file.open("wb")).write(data)
    return files
