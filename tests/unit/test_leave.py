"""`kvfs leave`: what it prints while a node moves what only it has, and how it ends."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from kvfs import cli
from kvfs.client import Client
from kvfs.errors import InvalidInput, Unavailable
from kvfs.shell import leave as module
from kvfs.shell import operate
from kvfs.shell.leave import leave
from kvfs.shell.locate import Mounted, Place
from kvfs.shell.progress import Progress
from kvfs.shell.session import Session


def said(**changed: Any) -> dict[str, Any]:
    return {
        "is_leaving": True, "is_done": False, "problem": "", "moved_files": 0, "moved_bytes": 0,
        "to_move_bytes": 0, "left_files": 0, "left_bytes": 0, "left": [], **changed,
    }  # fmt: skip


@dataclass
class FakeClient:
    answers: list[dict[str, Any]]
    begun: int = 0

    def leave(self, *, begin: bool = True) -> dict[str, Any]:
        self.begun += begin
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class FakeProgress:
    is_shown = True
    totals: list[int] = field(default_factory=list)
    done: int = 0

    def set_total(self, total_bytes: int) -> None:
        self.totals.append(total_bytes)

    def advance(self, done_bytes: int) -> None:
        self.done += done_bytes


@dataclass
class Ground:
    client: FakeClient
    progress: FakeProgress = field(default_factory=FakeProgress)
    out: io.StringIO = field(default_factory=io.StringIO)

    def run(self, *, is_json: bool = False) -> int:
        @contextmanager
        def show(description: str) -> Iterator[Progress]:
            yield self.progress

        client, place = cast(Client, self.client), Place(Path("/store"), ())
        return leave(Session(client, place, self.out, is_json, 0, show))


@pytest.fixture(autouse=True)
def _time_passes_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])


def test_it_returns_when_nothing_is_only_here(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        said(moved_files=1, moved_bytes=50),  # by an earlier call
        said(moved_files=2, moved_bytes=150, to_move_bytes=300),
        said(moved_files=5, moved_bytes=450, is_done=True),
    ]
    ground = Ground(FakeClient(answers))
    assert ground.run() == 0
    assert ground.client.begun == 1
    assert ground.progress.totals == [400, 400]
    assert ground.progress.done == 400
    expected = (
        "5 files, 450 B moved to other nodes; nothing is only here, so the node may be stopped"
    )
    assert ground.out.getvalue() == expected + "\n"
    assert capsys.readouterr().err == ""


def test_what_is_left_is_named_and_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    left = [{"path": "/a\\x0a", "size_bytes": 7, "reason": "no other node has room for it"}]
    answer = said(is_done=True, left_files=3, left_bytes=21, left=left)
    ground = Ground(FakeClient([answer]))
    assert ground.run() == 1
    assert ground.out.getvalue().splitlines() == [
        "0 files, 0 B moved to other nodes",
        "left  /a\\x0a  7 B: no other node has room for it",
    ]
    assert capsys.readouterr().err == (
        "kvfs leave: 3 files, 21 B only here still; make room on other nodes, and run it again\n"
    )
    ground = Ground(FakeClient([answer]))
    assert ground.run(is_json=True) == 1
    assert json.loads(ground.out.getvalue()) == {
        "moved_files": 0, "moved_bytes": 0, "left_files": 3, "left_bytes": 21, "left": left,
    }  # fmt: skip


def test_without_the_metadata_server_it_ends_after_a_while() -> None:
    away = said(problem="the metadata server does not answer")
    ground = Ground(FakeClient([said(), *[away] * 100, said(), *[away] * 100, said(is_done=True)]))
    assert ground.run() == 0
    with pytest.raises(Unavailable, match=r"^/store: the metadata server .* run kvfs leave again"):
        Ground(FakeClient([said(), away])).run()


def test_a_store_is_named_by_its_directory_or_by_where_it_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, mountpoint, link = tmp_path / "store", tmp_path / "mnt", tmp_path / "link"
    store.mkdir()
    mountpoint.mkdir()
    (store / "kvfs.toml").touch()
    link.symlink_to(tmp_path)
    monkeypatch.setattr(cli, "_find_mounts", lambda: [Mounted(mountpoint, Path("/s"))])
    assert cli._store_at(str(store)) == store
    assert cli._store_at(str(mountpoint)) == cli._store_at(str(link / "mnt")) == Path("/s")
    told = io.StringIO()
    operate.doctor(link / "mnt", cli._find_mounts, told, is_json=True)
    of_stores = {finding["store"] for finding in json.loads(told.getvalue())["findings"]}
    assert of_stores == {None, "/s"}
    for other in (tmp_path, mountpoint / "below", tmp_path / "none"):
        with pytest.raises(InvalidInput, match="is neither a kvfs store nor where one is mounted"):
            cli._store_at(str(other))


def test_it_is_named_in_the_help_and_takes_one_store(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "    leave  " in capsys.readouterr().out
    assert cli.main(["leave", "/a", "--store", "/b"]) == 2
    assert capsys.readouterr().err == "kvfs leave: /a: and --store are two; name one\n"
