"""Copies by rule, leaving without loss, and where copies lie: three nodes with little room."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import CLUSTER_GONE_S, COPIES_SWEEP_S, MIB
from kvfs.replicate import HolderState
from scripts.cluster_rig import ROOT, Node, Rig, cluster
from tests.conftest import StartNode

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]
SOON_S = 30.0
RESTORED_S = CLUSTER_GONE_S + 2 * COPIES_SWEEP_S + SOON_S
RULES = """
max_bytes = "48MiB"
[cluster]
metadata = "redis://10.99.0.1:6379"
[[cluster.copies]]
prefix = "two/"
copies = 2
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    base = tmp_path_factory.mktemp("cluster")
    for index in range(3):
        store = base / f"node{index}" / "store"
        store.mkdir(parents=True)
        (store / "kvfs.toml").write_text(RULES)
    with cluster(3, base) as started:
        yield started


@pytest.fixture
def rig(running: Rig) -> Rig:
    """All nodes are there, none is leaving, and nothing is stored."""
    for node in running.nodes:
        if node.process is not None:
            with Client(node.store) as client:
                is_leaving = client.leave(begin=False)["is_leaving"]
            if is_leaving:
                node.stop()
        if node.process is None:
            node.start()
    for name in os.listdir(running.nodes[0].mountpoint):
        entry = running.nodes[0].mountpoint / name
        if name == ".kvfs":
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    # What was removed a moment ago takes room until nobody can be on the way to it.
    wait_for(lambda: all(map(is_empty, running.nodes)), SOON_S, "something is still stored")
    return running


def is_empty(node: Node) -> bool:
    with Client(node.store) as client:
        status = client.status()
        return not status["blobs"] and not status["directories"][0]["trash_bytes"]


def write(node: Node, name: str, size_bytes: int = MIB) -> bytes:
    content = random.Random(name).randbytes(size_bytes)
    path = node.mountpoint / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return content


def read_all(node: Node, files: dict[str, bytes]) -> list[str]:
    """Those that do not read right."""
    wrong = []
    for name, content in files.items():
        try:
            if (node.mountpoint / name).read_bytes() != content:
                wrong.append(name)
        except OSError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def holders(asked: Node, name: str) -> set[Path]:
    """The stores of the nodes that are there and have the bytes of a file."""
    with Client(asked.store) as client:
        inode = client.stat(name.encode())
        assert inode is not None, name
        copies = client.copies([inode.digest])
    assert copies is not None
    return {Path(holder.store) for holder in copies[0] if holder.state is not HolderState.GONE}


def wait_for(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.2)


def wait_copies(asked: Node, names: list[str], count: int, deadline_s: float = SOON_S) -> None:
    def is_so() -> bool:
        return all(len(holders(asked, name)) >= count for name in names)

    wait_for(is_so, deadline_s, f"not {count} copies: { {n: holders(asked, n) for n in names} }")


def kvfs(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvfs", *words],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def test_copies_are_made_and_made_again(rig: Rig) -> None:
    a, b, c = rig.nodes
    two = {f"two/{n}": write(a, f"two/{n}") for n in range(6)}
    one = {"one": write(a, "one")}
    os.rename(a.mountpoint / "one", a.mountpoint / "one-too")
    (a.mountpoint / "early").write_bytes(b"early")
    os.rename(a.mountpoint / "early", a.mountpoint / "two/renamed")  # stored before it was so named
    two["two/renamed"] = b"early"
    wait_copies(a, list(two), 2)
    assert {len(holders(a, name)) for name in two} == {2}
    assert {store for name in two for store in holders(a, name)} == {a.store, b.store, c.store}
    assert holders(a, "one-too") == {a.store}
    assert one["one"] == (a.mountpoint / "one-too").read_bytes()

    b.kill()  # for good
    b.clear()
    wait_for(
        lambda: all(holders(a, name) == {a.store, c.store} for name in two),
        RESTORED_S,
        "what b had is not made again",
    )
    a.kill()
    a.clear()
    assert read_all(c, two) == []


def test_copies_outlive_the_pressure_on_one_node(rig: Rig) -> None:
    a, b, c = rig.nodes
    two = {f"two/{n}": write(a, f"two/{n}") for n in range(6)}
    wait_copies(a, list(two), 2)
    for n in range(80):  # more than a has room for
        write(a, f"fill/{n}")
    assert any(a.store not in holders(c, name) for name in two)  # evicted there
    with Client(a.store) as client:
        assert client.status()["counters"]["evicted_files"] > 0
    wait_copies(c, list(two), 2, RESTORED_S)
    for node in (a, b, c):
        assert read_all(node, two) == []


def test_the_second_copy_goes_before_a_last_one(rig: Rig) -> None:
    a, b, _ = rig.nodes
    last = {f"last/{n}": write(a, f"last/{n}") for n in range(10)}
    both = {f"both/{n}": write(a, f"both/{n}") for n in range(10)}
    assert read_all(b, both) == []
    for n in range(32):
        write(a, f"fill/{n}")
    assert all(a.store in holders(a, name) for name in last)  # though they are older
    assert any(a.store not in holders(b, name) for name in both)
    assert read_all(a, last | both) == []


def test_who_leaves_takes_nothing_along(rig: Rig) -> None:
    a, b, c = rig.nodes
    files = {f"d/{n}": write(a, f"d/{n}", 1 + n * MIB // 16) for n in range(30)}
    files |= {f"two/{n}": write(a, f"two/{n}") for n in range(3)}
    files |= {f"b/{n}": write(b, f"b/{n}") for n in range(3)}
    files["empty"] = b""
    (a.mountpoint / "empty").touch()
    wait_copies(a, [name for name in files if name.startswith("two/")], 2)
    with open(a.mountpoint / "being-written", "wb") as writer:
        writer.write(b"not yet")
        writer.flush()
        done = kvfs("leave", os.fspath(a.mountpoint))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("; nothing is only here, so the node may be stopped\n")
    with Client(a.store) as client:
        leaving = client.leave(begin=False)
        assert leaving["is_leaving"]
        assert leaving["moved_bytes"] >= sum(len(files[f"d/{n}"]) for n in range(30))
    shown = json.loads(kvfs("status", "--store", str(b.store), "--json").stdout)["cluster"]["nodes"]
    assert {n["store"] for n in shown if n["is_leaving"]} == {str(a.store)}
    files["late"] = write(a, "late")  # what comes now is moved too
    wait_for(lambda: holders(b, "late") != {a.store}, SOON_S, "what was written late stays here")
    assert read_all(a, files) == []
    hinted = write(b, "two/new")  # of two that stay
    files["two/new"] = hinted
    wait_copies(b, ["two/new"], 2)
    assert holders(b, "two/new") == {b.store, c.store}
    again = json.loads(kvfs("leave", "--store", str(a.store), "--json").stdout)
    assert (again["left_files"], again["left"]) == (0, [])
    a.kill()
    a.clear()
    for node in (b, c):
        assert read_all(node, files) == []
    a.start()  # and is a full member again
    with Client(a.store) as client:
        assert not client.leave(begin=False)["is_leaving"]
    assert read_all(a, files) == []


def test_who_finds_no_room_says_so_and_loses_nothing(rig: Rig) -> None:
    a, b, c = rig.nodes
    files = {}
    for node, name in ((b, "b"), (c, "c")):
        for n in range(44):
            files[f"{name}/{n}"] = write(node, f"{name}/{n}")
    mine = {f"a/{n}": write(a, f"a/{n}", 4 * MIB) for n in range(8)}
    for node, name in ((b, "b"), (c, "c")):
        assert read_all(node, {n: what for n, what in files.items() if n[0] == name}) == []
    done = kvfs("leave", "--store", str(a.store))
    assert done.returncode == 1
    left = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("left ")]
    assert left and set(left) <= {f"/{name}" for name in mine}
    assert "no other node has room for it" in done.stdout
    assert f"{len(left)} files, " in done.stderr and "make room on other nodes" in done.stderr
    for node, name in ((b, "b"), (c, "c")):
        assert read_all(node, {n: what for n, what in files.items() if n[0] == name}) == []
    assert all(a.store in holders(a, name) for name in mine)
    with Client(b.store) as client:
        client.evict([name.encode() for name in files if name.startswith("b/")])
    done = kvfs("leave", "--store", str(a.store), "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["moved_files"] == len(mine)
    a.kill()
    a.clear()
    assert read_all(b, mine) == []
    assert read_all(c, {name: what for name, what in files.items() if name[0] == "c"}) == []


def test_where_copies_lie_is_shown(rig: Rig) -> None:
    a, b, c = rig.nodes
    content = write(a, "f")
    assert (b.mountpoint / "f").read_bytes() == content
    done = kvfs("show", os.fspath(a.mountpoint / "f"), "--json")
    copies = json.loads(done.stdout)["copies"]
    assert [(one["is_this"], one["state"], one["store"]) for one in copies] == [
        (True, "present", str(a.store)),
        (False, "present", str(b.store)),
    ]
    status = json.loads(kvfs("status", "--store", str(c.store), "--json").stdout)
    listed = {node["id"]: node["address"] for node in status["cluster"]["nodes"]}
    assert all(listed[one["node"]] == one["address"] for one in copies)
    b.kill()
    b.clear()
    wait_for(
        lambda: "a node that is not there" in kvfs("show", "--store", str(c.store), "f").stdout,
        SOON_S,
        "the node that is gone is shown as if it were there",
    )
    lines = kvfs("show", "--store", str(c.store), "f").stdout.splitlines()
    assert any(line.split() == ["blob", "not", "on", "this", "node"] for line in lines)
    shown = [line.split(None, 1)[1] for line in lines if line.startswith("copy ")]
    assert len(shown) == 2
    assert f"{a.store} at " in shown[0] and copies[0]["node"] in shown[0]
    assert shown[1] == f"a node that is not there (id {copies[1]['node']})"


def test_a_store_that_is_in_no_cluster_cannot_leave(start_node: StartNode) -> None:
    alone = start_node().store
    done = kvfs("leave", str(alone))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvfs leave: {alone}: is in no cluster, so there is nothing to leave\n"
    with Client(alone) as client:
        assert client.copies([b"d" * 16]) is None
