"""`kvfs warm`: what it asks a node for, what it prints, and how it ends."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvfs.client import Client
from kvfs.config import GIB, MIB, WARM_WINDOW_BYTES, WARM_WINDOW_FILES
from kvfs.errors import InvalidInput, NamespaceError
from kvfs.shell import warm as command
from kvfs.shell.locate import Place
from kvfs.shell.session import Session
from kvfs.warm import Warmth, warm_files
from tests.fake_client import FakeClient


class Node(FakeClient):
    """Brings `at_once` blobs in each answer; `nowhere` are those that nobody gives."""

    def __init__(self, at_once: int = 2, *, is_slow: bool = False) -> None:
        super().__init__()
        self.is_slow = is_slow
        self.away: set[bytes] = set()
        self.nowhere: set[bytes] = set()
        self.at_once = at_once
        self.asked: list[list[bytes]] = []
        self.room_bytes = GIB

    def put_away(self, path: bytes, content: bytes = b"", *, size_bytes: int = MIB) -> bytes:
        inode = self.add_file(path, content or path, size_bytes=size_bytes)
        self.away.add(inode.digest)
        return inode.digest

    def is_here(self, digests: Sequence[bytes]) -> list[bool]:
        return [digest not in self.away for digest in digests]

    def warm(self, paths: Sequence[bytes]) -> list[Warmth]:
        self.asked.append(list(paths))
        inodes = [self.inodes.get(path) for path in paths]
        coming = {i.digest for i in inodes if i is not None and i.digest in self.away}
        answers = []
        for inode in inodes:
            if inode is None:
                answers.append(Warmth.GONE)
            elif inode.digest in self.nowhere:
                answers.append(Warmth.MISSING)
            else:
                answers.append(Warmth.COMING if inode.digest in coming else Warmth.HERE)
        brought = set(sorted(coming - self.nowhere)[: self.at_once])
        self.away -= brought
        if self.is_slow:  # they come between two answers
            return answers
        return [
            Warmth.BROUGHT if inode is not None and inode.digest in brought else answer
            for inode, answer in zip(inodes, answers, strict=True)
        ]

    def status(self) -> dict[str, Any]:
        room = {"present": True, "used_bytes": 0, "room_bytes": self.room_bytes}
        return {"directories": [room, {"present": False}]}


class Bar:
    is_shown = True

    def __init__(self) -> None:
        self.total = self.done = 0

    def set_total(self, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, done_bytes: int) -> None:
        self.done += done_bytes


def run(node: Node, *paths: bytes, is_json: bool = False) -> tuple[int, str, Bar]:
    bar, out = Bar(), io.StringIO()

    @contextmanager
    def show(description: str) -> Iterator[Bar]:
        yield bar

    place = Place(Path("/store"), paths, None)
    code = command.warm(Session(cast(Client, node), place, out, is_json, 0, show))
    return code, out.getvalue(), bar


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_away_comes_and_is_counted_once(is_slow: bool) -> None:
    node = Node(is_slow=is_slow)
    for number in range(5):
        node.put_away(b"kv/%d" % number)
    node.put_away(b"kv/same", b"kv/3")
    node.add_file(b"kv/here", b"here", size_bytes=MIB)
    node.add_file(b"elsewhere", b"else")
    code, said, bar = run(node, b"kv")
    assert (code, said) == (0, "5 files brought, 5 MiB; 2 here already\n")
    assert bar.total == bar.done == 6 * MIB
    assert not node.away
    assert not any(b"elsewhere" in asked for asked in node.asked)


def test_what_nobody_gives_is_printed_and_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    node = Node()
    node.nowhere.add(node.put_away(b"lost"))
    node.put_away(b"found")
    code, said, _ = run(node, b"lost", b"found")
    assert (code, said) == (1, "missing  /lost\n1 file brought, 1 MiB; 0 here already\n")
    assert "no tier and no other node gives 1 file; see kvfs show" in capsys.readouterr().err
    code, said, _ = run(node, b"", is_json=True)
    assert code == 1
    assert json.loads(said) == {
        "command": "warm", "brought_files": 0, "brought_bytes": 0, "here_files": 1,
        "here_bytes": MIB, "missing_files": 1,
        "missing": [{"path": "/lost", "size_bytes": MIB}],
    }  # fmt: skip


def test_who_interrupts_is_told_that_what_was_asked_for_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(paths: Sequence[bytes]) -> list[Warmth]:
        raise KeyboardInterrupt

    node = Node()
    node.put_away(b"kv/1")
    monkeypatch.setattr(node, "warm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(node, b"kv")
    said = capsys.readouterr().err
    assert said.startswith("kvfs warm: interrupted; what was asked for goes on")
    assert "kvfs status" in said and said.count("\n") == 1


def test_more_than_the_store_holds_is_refused_before_anything_moves() -> None:
    node = Node()
    node.put_away(b"large", size_bytes=2 * GIB)
    with pytest.raises(InvalidInput, match=r"2 GiB are not here, .* no more than 1 GiB; name less"):
        run(node, b"large")
    assert node.asked == []
    with pytest.raises(NamespaceError):
        run(node, b"absent")


def test_only_a_window_of_files_is_asked_for() -> None:
    node = Node(at_once=10**6)
    for number in range(WARM_WINDOW_FILES + 10):
        node.put_away(b"d/%05d" % number, size_bytes=1)
    node.put_away(b"e/1", size_bytes=WARM_WINDOW_BYTES)
    node.put_away(b"e/2", size_bytes=1)
    assert len(list(warm_files(node, [b"d", b"d/00000", b"e"]))) == WARM_WINDOW_FILES + 13
    assert max(map(len, node.asked)) == WARM_WINDOW_FILES
    assert not any(b"e/1" in asked and b"e/2" in asked for asked in node.asked)


def test_a_file_that_goes_meanwhile_is_left_out() -> None:
    node = Node(at_once=0)
    node.put_away(b"a")
    warming = warm_files(node, [b"a"])
    node.warm = lambda paths: [Warmth.GONE for _ in paths]  # type: ignore[method-assign]  # a fault
    assert list(warming) == []
