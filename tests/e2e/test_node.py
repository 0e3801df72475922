"""A real node process and real clients: descriptors, dedup, limits, several processes at once."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.address import node_address
from kvfs.client import Client
from kvfs.client_files import OpenFile, Staged, StagedFile
from kvfs.digest import digest_of
from kvfs.errors import Corrupt, InvalidInput, NamespaceError, OutOfSpace, Unavailable
from kvfs.names import ChunkKeys, chunk_key, chunk_path
from tests.commands import kvfs
from tests.files import load_bytes, store_bytes
from tests.processes import allocated_bytes, wait_until

MIB = 1024 * 1024


def test_what_one_client_publishes_another_reads(start_node, tmp_path: Path) -> None:
    node = start_node()
    with Client(node.store) as writer, Client(node.store) as reader:
        assert reader.lookup([b"a/b", b"a/c"]) == [None, None]
        store_bytes(writer, b"a/b", b"one")
        assert reader.lookup([b"a/b", b"a/c"]) == [3, None]
        assert load_bytes(reader, b"a/b") == b"one"
        store_bytes(writer, b"a/b", b"second")
        assert load_bytes(reader, b"/a/b") == b"second"


def test_chunks_are_looked_up_by_their_keys(start_node) -> None:
    node = start_node()
    stored = {3, 4096, 5000}  # more than one request takes
    keys = ChunkKeys(b"".join(b"%04d" % n for n in range(5001)), 4, ((0, 1),))
    with Client(node.store) as client:
        for number in stored:
            key = chunk_key(b"%04d" % number, 0, 1)
            store_bytes(client, chunk_path(b"kv/m@f", key), b"x" * number)
        sizes = client.lookup_chunks(b"kv/m@f", keys)
        assert sizes == [n if n in stored else None for n in range(5001)]
        assert client.status()["counters"]["lookup_hits"] == 3


def test_a_reader_keeps_the_old_version(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"f", b"old")
        (opened,) = client.open([b"f"])
        assert isinstance(opened, OpenFile)
        store_bytes(client, b"f", b"new")
        client.evict([b"f"])
        with opened:
            assert os.pread(opened.fd, 10, 0) == b"old"
        assert client.lookup([b"f"]) == [None]


def test_equal_bytes_are_stored_once(start_node) -> None:
    node = start_node()
    data = os.urandom(MIB)
    with Client(node.store) as client:
        for number in range(5):
            store_bytes(client, b"copy%d" % number, data)
        status = client.status()
        assert status["blobs"] == 1
        assert status["counters"]["deduplicated_bytes"] == 4 * MIB
        assert sorted(client.paths_of(digest_of(data))) == [b"copy%d" % n for n in range(5)]
        client.evict([b"copy%d" % n for n in range(4)])
        assert load_bytes(client, b"copy4") == data


def test_the_limit_is_never_exceeded_and_the_coldest_goes_first(start_node) -> None:
    limit = 24 * MIB
    node = start_node(config=f"max_bytes = {limit}\nmin_free = 0\n")
    with Client(node.store) as client:
        for number in range(40):
            store_bytes(client, b"f%03d" % number, os.urandom(MIB))
            client.touch([b"f000"])
            assert allocated_bytes(node.store) <= limit
        sizes = client.lookup([b"f%03d" % n for n in range(40)])
        assert sizes[0] == MIB
        assert sizes[39] == MIB
        present = [n for n, size in enumerate(sizes) if size is not None]
        assert present[1:] == list(range(40 - len(present) + 1, 40))
        with pytest.raises(OutOfSpace):
            client.stage([limit + MIB])
        assert client.lookup([b"f039"]) == [MIB]


def test_a_pinned_file_stays(start_node) -> None:
    node = start_node(config=f"max_bytes = {8 * MIB}\nmin_free = 0\n")
    with Client(node.store) as client:
        store_bytes(client, b"kept", os.urandom(MIB))
        assert client.pin([b"kept"]) == 1
        for number in range(20):
            store_bytes(client, b"f%d" % number, os.urandom(MIB))
        assert client.lookup([b"kept"]) == [MIB]
        assert client.evict([b"kept"]) == 0
        client.unpin([b"kept"])
        assert client.evict([b"kept"]) == 1


def test_reported_usage_is_what_du_counts(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        for number in range(50):
            store_bytes(client, b"d/f%d" % number, os.urandom(100_000 + 977 * number))
        client.evict([b"d/f3", b"d/f4"])
        wait_until(lambda: client.status()["directories"][0]["trash_bytes"] == 0)
        used = client.status()["used_bytes"]
    assert used == pytest.approx(allocated_bytes(node.store), rel=0.01)


@pytest.mark.parametrize(
    ("path", "size", "digest"),
    [
        (b"", 3, digest_of(b"abc")),
        (b"a/../b", 3, digest_of(b"abc")),
        (b"a/" + b"x" * 256, 3, digest_of(b"abc")),
        (b"a\0b", 3, digest_of(b"abc")),
        (b"ok", 4, digest_of(b"abc")),
        (b"ok", 3, b"short"),
    ],
)
def test_a_bad_publication_is_refused_and_changes_nothing(
    start_node, path: bytes, size: int, digest: bytes
) -> None:
    node = start_node()
    with Client(node.store) as client:
        (staged,) = client.stage([3])
        os.pwrite(staged.fd, b"abc", 0)
        with pytest.raises((InvalidInput, NamespaceError)):
            client.publish([StagedFile(staged.token, path, digest, size)])
        os.close(staged.fd)
        assert client.entries(b"") == []
        assert client.status()["blobs"] == 0


def test_a_publication_that_fails_leaves_nothing(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"directory/file", b"there")
        with pytest.raises(NamespaceError):
            store_bytes(client, b"directory", b"in the way")
        assert client.lookup([b"directory/file"]) == [5]
        assert not any(client.gc().values())
        store_bytes(client, b"other", b"in the way")
        assert load_bytes(client, b"other") == b"in the way"
    assert os.listdir(node.store / "staging") == []


def test_a_token_of_an_earlier_connection_is_none_of_this_one(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        old = client.stage([4])[0]
        client.close()
        new = client.stage([4])[0]
        os.pwrite(new.fd, b"mine", 0)
        with pytest.raises(InvalidInput, match="not staged"):
            client.publish([StagedFile(old.token, b"stolen", digest_of(b"mine"), 4)])
        client.discard([old.token])
        client.publish([StagedFile(new.token, b"kept", digest_of(b"mine"), 4)])
        assert load_bytes(client, b"kept") == b"mine"
        for staged in (old, new):
            os.close(staged.fd)


def test_what_can_never_fit_evicts_nothing(start_node) -> None:
    node = start_node(config=f"max_bytes = {8 * MIB}\nmin_free = 0\n")
    with Client(node.store) as client:
        store_bytes(client, b"cached", os.urandom(MIB))
        with pytest.raises(OutOfSpace):
            client.stage([3 * MIB] * 5)
        assert client.lookup([b"cached"]) == [MIB]
        assert client.status()["directories"][0]["staging_bytes"] == 0


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


def test_a_client_that_writes_more_than_it_staged_for_keeps_the_limit(start_node) -> None:
    node = start_node(config=f"max_bytes = {8 * MIB}\n")
    with Client(node.store) as client:
        (staged,) = client.stage([0])
        os.ftruncate(staged.fd, 2 << 30)
        with pytest.raises(InvalidInput, match="is more than"):
            client.publish([StagedFile(staged.token, b"huge", bytes(16), 2 << 30, None)])
        os.close(staged.fd)
        (staged,) = client.stage([0])
        data = os.urandom(12 * MIB)
        os.write(staged.fd, data)
        with pytest.raises(OutOfSpace):
            client.publish([StagedFile(staged.token, b"much", digest_of(data), len(data), None)])
        os.close(staged.fd)
        assert client.lookup([b"huge", b"much"]) == [None, None]


def test_a_vanished_client_leaves_nothing(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        staged = client.stage([MIB] * 3)
        assert len(os.listdir(node.store / "staging")) == 3
        for item in staged:
            assert isinstance(item, Staged)
            os.close(item.fd)
    with Client(node.store) as client:
        wait_until(lambda: client.status()["directories"][0]["staging_bytes"] == 0)
    assert os.listdir(node.store / "staging") == []


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
    node = start_node(allow="lost its file|wrong length")
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
        assert client.gc()["orphan_blobs"] == (damage in ("fifo", "link"))
        store_bytes(client, b"f", data)
        assert load_bytes(client, b"f") == data


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_in_a_blobs_way_goes_to_the_quarantine(
    start_node, level: int, is_known: bool
) -> None:
    """A directory, with content, where a blob belongs; a file where its directory does."""
    data = os.urandom(10_000)
    name = digest_of(data).hex()
    node = start_node(allow="lost its file|is in the way")
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
            assert client.gc()["orphan_blobs"] == 0  # a directory is none
            assert os.listdir(node.store / "staging") == []
        store_bytes(client, b"f", data)
        assert load_bytes(client, b"f") == data
    assert len(os.listdir(node.store / "quarantine")) == 1
    node.stop()
    node = start_node(store=node.store)
    with Client(node.store) as client:
        assert load_bytes(client, b"f") == data


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


def test_two_nodes_cannot_own_one_store(start_node) -> None:
    node = start_node()
    second = subprocess.run(
        [sys.executable, "-m", "kvfs", "serve", "--store", str(node.store)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 2
    assert "another node owns this store" in second.stderr
    with Client(node.store) as client:
        assert client.status()["pid"] == node.pid


def test_a_client_without_a_node_is_told_so(tmp_path: Path) -> None:
    with Client(tmp_path) as client, pytest.raises(Unavailable, match="kvfs serve"):
        client.lookup([b"a"])


def test_a_node_that_hangs_is_not_called_missing(start_node) -> None:
    node = start_node()
    os.kill(node.pid, signal.SIGSTOP)
    try:
        with (
            Client(node.store, deadline_s=0.5) as client,
            pytest.raises(Unavailable, match="there is one, which is stopped"),
        ):
            client.status()
    finally:
        os.kill(node.pid, signal.SIGCONT)


def test_a_store_with_a_long_path_works(start_node, tmp_path: Path) -> None:
    store = tmp_path.joinpath(*["x" * 60] * 3)
    node = start_node(store=store)
    with Client(node.store) as client:
        store_bytes(client, b"f", b"x")
        assert load_bytes(client, b"f") == b"x"


def test_a_node_short_of_descriptors_serves_on_when_it_has_some_again(start_node) -> None:
    node = start_node(allow="cannot take a client")
    limits = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    held = len(os.listdir(f"/proc/{node.pid}/fd"))
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (held + 2, limits[1]))
    with contextlib.ExitStack() as stack, node_address(node.store) as address:
        for _ in range(5):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.connect(address)
        wait_until(lambda: "cannot take a client" in node.log.read_text())
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, limits)
    with Client(node.store) as client:
        assert client.status()["pid"] == node.pid


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


def test_many_processes_write_and_read_together(start_node) -> None:
    node = start_node()
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.e2e.test_node import store_bytes, load_bytes\n"
        "from kvfs.client import Client\n"
        "rank = int(sys.argv[2])\n"
        "with Client(Path(sys.argv[1])) as client:\n"
        "    for n in range(60):\n"
        "        data = (b'%d,' % n) * 20000\n"
        "        store_bytes(client, b'shared/%d' % (n % 7), data)\n"
        "        got = load_bytes(client, b'shared/%d' % (n % 7))\n"
        "        assert got is not None and len(set(got.split(b',')[:-1])) == 1\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program, str(node.store), str(rank)])
        for rank in range(4)
    ]
    assert [worker.wait(timeout=60) for worker in workers] == [0] * 4


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


def test_files_that_were_all_read_just_now_make_room_for_others(start_node) -> None:
    node = start_node(config='max_bytes = "8MiB"\n')
    with Client(node.store) as client:
        paths = [b"f%d" % number for number in range(12)]
        for number in range(7):
            store_bytes(client, paths[number], bytes([number]) * MIB)
        files = client.open(paths[:7])
        assert None not in files
        for file in files:
            if file is not None:
                file.close()
        for number in range(7, 12):
            store_bytes(client, paths[number], bytes([number]) * MIB)
        assert client.lookup(paths[7:]) == [MIB] * 5
