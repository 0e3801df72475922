"""What is damaged in a real node's store: its metadata, its blobs, and what is in their way."""

import os
import shutil
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.digest import digest_of
from kvfs.errors import Corrupt, NamespaceError
from tests.files import ODD_KINDS, load_bytes, store_bytes

MIB = 1024 * 1024


@pytest.mark.parametrize("damage", ["cut short", "emptied", "overwritten", "gone"])
def test_damaged_metadata_is_set_aside_and_rebuilt(start_node, damage: str) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"plain", b"x" * 10_000)
    assert node.stop() == 0
    database = node.store / "meta" / "data.mdb"
    size_bytes = database.stat().st_size
    if damage == "gone":
        database.unlink()
    elif damage == "overwritten":
        with open(database, "r+b") as file:
            file.write(b"\x55" * size_bytes)
    else:
        os.truncate(database, 0 if damage == "emptied" else size_bytes // 2)
    start_node(store=node.store, allow="rebuilding names")
    with Client(node.store) as client:
        assert client.lookup([b"plain"]) == [None]
        store_bytes(client, b"plain", b"y")
        assert load_bytes(client, b"plain") == b"y"
        assert client.status()["blobs"] == 1


def test_damaged_pages_end_in_a_rebuild(start_node) -> None:
    node = start_node(allow=".")
    with Client(node.store) as client:
        for number in range(2000):
            store_bytes(client, b"d%d/f%d" % (number % 7, number), b"x")
        database = node.store / "meta" / "data.mdb"
        with open(database, "r+b") as file:  # what the node has mapped
            for page in range(20, database.stat().st_size // 4096):
                file.seek(page * 4096)
                file.write(b"\x55" * 4096)
        with pytest.raises(Corrupt, match="restart the node"):
            for number in range(2000):
                client.lookup([b"d%d/f%d" % (number % 7, number)])
    node.kill()
    start_node(store=node.store, allow="rebuilding names")
    with Client(node.store) as client:
        store_bytes(client, b"plain", b"y")
        assert load_bytes(client, b"plain") == b"y"
        assert client.status()["blobs"] == 1


def test_a_corrupt_file_is_quarantined_and_written_again(start_node) -> None:
    node = start_node(allow="its bytes changed")
    data = os.urandom(MIB)
    blob = node.store / "blobs" / digest_of(data).hex()[:2] / digest_of(data).hex()[2:4]
    with Client(node.store) as client:
        store_bytes(client, b"f", data)
        with open(blob / digest_of(data).hex(), "r+b") as file:
            file.seek(1000)
            file.write(bytes([data[1000] ^ 1]))
        assert client.report_corrupt(digest_of(data)) is True
        assert client.lookup([b"f"]) == [None]
        assert len(os.listdir(node.store / "quarantine")) == 1
        store_bytes(client, b"f", data)
        assert load_bytes(client, b"f") == data
        assert client.report_corrupt(digest_of(data)) is False


@pytest.mark.parametrize("damage", ["remove", "truncate", "empty", "fifo", "link"])
def test_a_damaged_blob_is_a_miss_at_open(start_node, damage: str) -> None:
    node = start_node(allow="lost its file|wrong length|in the way of a blob")
    data = os.urandom(10_000)
    name = digest_of(data).hex()
    with Client(node.store) as client:
        store_bytes(client, b"f", data)
        blob = node.store / "blobs" / name[:2] / name[2:4] / name
        if damage in ("truncate", "empty"):
            os.truncate(blob, 5000 if damage == "truncate" else 0)
        else:
            blob.unlink()
        if damage == "fifo":
            os.mkfifo(blob)
        elif damage == "link":
            blob.symlink_to("/nowhere")
        assert client.open([b"f"]) == [None]
        assert client.lookup([b"f"]) == [None]
        collected = client.gc()
        assert collected["orphan_blobs"] == 0
        assert collected["left"] == ([str(blob)] if damage in ("fifo", "link") else [])
        store_bytes(client, b"f", data)
        assert load_bytes(client, b"f") == data


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_in_a_blobs_way_goes_to_the_quarantine(
    start_node, level: int, is_known: bool
) -> None:
    """A directory, with content, where a blob belongs; a file where its directory does."""
    found = "a directory" if level == 3 else "a file"
    data = os.urandom(10_000)
    name = digest_of(data).hex()
    node = start_node(allow="lost its file|in the way of a blob")
    place = node.store.joinpath("blobs", *(name[:2], name[2:4], name)[:level])
    with Client(node.store) as client:
        if is_known:
            store_bytes(client, b"f", data)
            shutil.rmtree(place) if level < 3 else place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        if level < 3:
            place.write_bytes(b"somebody's")
        else:
            (place / "below").mkdir(parents=True)
        assert client.open([b"f"]) == [None]
        if is_known and level == 3:
            assert client.gc()["left"] == [str(place)]
            assert os.listdir(node.store / "staging") == []
        store_bytes(client, b"f", data)
        assert load_bytes(client, b"f") == data
    assert len(os.listdir(node.store / "quarantine")) == 1
    assert f"{place} is {found} in the way of a blob" in node.log.read_text()
    node.stop()
    node = start_node(store=node.store)
    with Client(node.store) as client:
        assert load_bytes(client, b"f") == data


@pytest.mark.parametrize("found", ["a FIFO", "a symbolic link", "a socket", "a character device"])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_rename_would_replace_goes_to_the_quarantine_as_well(
    start_node, tmp_path: Path, found: str, is_known: bool
) -> None:
    data = os.urandom(10_000)
    name = digest_of(data).hex()
    node = start_node(allow="lost its file|in the way of a blob")
    place = node.store.joinpath("blobs", name[:2], name[2:4], name)
    target = tmp_path / "target"
    target.write_bytes(data)
    with Client(node.store) as client:
        if is_known:
            store_bytes(client, b"f", data)
            place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        if found == "a symbolic link":
            place.symlink_to(target)
        elif found == "a character device" and os.geteuid() != 0:
            pytest.skip("only root makes devices")
        else:
            os.mknod(place, 0o600 | ODD_KINDS[found], os.makedev(1, 3))
        was = os.lstat(place)
        store_bytes(client, b"g", data)
        assert load_bytes(client, b"g") == data
        assert place.is_file() and not place.is_symlink()
    (kept,) = (node.store / "quarantine").iterdir()
    assert (os.lstat(kept).st_ino, os.lstat(kept).st_mode) == (was.st_ino, was.st_mode)
    told = f"{place} is {found} in the way of a blob; moved to quarantine/{kept.name}"
    assert node.log.read_text().count(told) == 1
    assert target.read_bytes() == data


def test_a_start_passes_over_what_is_no_fan_out_directory(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"f", b"bytes")
    node.stop()
    blobs = node.store / "blobs"
    taken = set(os.listdir(blobs))
    free = [f"{n:02x}" for n in range(256) if f"{n:02x}" not in taken]
    (blobs / free[0]).touch()
    (blobs / free[1]).symlink_to("nowhere")
    (blobs / free[2]).mkdir()
    (blobs / free[2] / "00").touch()
    node = start_node(store=node.store)
    with Client(node.store) as client:
        assert client.gc()["orphan_blobs"] == 0
        assert client.rebuild() == 0
        assert load_bytes(client, b"f") == b"bytes"


def test_many_files_are_verified_in_one_question(start_node) -> None:
    node = start_node(allow="its bytes changed|lost its file")
    with Client(node.store) as client:
        for name in (b"good", b"bad", b"lost"):
            store_bytes(client, name, name * 1000)
        for name in (b"bad", b"lost"):
            digest = digest_of(name * 1000).hex()
            blob = node.store / "blobs" / digest[:2] / digest[2:4] / digest
            if name == b"lost":
                blob.unlink()
            else:
                blob.write_bytes(b"BAD" * 1000)
        found = client.verify_all([b"good", b"bad", b"absent", b"lost", b"good", b"bad"])
        assert found == [True, False, None, False, True, None]
        assert client.verify(b"good") is True
        with pytest.raises(NamespaceError):
            client.verify(b"absent")
