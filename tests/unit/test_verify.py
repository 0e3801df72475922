"""Checking many files: in few questions, equal bytes once, whatever vanishes meanwhile."""

import pytest

from kvfs import verify
from kvfs.errors import NamespaceError
from kvfs.inspect import PAGE_ITEMS
from kvfs.meta.contract import Entry
from kvfs.verify import Verdict, verify_files
from tests.fake_client import FakeClient


class BatchClient(FakeClient):
    """Answers for many files at once, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.unreadable: set[bytes] = set()

    def verify_all(self, paths: list[bytes]) -> list[bool | str | None]:
        self.asked.append(len(paths))
        return [self._verify_one(path) for path in paths]

    def _verify_one(self, path: bytes) -> bool | str | None:
        if path in self.unreadable:
            return "Input/output error"
        try:
            return self.verify(path)
        except NamespaceError:
            return None


@pytest.fixture
def client() -> BatchClient:
    made = BatchClient()
    made.add_file(b"a/b/copy", b"same")
    made.add_file(b"a/one", b"same")
    made.add_file(b"top", b"other")
    return made


def verdicts_of(client: BatchClient) -> dict[bytes, Verdict]:
    return {item.path: item.verdict for item in verify_files(client, b"")}


def test_equal_bytes_are_read_once(client: BatchClient) -> None:
    checked = list(verify_files(client, b""))
    assert [item.path for item in checked] == [b"a/b/copy", b"a/one", b"top"]
    assert {item.verdict for item in checked} == {Verdict.GOOD}
    assert [item.read_bytes for item in checked] == [4, 0, 5]
    assert client.asked == [2]


def test_many_small_files_take_few_questions(client: BatchClient) -> None:
    for number in range(2 * PAGE_ITEMS):
        client.add_file(b"many/%04d" % number, b"%d" % (number % (PAGE_ITEMS + 100)))
    checked = list(verify_files(client, b""))
    assert len(checked) == 2 * PAGE_ITEMS + 3
    assert len(client.asked) == 3
    assert len(client.verified) == PAGE_ITEMS + 102


def test_a_question_is_about_a_bounded_number_of_bytes(
    client: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_BATCH_BYTES_MAX", 100)
    for number in range(6):
        client.add_file(b"z/%d" % number, b"%d" % number, size_bytes=200 if number == 3 else 45)
    assert set(verdicts_of(client).values()) == {Verdict.GOOD}
    assert client.asked == [3, 2, 1, 2]


def test_every_name_of_bad_bytes_is_told(client: BatchClient) -> None:
    client.bad.add(client.inodes[b"a/one"].digest)
    assert verdicts_of(client) == {
        b"a/b/copy": Verdict.CORRUPT,
        b"a/one": Verdict.CORRUPT,
        b"top": Verdict.GOOD,
    }


def test_what_cannot_be_read_is_told_with_the_reason(client: BatchClient) -> None:
    client.unreadable.add(b"a/b/copy")
    checked = {item.path: item for item in verify_files(client, b"")}
    for path in (b"a/b/copy", b"a/one"):  # the same bytes
        assert checked[path].verdict is Verdict.UNREADABLE
        assert (checked[path].reason, checked[path].read_bytes) == ("Input/output error", 0)
    assert checked[b"top"].verdict is Verdict.GOOD


def test_a_name_that_vanished_says_nothing_of_equal_bytes_elsewhere(client: BatchClient) -> None:
    def lose_first(paths: list[bytes]) -> list[bool | str | None]:
        client.inodes.pop(b"a/b/copy", None)
        return BatchClient.verify_all(client, paths)

    client.verify_all = lose_first  # type: ignore[method-assign]  # once, between list and question
    assert verdicts_of(client) == {
        b"a/b/copy": Verdict.GONE,
        b"a/one": Verdict.GOOD,
        b"top": Verdict.GOOD,
    }


def test_what_is_gone_or_still_being_written_is_said_to_be(client: BatchClient) -> None:
    page = client.entries(b"", b"", 10)
    gone = Entry(b"gone", client.add_file(b"gone", b"gone"))
    client.remove(b"gone")
    unpublished = Entry(b"new", client.inodes[b"top"].__class__(99, 0o100644, 0, 0, 1, 5, 0, 0, 0))
    client.entries = lambda *_: [*page[1:], gone, unpublished]  # type: ignore[method-assign]
    assert verdicts_of(client) == {
        b"gone": Verdict.GONE,
        b"new": Verdict.UNPUBLISHED,
        b"top": Verdict.GOOD,
    }
