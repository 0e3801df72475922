"""Looking at trees of files: every name once, every byte counted once."""

import pytest

from kvfs.errors import InvalidInput, NamespaceError
from kvfs.inspect import (
    PAGE_ITEMS,
    describe,
    disk_usage,
    files_below,
    list_directory,
    parse_digest,
    walk,
)
from tests.fake_client import FakeClient


@pytest.fixture
def client() -> FakeClient:
    fake = FakeClient()
    fake.add_file(b"a/one", b"1" * 5000)
    fake.add_file(b"a/b/two", b"2" * 100)
    fake.add_file(b"a/b/copy", b"1" * 5000)
    fake.add_file(b"a-z", b"3")
    fake.add_file(b"top", b"4" * 10)
    return fake


def test_walk_shows_directories_before_what_they_hold(client: FakeClient) -> None:
    paths = [found.path for found in walk(client, b"")]
    assert paths == [b"", b"a", b"a/b", b"a/b/copy", b"a/b/two", b"a/one", b"a-z", b"top"]
    assert [found.path for found in walk(client, b"a/one")] == [b"a/one"]


def test_walk_of_nothing_is_an_error(client: FakeClient) -> None:
    with pytest.raises(NamespaceError):
        list(walk(client, b"absent"))


def test_long_directories_are_read_in_pages_without_loss() -> None:
    client = FakeClient()
    names = [b"%05d" % number for number in range(2 * PAGE_ITEMS + 1)]
    for name in names:
        client.inodes[b"d/" + name] = client.inodes[b""]
    client.inodes[b"d"] = client.inodes[b""]
    assert [entry.name for entry in list_directory(client, b"d")] == names


def test_a_directory_that_vanishes_is_left_out(client: FakeClient) -> None:
    paths = []
    for found in walk(client, b""):
        paths.append(found.path)
        if found.path == b"a/b":
            for path in (b"a/b", b"a/b/copy", b"a/b/two"):
                client.remove(path)
    assert paths == [b"", b"a", b"a/b", b"a/one", b"a-z", b"top"]


def sums(client: FakeClient, path: bytes, depth: int) -> dict[bytes, tuple[int, int, int, int]]:
    return {
        item.path: (item.files, item.size_bytes, item.unique_bytes, item.allocated_bytes)
        for item in disk_usage(client, path, depth)
    }


def test_sums_count_equal_bytes_once_where_they_are_met_first(client: FakeClient) -> None:
    assert sums(client, b"", 9) == {
        b"a/b": (2, 5100, 5100, 8192 + 4096),
        b"a": (3, 10_100, 5100, 8192 + 4096),
        b"": (5, 10_111, 5111, 8192 + 3 * 4096),
    }


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_depth_changes_what_is_shown_and_not_the_sums(client: FakeClient, depth: int) -> None:
    found = sums(client, b"", depth)
    everything = sums(client, b"", 9)
    assert found == {path: everything[path] for path in found}
    assert len(found) == min(depth, 2) + 1


def test_sums_of_a_part_of_the_tree(client: FakeClient) -> None:
    assert sums(client, b"a/b", 0) == {b"a/b": (2, 5100, 5100, 12_288)}
    assert sums(client, b"top", 3) == {b"top": (1, 10, 10, 4096)}


def test_children_come_before_their_directory(client: FakeClient) -> None:
    assert [item.path for item in disk_usage(client, b"", 9)] == [b"a/b", b"a", b""]


def test_describe_by_path_and_by_digest(client: FakeClient) -> None:
    digest = client.inodes[b"a/one"].digest
    by_path = describe(client, b"a/one", "a/one")
    by_digest = describe(client, digest.hex().encode(), digest.hex())
    assert by_path.same_bytes == (b"a/b/copy",)
    assert (by_digest.path, by_digest.same_bytes) == (b"a/b/copy", (b"a/one",))
    assert by_path.blob is not None and by_path.blob.references == 2
    with pytest.raises(NamespaceError):
        describe(client, b"absent", "absent")
    with pytest.raises(NamespaceError):
        describe(client, b"0" * 32, "0" * 32)


def test_describe_a_directory(client: FakeClient) -> None:
    found = describe(client, b"a", "a")
    assert found.inode.is_directory and found.blob is None and found.same_bytes == ()


def test_digests() -> None:
    assert parse_digest("00ff" * 8) == b"\x00\xff" * 8
    assert parse_digest("00ff" * 7) is None
    assert parse_digest("kv/model@0123456789abcdef0123456") is None


def test_files_below_are_published_files(client: FakeClient) -> None:
    assert list(files_below(client, [b"a/b", b"top"])) == [b"a/b/copy", b"a/b/two", b"top"]
    with pytest.raises(NamespaceError):
        list(files_below(client, [b"absent"]))
    client.inodes[b"new"] = client.inodes[b"top"].__class__(99, 0o100644, 0, 0, 1, 5, 0, 0, 0)
    with pytest.raises(InvalidInput, match="no published file"):
        list(files_below(client, [b"new"]))
