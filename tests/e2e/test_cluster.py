"""Several nodes in network namespaces, real mounts, a real Redis: one namespace."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from scripts.cluster_rig import ROOT, Node, Rig, cluster
from scripts.exercise_cluster import Exercise

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]
SOON_S = 20.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as started:
        yield started


def copies_of(node: Node, path: bytes) -> bool:
    """Whether a node has the bytes of a file."""
    with Client(node.store) as client:
        inode = client.stat(path)
        assert inode is not None
        return client.blobs([inode.digest])[0] is not None


def shows(node: Node, name: str) -> bool:
    """Whether a node opens a name, which asks more than what its kernel remembers."""
    try:
        with open(node.mountpoint / name, "rb"):
            return True
    except OSError:
        return False


def test_right_bytes_at_the_next_open_on_every_node(rig: Rig) -> None:
    exercise = Exercise(rig.nodes, random.Random(7))
    for number in range(150):
        exercise.step(number)
    assert exercise.wrong == []
    assert len(exercise.steps) == 4
    assert max(exercise.seen_s) < 2.0


def test_a_file_is_fetched_once_and_is_a_copy_then(rig: Rig) -> None:
    a, b, c = rig.nodes
    content = random.Random(1).randbytes(20 * 1024 * 1024 + 7)
    (a.mountpoint / "big").write_bytes(content)
    assert not copies_of(b, b"big")
    assert (b.mountpoint / "big").read_bytes() == content
    assert copies_of(b, b"big") and not copies_of(c, b"big")
    with Client(b.store) as client:
        fetched = client.status()["counters"]["fetched_bytes"]
        assert (b.mountpoint / "big").read_bytes() == content
        assert client.status()["counters"]["fetched_bytes"] == fetched


def test_clients_open_what_another_node_has(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "for-clients").write_bytes(b"1234")
    with Client(b.store) as client:
        assert client.lookup([b"for-clients", b"none"]) == [4, None]
        [opened] = client.open([b"for-clients"])
        assert opened is not None
        assert os.pread(opened.fd, 10, 0) == b"1234"
        opened.close()


def test_eviction_keeps_the_name_while_another_node_has_the_bytes(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "kept").write_bytes(b"kept")
    assert (b.mountpoint / "kept").read_bytes() == b"kept"
    (a.mountpoint / "only here").write_bytes(b"1")
    for name, said in (
        ("kept", "1 copy given up; the file stays, tiers or other nodes have it\n"),
        ("only here", "1 file evicted\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kvfs", "evict", "--store", a.store, name],
            check=False, capture_output=True, text=True, cwd=ROOT, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert not copies_of(a, b"kept")
    assert (a.mountpoint / "kept").read_bytes() == b"kept"  # fetched again
    with Client(b.store) as client:
        client.evict([b"kept"])
    with Client(a.store) as client:
        client.evict([b"kept"])  # the last copy: the name goes with it
    with pytest.raises(FileNotFoundError):
        (b.mountpoint / "kept").read_bytes()


def test_who_has_a_file_open_keeps_its_bytes(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "open").write_bytes(b"before")
    with open(b.mountpoint / "open", "rb") as reader:
        assert reader.read(3) == b"bef"
        (a.mountpoint / "open").write_bytes(b"after!!")
        assert (b.mountpoint / "open").read_bytes() == b"after!!"
        assert reader.read() == b"ore"
        (a.mountpoint / "open").unlink()
        with pytest.raises(FileNotFoundError):
            (b.mountpoint / "open").read_bytes()
        assert os.fstat(reader.fileno()).st_size == 6


def test_who_has_a_file_open_for_writing_while_another_node_overwrites_it(rig: Rig) -> None:
    """It keeps what it has read, else it has what is there now; the last close wins."""
    a, b, c = rig.nodes
    path = a.mountpoint / "both"
    path.write_bytes(b"first")
    with open(path, "r+b", buffering=0) as writer:
        assert writer.read(2) == b"fi"
        (b.mountpoint / "both").write_bytes(b"second!!")
        assert path.read_bytes() == b"second!!"
        assert os.fstat(writer.fileno()).st_size == 5
        assert os.pread(writer.fileno(), 9, 0) == b"first"
        os.pwrite(writer.fileno(), b"F", 0)
        assert os.fstat(writer.fileno()).st_size == 5
        os.pwrite(writer.fileno(), b"!", 5)
        assert os.fstat(writer.fileno()).st_size == 6
        assert path.read_bytes() == (b.mountpoint / "both").read_bytes() == b"second!!"
    for node in rig.nodes:
        assert (node.mountpoint / "both").read_bytes() == b"First!"
    with open(path, "r+b", buffering=0) as writer:
        (b.mountpoint / "both").write_bytes(b"third one")
        assert path.read_bytes() == b"third one"
        assert os.fstat(writer.fileno()).st_size == 9
        os.pwrite(writer.fileno(), b"T", 0)
    for node in rig.nodes:
        assert (node.mountpoint / "both").read_bytes() == b"Third one"
    with open(path, "r+b", buffering=0) as writer:
        assert writer.read(1) == b"T"
        (c.mountpoint / "both").unlink()
        with pytest.raises(FileNotFoundError):
            path.read_bytes()
        assert os.fstat(writer.fileno()).st_size == 9
        os.pwrite(writer.fileno(), b"t", 0)
        assert os.pread(writer.fileno(), 9, 0) == b"third one"
    assert not any((node.mountpoint / "both").exists() for node in rig.nodes)


def test_only_one_of_all_makes_a_name(rig: Rig) -> None:
    made = []
    for node in rig.nodes:
        try:
            os.close(os.open(node.mountpoint / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            made.append(node)
        except FileExistsError:
            continue
    assert made == [rig.nodes[0]]


def test_status_shows_the_cluster(rig: Rig) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvfs", "status", "--store", str(rig.nodes[0].store), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = json.loads(done.stdout)["cluster"]
    assert len(shown["nodes"]) == 3
    assert [n["is_this"] for n in shown["nodes"]].count(True) == 1
    viewed = json.loads((rig.nodes[1].mountpoint / ".kvfs/nodes").read_text())
    assert {n["id"] for n in viewed["nodes"]} == {n["id"] for n in shown["nodes"]}
    done = subprocess.run(
        [sys.executable, "-m", "kvfs", "status", "--store", str(rig.nodes[0].store)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "2 other nodes" in done.stdout


def test_a_killed_node_costs_what_only_it_had(rig: Rig) -> None:
    a, b, c = rig.nodes
    (c.mountpoint / "lost").write_bytes(b"lost")
    (c.mountpoint / "shared").write_bytes(b"shared")
    assert (b.mountpoint / "shared").read_bytes() == b"shared"
    c.kill()
    c.clear()
    began = time.monotonic()
    assert (a.mountpoint / "shared").read_bytes() == b"shared"
    with pytest.raises(FileNotFoundError):
        (a.mountpoint / "lost").read_bytes()
    assert time.monotonic() - began < SOON_S
    c.start()
    assert (c.mountpoint / "lost").read_bytes() == b"lost"
    assert (a.mountpoint / "lost").read_bytes() == b"lost"


def test_a_copy_of_a_store_is_refused_while_the_other_is_there(rig: Rig, tmp_path: Path) -> None:
    a = rig.nodes[0]
    copy = Node(rig.nodes[1].host, tmp_path / "copy", a.url)
    copy.store.mkdir(parents=True)
    (copy.store / "meta").mkdir()
    for name in ("store.json", "meta/cluster", "meta/data.mdb"):
        shutil.copy(a.store / name, copy.store / name)
    with open(a.mountpoint / "unfinished", "wb") as file:
        file.write(b"begun, ")
        file.flush()
        with pytest.raises(RuntimeError, match="a copy of its directory; start on a new"):
            copy.start()
        file.write(b"and done")
    assert (rig.nodes[1].mountpoint / "unfinished").read_bytes() == b"begun, and done"


def test_without_the_server_a_node_serves_what_it_has(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "here").write_bytes(b"here")
    assert (b.mountpoint / "here").read_bytes() == b"here"
    rig.server.kill()
    began = time.monotonic()
    assert (b.mountpoint / "here").read_bytes() == b"here"
    assert os.statvfs(b.mountpoint).f_bsize == 4096
    with pytest.raises(OSError):
        (b.mountpoint / "new").write_bytes(b"new")
    assert time.monotonic() - began < SOON_S


def test_a_server_that_lost_everything_is_told_again(rig: Rig) -> None:
    """After the one before: it comes back empty."""
    rig.server.start()
    a, b, c = rig.nodes
    end_s = time.monotonic() + SOON_S
    while not (shows(c, "here") and shows(a, "shared")):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert (c.mountpoint / "here").read_bytes() == b"here"
    assert (a.mountpoint / "shared").read_bytes() == b"shared"
    (b.mountpoint / "new").write_bytes(b"new")
    while not shows(a, "new"):  # which may not know yet that the server answers again
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert (a.mountpoint / "new").read_bytes() == b"new"
