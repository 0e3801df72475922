"""What the doctor says of a store's metadata: what the next start will make of it, and nothing of
one that a node has open. It changes nothing."""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.belonging import Belonging, write_belonging
from kvfs.client import Client
from kvfs.meta.lmdb import LmdbEngine, find_damage
from kvfs.shell.doctor.finding import Level
from kvfs.shell.doctor.metadata import check_metadata, look
from tests.chunks import store_chain
from tests.commands import kvfs, kvfs_text
from tests.conftest import StartNode
from tests.files import store_bytes

PAGE_BYTES = 4096


@pytest.fixture
def store(start_node: StartNode) -> Path:
    """One with chunk files and another, whose node was stopped."""
    node = start_node()
    with Client(node.store) as client:
        store_chain(client, "abc")
        store_bytes(client, b"plain", b"bytes")
    assert node.stop() == 0
    return node.store


def metadata_finding(store: Path) -> dict[str, str]:
    """What the doctor says of it, having changed nothing."""
    before = shown(store)
    ran = kvfs("doctor", "--json", store=store)
    assert shown(store) == before
    findings = json.loads(ran.stdout)["findings"]
    fails = any(f["level"] == "fail" for f in findings)  # also another mount of this machine
    assert ran.returncode == (1 if fails else 0), ran.stdout
    (finding,) = (f for f in findings if f["check"] == "metadata")
    return finding


def shown(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def cut_short(database: Path) -> None:
    os.truncate(database, database.stat().st_size // 2)


def overwrite(database: Path) -> None:
    database.write_bytes(b"\x55" * database.stat().st_size)


def enlarge_pages(database: Path) -> None:
    with open(database, "r+b") as file:
        file.seek(40)  # where LMDB says how large they are
        file.write(struct.pack("=I", 1 << 23 | PAGE_BYTES))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "is cut short": cut_short,
    "is damaged (": overwrite,
    "its pages have 8392704 bytes": enlarge_pages,
    "there are blobs without it": os.unlink,
    "the machine stopped while a node ran": lambda file: (file.parent / "running").write_text("x"),
    "the machine stopped while": lambda file: (file.parent / "running").write_bytes(b"\xff\xfe"),
    "names were not all rebuilt": lambda file: (file.parent / "running").write_text("rebuilding"),
    "a page of the metadata is damaged": lambda file: (file.parent / "distrusted").touch(),
}


@pytest.mark.parametrize("found", DAMAGES)
def test_metadata_that_the_next_start_rebuilds_is_told(
    start_node: StartNode, store: Path, found: str
) -> None:
    assert metadata_finding(store)["level"] == "ok"
    DAMAGES[found](store / "meta" / "data.mdb")
    finding = metadata_finding(store)
    assert finding["level"] == "fail" and found in finding["found"]
    assert "the next start sets aside" in finding["advice"]
    assert "rebuilds the names of chunk files; all others are lost" in finding["advice"]
    start_node(store=store, allow="rebuilding names")  # which does so
    with Client(store) as client:
        assert client.lookup([b"plain"]) == [None]
        assert client.status()["blobs"] == 3
    assert metadata_finding(store)["found"] == "in use by its node"


def test_a_look_that_fails_by_itself_does_not_say_that_all_is_well(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    (finding,) = check_metadata(store, is_running=False)
    assert finding.level is Level.WARN
    assert "nobody could look at it: exit 1" in finding.found


def test_metadata_is_missed_where_only_a_further_directory_has_blobs(
    start_node: StartNode, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    node = start_node(extra_stores=(part,))
    node.stop()
    (node.store / "meta" / "data.mdb").unlink()
    assert metadata_finding(node.store)["level"] == "ok"
    (part / "blobs" / "00").mkdir()
    assert "there are blobs without it" in metadata_finding(node.store)["found"]


def test_a_whole_copy_that_is_put_back_is_as_good_as_the_advice_says(
    start_node: StartNode, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store / "meta", tmp_path / "copy")
    cut_short(store / "meta" / "data.mdb")
    assert "put back a whole copy of meta/" in metadata_finding(store)["advice"]
    shutil.rmtree(store / "meta")
    shutil.copytree(tmp_path / "copy", store / "meta")
    assert metadata_finding(store)["level"] == "ok"
    start_node(store=store)
    assert "plain" in kvfs_text("ls", store=store)


def test_a_database_that_ends_who_reads_it_ends_no_doctor(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"version": 1, "id": "a"}')
    LmdbEngine.open(tmp_path / "meta").close()
    database = tmp_path / "meta" / "data.mdb"
    assert database.stat().st_size < 0xFFF0
    with open(database, "r+b") as file:
        for page in range(2, database.stat().st_size // PAGE_BYTES):
            file.seek(page * PAGE_BYTES + 16)  # where its entries lie: beyond the file's end
            file.write(struct.pack("=H", 0xFFF0) * 64)
    finding = metadata_finding(tmp_path)
    assert finding["level"] == "fail"
    assert "is damaged: who reads it is ended by signal" in finding["found"]
    assert "data.mdb away" in finding["advice"]


def test_what_a_cluster_has_is_not_called_lost(store: Path) -> None:
    write_belonging(store, Belonging("one", "redis://127.0.0.1:1", bytes(16)))
    (store / "meta" / "data.mdb").unlink()
    found = json.loads(kvfs("doctor", "--json", store=store).stdout)["findings"]
    assert [f["level"] for f in found if f["check"] == "metadata"] == ["ok"]
    (store / "meta" / "data.mdb").write_bytes(b"\x55" * 100)
    found = json.loads(kvfs("doctor", "--json", store=store).stdout)["findings"]
    (finding,) = (f for f in found if f["check"] == "metadata")
    assert "the names are on the metadata server" in finding["advice"]


def test_metadata_that_a_node_has_open_is_left_alone(start_node: StartNode, store: Path) -> None:
    node = start_node(store=store)
    with Client(store) as client:
        for number in range(200):
            store_bytes(client, b"d%d/f" % number, b"x")
    ran = kvfs("doctor", "--json", store=store)
    (finding,) = (f for f in json.loads(ran.stdout)["findings"] if f["check"] == "metadata")
    assert (finding["level"], finding["found"]) == ("ok", "in use by its node")
    (store / "meta" / "distrusted").touch()  # as it does when it meets a damaged page
    ran = kvfs("doctor", "--json", store=store)
    (finding,) = (f for f in json.loads(ran.stdout)["findings"] if f["check"] == "metadata")
    assert (ran.returncode, finding["level"]) == (1, "fail")
    assert "restart the node" in finding["advice"]
    (store / "meta" / "distrusted").unlink()
    (store / "meta" / "data.mdb").rename(store / "aside")
    finding = metadata_finding(store)
    assert (finding["level"], finding["found"]) == ("fail", "data.mdb was removed under its node")
    (store / "aside").rename(store / "meta" / "data.mdb")
    node.stop()


def test_a_node_that_starts_is_no_fault(store: Path) -> None:
    (store / "meta" / "running").write_text("rebuilding")
    mark = os.open(store / "store.json", os.O_RDONLY)
    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert metadata_finding(store)["found"] == "in use by a node that starts or ends"
    os.close(mark)
    assert metadata_finding(store)["level"] == "fail"


def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    LmdbEngine.open(tmp_path / "meta").close()
    assert find_damage(tmp_path / "meta") is None
    file = tmp_path / "meta" / "data.mdb"
    file.unlink()
    file.symlink_to("data.mdb")  # ELOOP, also for root
    with pytest.raises(OSError, match=r"data\.mdb"):
        find_damage(tmp_path / "meta")
    assert look(tmp_path / "meta")["distrust"] is None
    assert str(look(tmp_path / "meta")["unreadable"]).startswith(f"{file}: ")


def test_metadata_without_room_in_the_address_space_is_kept(
    start_node: StartNode, store: Path
) -> None:
    """A start in a batch job that has such a limit took it for damaged, and lost all names but
    those of chunk files."""
    limited = 'ulimit -v 8000000 && exec "$@"'
    command = [sys.executable, "-m", "kvfs", "serve", "--store", str(store)]
    ran = subprocess.run(
        ["bash", "-c", limited, "-", *command], capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 2, ran.stdout
    assert "the metadata cannot be read: Cannot allocate memory" in ran.stderr
    assert not (store / "meta" / "data.mdb.distrusted").exists()
    assert metadata_finding(store)["level"] == "ok"
    start_node(store=store)
    with Client(store) as client:
        assert client.lookup([b"plain"]) != [None]
