"""The tree of cached prefixes: runs, branches, groups and shards, orphans, and hostile headers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvfs.errors import InvalidInput
from kvfs.meta.contract import ChunkEntry
from kvfs.shell import positions
from kvfs.shell.namespaces import (
    ESTIMATE_FILES,
    choose_namespaces,
    estimate_chunks,
    find_namespaces,
)
from kvfs.shell.prefixes import InodeSet, Run, TreeWalk
from tests.fake_client import START_NS, FakeClient

FINGERPRINT = "0123456789abcdef0123456789abcdef"
SPACE = b"kv/m@" + FINGERPRINT.encode()


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def chain(
    client: FakeClient, names: str, parent: str | None = None, start: int = 0, **options: object
) -> None:
    """Chunks of 256 tokens that follow each other, named by one letter each."""
    for name in names:
        client.add_chunk(SPACE, name, parent, (start, start + 256), **options)  # type: ignore[arg-type]
        parent, start = name, start + 256


def walk(client: FakeClient, depth: int | None = None, *, orphans: bool = False) -> list[Run]:
    (space,) = find_namespaces(client)
    tree = TreeWalk(client, space, estimate_chunks(client, space).parts)
    runs = list(tree.runs(depth))
    return list(tree.orphans(depth)) if orphans else runs


def shape(runs: list[Run]) -> list[tuple[int, int, int, int]]:
    return [(run.level, run.head.token_start, run.tail.token_end, run.positions) for run in runs]


def test_a_chain_is_one_run(client: FakeClient) -> None:
    chain(client, "abcdefgh")
    (run,) = walk(client)
    assert shape([run]) == [(0, 0, 2048, 8)]
    assert (run.files, run.size_bytes, run.branches) == (8, 8 * 2 * 2**20, 0)
    assert (run.number, run.parent, run.is_last, run.is_orphan) == (1, 0, True, False)


def test_branches_come_depth_first_and_the_last_used_first(client: FakeClient) -> None:
    chain(client, "ab")
    chain(client, "cd", "b", 512)
    chain(client, "ef", "b", 512)
    chain(client, "g", "f", 1024)
    chain(client, "h", "f", 1024)
    chain(client, "z")
    runs = walk(client)
    assert shape(runs) == [
        (0, 0, 256, 1),
        (0, 0, 512, 2),
        (1, 512, 1024, 2),
        (2, 1024, 1280, 1),
        (2, 1024, 1280, 1),
        (1, 512, 1024, 2),
    ]
    assert [run.parent for run in runs] == [0, 0, 2, 3, 3, 2]
    assert [run.is_last for run in runs] == [False, True, False, False, True, True]
    assert [run.branches for run in runs] == [0, 2, 2, 0, 0, 0]


def test_groups_and_shards_are_one_position(client: FakeClient) -> None:
    parts = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for part in parts:
        chain(client, "abc", part=part)
    (run,) = walk(client)
    assert (run.positions, run.files, run.incomplete) == (3, 12, 0)


def test_a_position_that_misses_a_part_is_incomplete_and_passed(client: FakeClient) -> None:
    chain(client, "abc")
    chain(client, "abc", part=(0, 1))
    path = next(
        path
        for path, inode in client.inodes.items()
        if inode.ino in client.infos
        and client.infos[inode.ino].token_start == 256
        and client.infos[inode.ino].shard == 1
    )
    client.remove(path)
    (run,) = walk(client)
    assert (run.positions, run.files, run.incomplete) == (3, 5, 1)


def test_depth_sums_up_what_it_hides(client: FakeClient) -> None:
    chain(client, "ab")
    chain(client, "cd", "b", 512)
    chain(client, "ef", "b", 512, used_ns=START_NS * 2)
    (run,) = walk(client, 1)
    assert (run.positions, run.branches, run.below_positions, run.below_files) == (2, 2, 4, 4)
    assert run.below_bytes == 4 * 2 * 2**20
    assert run.used_ns == START_NS * 2
    assert [run.number for run in walk(client, 2)] == [1, 2, 3]


def test_orphans_are_found_by_their_missing_parent(client: FakeClient) -> None:
    chain(client, "abcdef")
    chain(client, "z")
    gone = [p for p, i in client.inodes.items() if i.ino in client.infos]
    client.remove(gone[2])
    assert shape(walk(client)) == [(0, 0, 256, 1), (0, 0, 512, 2)]
    orphans = walk(client, orphans=True)
    assert shape(orphans) == [(0, 768, 1536, 3)]
    assert orphans[0].is_orphan


def test_siblings_behind_one_gap_are_found_once(client: FakeClient) -> None:
    chain(client, "a")
    chain(client, "bc", "a", 256)
    chain(client, "de", "a", 256)
    client.remove(next(p for p, i in client.inodes.items() if i.ino in client.infos))
    orphans = walk(client, orphans=True)
    assert sorted(shape(orphans)) == [(0, 256, 768, 2), (0, 256, 768, 2)]
    assert len({run.head.stem for run in orphans}) == 2


def test_chunks_that_come_meanwhile_are_no_orphans(client: FakeClient) -> None:
    chain(client, "ab")
    (space,) = find_namespaces(client)
    tree = TreeWalk(client, space, estimate_chunks(client, space).parts)
    assert len(list(tree.runs())) == 1
    chain(client, "cd", "b", 512)
    chain(client, "xy")
    assert list(tree.orphans()) == []


def test_headers_that_point_in_circles_end_the_walk(client: FakeClient) -> None:
    chain(client, "ab")
    first, second = (inode.ino for inode in client.inodes.values() if inode.ino in client.infos)
    a, b = client.infos[first], client.infos[second]
    client.infos[first] = replace(a, parent=b.key, token_start=512, token_end=768)
    client.add_chunk(SPACE, "r", None, (0, 256))
    client.infos[second] = replace(b, parent=a.key)
    assert shape(walk(client)) == [(0, 0, 256, 1)]
    assert walk(client, orphans=True) == []


def test_a_chunk_that_names_itself_as_parent(client: FakeClient) -> None:
    chain(client, "a")
    (ino,) = client.infos
    client.infos[ino] = replace(client.infos[ino], parent=client.infos[ino].key)
    assert walk(client) == walk(client, orphans=True) == []


def test_a_position_with_many_children_is_read_whole(client: FakeClient) -> None:
    for number in range(40):
        client.add_chunk(SPACE, f"n{number}", None, (0, 256))
    runs = walk(client)
    assert len(runs) == 40
    assert len({run.head.stem for run in runs}) == 40


def test_pins_and_times(client: FakeClient) -> None:
    chain(client, "ab", used_ns=START_NS + 77)
    path = next(p for p, i in client.inodes.items() if i.ino in client.infos)
    client.inodes[path] = replace(client.inodes[path], pinned=True)
    (run,) = walk(client)
    assert run.pinned == 1
    assert run.used_ns == START_NS + 77
    assert run.created_ns == max(i.mtime_ns for i in client.inodes.values())


# Namespaces ---------------------------------------------------------------------------------------
def test_names_of_models(client: FakeClient) -> None:
    other = FINGERPRINT[::-1]
    for model in (b"Qwen%2FQwen3-8B", b"Qwen%2FQwen3-32B", b"llama"):
        client.add_file(b"kv/" + model + b"@" + FINGERPRINT.encode() + b"/ab/x")
    client.add_file(b"kv/llama@" + other.encode() + b"/ab/x")
    client.add_file(b"kv/not-a-namespace/x")
    client.add_file(b"kv/file@" + FINGERPRINT.encode())
    spaces = find_namespaces(client)
    assert sorted({space.model for space in spaces}) == ["Qwen/Qwen3-32B", "Qwen/Qwen3-8B", "llama"]

    def models(word: str) -> list[str]:
        return [space.name for space in choose_namespaces(spaces, word)]

    assert models("Qwen/Qwen3-8B") == [f"Qwen/Qwen3-8B@{FINGERPRINT}"]
    assert models("Qwen3-3") == [f"Qwen/Qwen3-32B@{FINGERPRINT}"]
    assert models(f"kv/Qwen%2FQwen3-8B@{FINGERPRINT}") == [f"Qwen/Qwen3-8B@{FINGERPRINT}"]
    assert len(models("llama")) == len(models("ll")) == 2
    assert models(f"llama@{other}") == [f"llama@{other}"]
    assert models("mistral") == []
    with pytest.raises(InvalidInput, match=r"Qwen/Qwen3-32B, Qwen/Qwen3-8B"):
        models("Qwen")


def test_a_store_without_chunks_has_no_namespaces(client: FakeClient) -> None:
    assert find_namespaces(client) == []


def test_counts(client: FakeClient) -> None:
    chain(client, "abc", part=(1, 2))
    client.add_file(SPACE + b"/ab/foreign.txt")
    (space,) = find_namespaces(client)
    census = estimate_chunks(client, space)
    assert (census.files, census.size_bytes, census.is_estimate) == (3, 6 * 2**20, False)
    assert census.parts == {(1, 2)}
    assert ESTIMATE_FILES > 3


def test_a_walk_asks_for_many_chunks_at_once(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trunk in "ABCD":  # each a chain from which a chain branches off at every chunk
        names = [f"{trunk}{number}" for number in range(10)]
        parent = None
        for start, name in enumerate(names):
            span = (256 * start, 256 * start + 256)
            client.add_chunk(SPACE, name, parent, span)
            client.add_chunk(SPACE, f"{name}+", name, (span[1], span[1] + 256))
            parent = name
    batches = []
    answer = client.children_of

    def children_of(namespace: bytes, keys: Sequence[bytes], limit: int) -> list[list[ChunkEntry]]:
        batches.append(len(keys))
        return answer(namespace, keys, limit)

    monkeypatch.setattr(client, "children_of", children_of)
    runs = walk(client)
    assert sum(run.files for run in runs) == 80
    assert sum(batches) == 81  # the root, and each chunk once
    assert len(batches) <= 13  # as deep as the tree is


@pytest.mark.parametrize("room", [0, 1, 3])
def test_what_is_read_ahead_has_little_room(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    chain(client, "ab")
    chain(client, "cd", "b", 512)
    chain(client, "ef", "b", 512)
    chain(client, "g", "f", 1024)
    chain(client, "h", "f", 1024)
    expected = shape(walk(client))
    monkeypatch.setattr(positions, "AHEAD_POSITIONS_MAX", room)
    monkeypatch.setattr(positions, "AHEAD_WAITING_MAX", room)
    assert shape(walk(client)) == expected


def test_inode_sets() -> None:
    numbers = InodeSet()
    for ino in (1, 7, 8, 2**15 - 1, 2**15, 2**40):
        assert ino not in numbers
        numbers.add(ino)
        assert ino in numbers
    assert 9 not in numbers and 2**40 + 1 not in numbers


def test_chunk_records_that_no_engine_writes_are_passed_over(client: FakeClient) -> None:
    chain(client, "abc")
    for ino, key in zip(list(client.infos), (b"", b"\xff" * 200, b"ab-g7-s0"), strict=True):
        client.infos[ino] = replace(client.infos[ino], key=key, parent=b"")
    assert walk(client) == walk(client, orphans=True) == []
