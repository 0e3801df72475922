"""A real node process and real clients: descriptors, dedup, limits, several processes at once."""

import contextlib
import os
import resource
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
from kvfs.errors import InvalidInput, NamespaceError, OutOfSpace, Unavailable
from kvfs.names import ChunkKeys, chunk_key, chunk_path
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
    assert f"another node owns this store (process {node.pid})" in second.stderr
    with Client(node.store) as client:
        assert client.status()["pid"] == node.pid


@pytest.mark.parametrize("command", ["serve", "mount"])
def test_who_has_a_store_and_does_not_answer_is_named(
    start_node, tmp_path: Path, command: str
) -> None:
    node = start_node(allow="the event loop was held")  # which a watch can't tell from this
    place = [] if command == "serve" else [str(tmp_path / "mnt")]
    os.kill(node.pid, signal.SIGSTOP)
    try:
        second = subprocess.run(
            [sys.executable, "-m", "kvfs", command, *place, "--store", str(node.store)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert f"(process {node.pid}, which is stopped: kill -CONT {node.pid})" in line


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


def test_many_processes_write_and_read_together(start_node) -> None:
    node = start_node()
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.files import store_bytes, load_bytes\n"
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
