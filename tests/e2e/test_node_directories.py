"""The directories of a real node's store: several, missing, changed, and of another store."""

import os
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.commands import kvfs
from tests.files import load_bytes, store_bytes

MIB = 1024 * 1024


def test_a_store_with_a_long_path_works(start_node, tmp_path: Path) -> None:
    store = tmp_path.joinpath(*["x" * 60] * 3)
    node = start_node(store=store)
    with Client(node.store) as client:
        store_bytes(client, b"f", b"x")
        assert load_bytes(client, b"f") == b"x"


def test_several_directories_fill_evenly_and_are_found_again(start_node, tmp_path: Path) -> None:
    other = tmp_path / "second"
    node = start_node(extra_stores=[other])
    with Client(node.store) as client:
        for number in range(12):
            store_bytes(client, b"f%d" % number, os.urandom(MIB))
        held = [d["blob_bytes"] for d in client.status()["directories"]]
        assert min(held) >= 3 * MIB
    node.stop()
    start_node(store=node.store)
    with Client(node.store) as client:
        opened = client.open([b"f%d" % n for n in range(12)])
        assert None not in opened
        for item in opened:
            item.close()


def test_a_directory_that_a_start_does_not_name_keeps_its_limits(
    start_node, tmp_path: Path
) -> None:
    home, other = tmp_path / "store", tmp_path / "second"
    config = (
        f'[[store]]\npath = "{home}"\n'
        f'[[store]]\npath = "{other}"\nmax_bytes = "64MiB"\nmin_free = "3%"\n'
    )
    node = start_node(extra_stores=[other], config=config)
    with Client(node.store) as client:
        named = client.status()["directories"][1]
    assert named["max_bytes"] == 64 * MIB
    node.stop()
    for _ in range(2):  # it is remembered also by the start that remembered it
        node = start_node(store=node.store)
        with Client(node.store) as client:
            directory = client.status()["directories"][1]
        assert directory["path"] == str(other)
        assert directory["max_bytes"] == 64 * MIB
        assert directory["min_free_bytes"] == named["min_free_bytes"]
        node.stop()


@pytest.mark.parametrize(
    "text", ["[1,2]", "{}", "{", '[{"id": "a", "path": "/b", "max_bytes": []}]']
)
def test_a_damaged_list_of_directories_is_told_in_words(start_node, text: str) -> None:
    node = start_node()
    node.stop()
    (node.store / "meta" / "directories.json").write_text(text)
    ran = kvfs("serve", "--store", str(node.store))
    assert ran.returncode == 2
    assert "directories.json: is damaged; remove it" in ran.stderr.splitlines()[-1]


def test_a_missing_directory_is_told_and_comes_back(start_node, tmp_path: Path) -> None:
    part = tmp_path / "part"
    names = [b"%d" % n for n in range(6)]
    node = start_node(extra_stores=(part,))
    with Client(node.store) as client:
        for name in names:
            store_bytes(client, name, name * 1000)
    node.stop()
    part.rename(tmp_path / "away")
    for extra in ((), (part,)):
        node = start_node(store=node.store, extra_stores=extra, allow="is not there")
        assert f"{part} is not there; what lies in it is missing" in node.log.read_text()
        with Client(node.store) as client:
            status = client.status()
            assert [d["present"] for d in status["directories"]] == [True, False]
            assert [line.split(" is ")[0] for line in status["missing"]] == [str(part)]
            store_bytes(client, b"more", b"more")
        node.stop()
        assert not part.exists()
    (tmp_path / "away").rename(part)
    node = start_node(store=node.store, extra_stores=(part,))
    with Client(node.store) as client:
        assert [load_bytes(client, name) for name in names] == [name * 1000 for name in names]


def test_a_disk_that_another_took_the_place_of_is_told(start_node, tmp_path: Path) -> None:
    part = tmp_path / "part"
    node = start_node(extra_stores=(part,))
    node.stop()
    part.rename(tmp_path / "away")
    start_node(store=part).stop()
    for extra in ((), (part,)):
        node = start_node(store=node.store, extra_stores=extra, allow="now holds another store")
        with Client(node.store) as client:
            store_bytes(client, b"more", b"more")
        node.stop()


def test_a_part_of_a_store_is_no_store_by_itself(start_node, tmp_path: Path) -> None:
    part = tmp_path / "part"
    node = start_node(extra_stores=(part,))
    with Client(node.store) as client:
        names = [b"%d" % n for n in range(6)]
        for name in names:
            store_bytes(client, name, name * 1000)
    node.stop()
    assert any((part / "blobs").glob("*/*/*"))
    for command in ("serve", "ls", "status"):
        ran = kvfs(command, "--store", str(part))
        assert ran.returncode == 2
        assert f"is a part of {node.store}; name that first" in ran.stderr.splitlines()[-1]
    node = start_node(store=node.store)
    with Client(node.store) as client:
        assert [load_bytes(client, name) for name in names] == [name * 1000 for name in names]


def test_a_path_in_no_encoding_holds_a_store(start_node, tmp_path: Path) -> None:
    for _ in range(2):
        node = start_node(store=Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
        with Client(node.store) as client:
            store_bytes(client, b"a", b"bytes")
            assert load_bytes(client, b"a") == b"bytes"
        node.stop()
