"""The real `kvfs` command on a real store: what it prints, its exit codes, and on a mount."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.errors import OutOfSpace
from tests.chunks import FINGERPRINT, MODEL, chunk_file, store_chain
from tests.commands import DEADLINE_S, kvfs, kvfs_json, kvfs_text
from tests.conftest import StartMount, StartNode
from tests.files import store_bytes

TOKENS = list(range(2, 2 + 1100))  # four chunks of 256, and 76 tokens


@pytest.fixture
def store(start_node: StartNode) -> Path:
    return start_node().store


# Node and files -----------------------------------------------------------------------------------
def test_status(store: Path) -> None:
    with Client(store) as client:
        store_chain(client, "abc")
        client.lookup([b"absent"])
    found = kvfs_json("status", store=store)
    assert found["store"] == str(store) and found["mountpoint"] is None
    assert found["blobs"] == 3
    assert found["counters"]["lookups"] == 1 and found["counters"]["lookup_hits"] == 0
    assert [(m["model"], m["fingerprint"], m["chunks"]) for m in found["models"]] == [
        (MODEL, FINGERPRINT, 3)
    ]
    text = kvfs_text("status", store=store)
    assert str(store) in text and f"{MODEL}@{FINGERPRINT}" in text and "not mounted" in text


@pytest.mark.parametrize("config", ['min_free = "100%"', 'max_bytes = "1MiB"'])
def test_a_store_that_can_take_nothing_says_so(start_node: StartNode, config: str) -> None:
    store = start_node(config=config).store
    with Client(store) as client:
        if "max" in config:
            store_bytes(client, b"kept", bytes(600_000))
            client.pin([b"kept"])
        with pytest.raises(OutOfSpace):
            store_bytes(client, b"more", bytes(600_000))
    word = "unpin" if "max" in config else "lower min_free"
    (line,) = [line for line in kvfs_text("status", store=store).splitlines() if word in line]
    assert line.startswith(f"{store} ")
    found = next(
        f for f in kvfs_json("doctor", store=store, code=1)["findings"] if f["check"] == "room"
    )
    assert found["level"] == "fail" and word in found["advice"]


def test_ls(store: Path) -> None:
    odd = b"line\nbreak \xff"
    with Client(store) as client:
        store_bytes(client, b"dir/" + odd, b"1")
        store_bytes(client, b"dir/b", b"22")
        store_bytes(client, b"dir/sub/c", b"333")
        client.pin([b"dir/b"])
    assert kvfs_text("ls", store=store) == "dir/\n"
    assert kvfs_text("ls", "dir", store=store) == "b\nline\\x0abreak \\xff\nsub/\n"
    assert kvfs_text("ls", "/dir/b", store=store) == "b\n"
    long = kvfs_text("ls", "-l", "dir", store=store).splitlines()
    assert [line.split()[0] for line in long] == ["-rw-r--r--p", "-rw-r--r--", "drwxr-xr-x"]
    entries = kvfs_json("ls", "dir", store=store)["entries"]
    assert [(e["name"], e["type"], e["size_bytes"], e["pinned"]) for e in entries] == [
        ("b", "file", 2, True),
        ("line\\x0abreak \\xff", "file", 1, False),
        ("sub", "directory", 0, False),
    ]


def test_what_is_not_there_is_code_1_and_one_line(store: Path) -> None:
    for words in (
        ("ls", "absent"),
        ("show", "absent"),
        ("show", "0" * 32),
        ("du", "absent"),
        ("verify", "absent"),
        ("pin", "absent"),
        ("evict", "absent"),
        ("prefixes", "absent"),
        ("explain", "--model", "absent", "--tokens", "/dev/null"),
    ):
        ran = kvfs(*words, store=store)
        expected = 2 if words[-1] == "/dev/null" else 1
        assert (ran.returncode, ran.stdout) == (expected, ""), words
        assert ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr, words


def test_show_by_path_and_by_digest(store: Path) -> None:
    with Client(store) as client:
        path = store_chain(client, "ab", tokens=TOKENS)[1]
        (opened,) = client.open([path])
        assert opened is not None
        with opened:
            data = os.pread(opened.fd, opened.size_bytes, 0)
        store_bytes(client, b"copy", data)
        used_ns = client.stat(path)
    shown = os.fsdecode(path)
    found = kvfs_json("show", shown, store=store)
    assert found["path"] == "/" + shown
    assert found["same_bytes"] == ["/copy"]
    assert Path(found["blob"]["file"]).read_bytes() == data
    assert found["chunk"]["token_start"] == 256 and found["chunk"]["parent"]
    assert found["header"]["tokens_stored"] and found["header"]["model"] == MODEL
    assert found["header"]["tensors"] == [
        {"name": "layer.0", "dtype": "U8", "shape": [4096], "size_bytes": 4096}
    ]
    by_digest = kvfs_json("show", found["digest"], store=store)
    assert {by_digest["path"], *by_digest["same_bytes"]} == {"/copy", "/" + shown}
    text = kvfs_text("show", shown, store=store)
    assert "tokens 256-512" in text and "layer.0" in text and "/copy" in text
    with Client(store) as client:  # a look is no use
        assert client.stat(path) == used_ns


def test_show_a_directory_and_a_plain_file(store: Path) -> None:
    with Client(store) as client:
        store_bytes(client, b"dir/plain", b"hello")
    assert kvfs_json("show", "dir", store=store)["type"] == "directory"
    found = kvfs_json("show", "dir/plain", store=store)
    assert (found["size_bytes"], found["chunk"], found["header"]) == (5, None, None)
    assert "plain" in kvfs_text("show", "dir/plain", store=store)


def test_du_counts_equal_bytes_once(store: Path) -> None:
    with Client(store) as client:
        store_bytes(client, b"a/one", b"x" * 10_000)
        store_bytes(client, b"b/same", b"x" * 10_000)
        store_bytes(client, b"b/other", b"y" * 100)
    sums = {item["path"]: item for item in kvfs_json("du", store=store)["directories"]}
    assert {path: item["size_bytes"] for path, item in sums.items()} == {
        "/a": 10_000,
        "/b": 10_100,
        "/": 20_100,
    }
    assert sums["/"]["unique_bytes"] == 10_100
    blobs = [path for path in (store / "blobs").rglob("*") if path.is_file()]
    assert sums["/"]["allocated_bytes"] == sum(path.stat().st_blocks * 512 for path in blobs)
    assert kvfs_text("du", "--depth", "0", "b", store=store).splitlines()[-1].endswith("/b")


def test_pin_unpin_evict(store: Path) -> None:
    with Client(store) as client:
        store_chain(client, "abc")
        store_bytes(client, b"keep", b"keep")
    assert kvfs_text("pin", "keep", store=store) == "1 file pinned\n"
    ran = kvfs("evict", "/", store=store)
    assert (ran.returncode, ran.stdout) == (1, "3 files evicted\n")
    assert "1 file left" in ran.stderr and "unpin" in ran.stderr
    assert kvfs_json("unpin", "keep", store=store)["files"] == 1
    said = {"command": "evict", "files": 1, "left": 0, "copies": 0}
    assert kvfs_json("evict", "keep", store=store) == said
    assert kvfs("ls", "keep", store=store).returncode == 1


def test_pin_changes_nothing_when_one_path_is_wrong(store: Path) -> None:
    with Client(store) as client:
        store_bytes(client, b"a", b"a")
    assert kvfs("pin", "a", "absent", store=store).returncode == 1
    assert not kvfs_json("show", "a", store=store)["pinned"]


def test_verify_finds_and_quarantines(start_node: StartNode) -> None:
    store = start_node(allow="quarantined").store
    with Client(store) as client:
        good, bad = store_chain(client, "ab")
        store_bytes(client, b"copy-of-bad", chunk_file("b", "a", 1)[1])
    assert kvfs_json("verify", store=store)["corrupt_files"] == 0
    blob = Path(kvfs_json("show", os.fsdecode(bad), store=store)["blob"]["file"])
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    found = kvfs_json("verify", store=store, code=1)
    assert {item["path"] for item in found["corrupt"]} == {"/copy-of-bad", "/" + os.fsdecode(bad)}
    assert found["files"] == 3
    assert kvfs_text("verify", store=store).startswith("1 file,")
    assert kvfs("ls", os.fsdecode(bad), store=store).returncode == 1
    assert kvfs("ls", os.fsdecode(good), store=store).returncode == 0


def test_verify_tells_what_cannot_be_read(start_node: StartNode, tmp_path: Path) -> None:
    part = tmp_path / "part"
    node = start_node(extra_stores=(part,))
    names = [b"f%d" % number for number in range(8)]  # large enough to fill both directories
    with Client(node.store) as client:
        for name in names:
            store_bytes(client, name, name * 250_000)
    node.stop()
    away = sum(1 for _ in (part / "blobs").glob("*/*/*"))
    assert 0 < away < 8
    part.rename(tmp_path / "unplugged")
    store = start_node(store=node.store, allow="is not there").store
    found = kvfs_json("verify", store=store, code=1)
    assert (found["files"], found["unreadable_files"]) == (8 - away, away)
    assert found["corrupt_files"] == 0
    assert {item["reason"] for item in found["unreadable"]} == {"its directory is not there"}
    lines = kvfs_text("verify", store=store, code=1).splitlines()
    assert sum(line.startswith("unreadable  /f") for line in lines) == away
    assert f"{away} more cannot be read" in lines[-1]


def test_rebuild_names_chunk_files_that_were_brought_back(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node()
    with Client(node.store) as client:
        (path,) = store_chain(client, "a")
        name = os.fsdecode(path)
        blob = Path(kvfs_json("show", name, store=node.store)["blob"]["file"])
        kept = shutil.copy(blob, tmp_path / "kept")
        client.evict([path])
        assert kvfs_json("rebuild", store=node.store) == {"rebuilt_files": 0}
    shutil.copy(kept, blob)
    assert kvfs_json("rebuild", store=node.store) == {"rebuilt_files": 1}
    assert kvfs_text("ls", name, store=node.store)


def test_a_start_without_metadata_rebuilds_by_itself(start_node: StartNode) -> None:
    node = start_node()
    with Client(node.store) as client:
        (path,) = store_chain(client, "a")
    node.stop()
    for name in ("data.mdb", "lock.mdb"):
        (node.store / "meta" / name).unlink()
    assert kvfs_text("ls", os.fsdecode(path), store=node.store)


def test_gc_removes_blobs_without_a_name(start_node: StartNode) -> None:
    store = start_node().store
    with Client(store) as client:
        store_bytes(client, b"plain", b"plain")
        blob = Path(kvfs_json("show", "plain", store=store)["blob"]["file"])
        client.evict([b"plain"])
    blob.write_bytes(b"plain")
    removed = kvfs_json("gc", store=store)
    assert (removed["orphan_blobs"], removed["orphan_bytes"]) == (1, 5)
    assert "orphan blobs" in kvfs_text("gc", store=store)


def test_a_stopped_store_is_opened_for_a_command(start_node: StartNode) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"f", b"f")
    node.stop()
    assert kvfs_text("ls", store=node.store) == "f\n"
    assert kvfs_json("status", store=node.store)["pid"] != node.pid


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("store.json", "{", "damaged"),
        ("store.json", '{"version": 99, "id": "ab"}', "version 99"),
        ("kvfs.toml", "max_bytez = 1", "max_bytez: unknown key"),
    ],
)
def test_a_store_that_cannot_be_served_says_why(
    tmp_path: Path, file: str, text: str, reason: str
) -> None:
    (tmp_path / file).write_text(text)
    ran = kvfs("ls", store=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert reason in ran.stderr and ran.stderr.count("\n") == 1
    assert (tmp_path / file).read_text() == text


# On a mount ---------------------------------------------------------------------------------------
def test_a_mount_is_found_by_its_paths(start_mount: StartMount) -> None:
    mount = start_mount()
    path, data, header = chunk_file("a", None, 0, TOKENS)
    target = mount.mountpoint / os.fsdecode(path)
    target.parent.mkdir(parents=True)
    target.write_bytes(data)
    found = kvfs_json("show", target)
    assert found["path"] == "/" + os.fsdecode(path)
    assert found["chunk"]["key"] == header.key
    assert kvfs_text("ls", mount.mountpoint) == "kv/\n"
    status = kvfs_json("status", store=mount.store)
    assert status["mountpoint"] == str(mount.mountpoint)
    (model,) = kvfs_json("prefixes", store=mount.store)["models"]
    assert [(run["token_end"], run["chunks"]) for run in model["runs"]] == [(256, 1)]


def test_a_mount_is_found_by_links_and_from_inside(
    start_mount: StartMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = start_mount()
    (mount.mountpoint / "dir" / "sub").mkdir(parents=True)
    (mount.mountpoint / "dir" / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(mount.mountpoint)
    (tmp_path / "store link").symlink_to(mount.store)
    assert kvfs_text("ls", tmp_path / "link" / "dir") == "file\nsub/\n"
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(mount.mountpoint / "dir")
    for words in (("ls",), ("ls", "."), ("ls", "../dir"), ("ls", "/dir")):
        assert kvfs_text(*words) == "file\nsub/\n", words
    assert kvfs_json("show", "file", store=tmp_path / "store link")["path"] == "/dir/file"
    assert kvfs_json("verify")["files"] == 1  # the whole store


def test_the_view_of_a_mount_is_told_from_the_store(start_mount: StartMount, store: Path) -> None:
    mount = start_mount(mountpoint=store.parent / "m", store=store.parent / "other")
    for words in (("show", ".kvfs"), ("ls", mount.mountpoint / ".kvfs"), ("du", ".kvfs/prefixes")):
        ran = kvfs(*words, store=mount.store)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), words
        assert f"ls {mount.mountpoint}/.kvfs" in ran.stderr
    ran = kvfs("show", ".kvfs", store=store)
    assert ran.returncode == 2 and "MOUNTPOINT/.kvfs" in ran.stderr


def test_commands_in_the_background(tmp_path: Path) -> None:
    """`kvfs mount` returns when the mount serves; `kvfs umount` when it is gone."""
    mountpoint, store = tmp_path / "mnt", tmp_path / "store"
    mountpoint.mkdir()
    try:
        ran = kvfs("mount", mountpoint, store=store)
        assert ran.returncode == 0, ran.stderr
        assert os.path.ismount(mountpoint)
        (mountpoint / "hello").write_text("world")
        assert kvfs_json("show", mountpoint / "hello")["size_bytes"] == 5
        doctor = kvfs_json("doctor", store=store)
        levels = {item["check"]: item["level"] for item in doctor["findings"]}
        assert levels[f"mount {mountpoint}"] == levels["node"] == levels["store"] == "ok"
        config = kvfs("config", "lmcache", store=store)
        assert str(mountpoint) in config.stdout
    finally:
        ran = kvfs("umount", mountpoint)
    assert ran.returncode == 0, ran.stderr
    assert not os.path.ismount(mountpoint)
    assert kvfs("umount", mountpoint).returncode == 2


def test_doctor_of_a_plain_machine(tmp_path: Path) -> None:
    found = kvfs_json("doctor", store=tmp_path / "none")
    assert found["ok"]
    by_name = {item["check"]: item for item in found["findings"]}
    assert by_name["store"]["level"] == "warn" and "kvfs init" in by_name["store"]["advice"]
    assert by_name["python lmdb"]["level"] == by_name["fuse device"]["level"] == "ok"


def test_doctor_examines_every_mounted_store(start_mount: StartMount, tmp_path: Path) -> None:
    stores = [tmp_path / "one", tmp_path / "two"]
    for number, store in enumerate(stores):
        start_mount(store=store, mountpoint=tmp_path / f"m{number}")
    ran = kvfs("doctor", "--json")  # there may be other mounts, in whatever state
    document = json.loads(ran.stdout)
    nodes = {f["store"]: f["level"] for f in document["findings"] if f["check"] == "node"}
    assert [nodes[str(store)] for store in stores] == ["ok", "ok"]
    assert [f["store"] for f in document["findings"] if f["check"] == "kernel"] == [None]
    lines = kvfs("doctor").stdout.splitlines()
    shown = [line.split()[-1] for line in lines if line.startswith("ok    store ")]
    assert [store for store in shown if Path(store) in stores] == list(map(str, stores))
    one = json.loads(kvfs("doctor", "--json", store=stores[1]).stdout)
    assert {f["store"] for f in one["findings"]} == {None, str(stores[1])}


def test_a_command_starts_soon(store: Path) -> None:
    """Not a timing test: that nothing heavy is imported is what keeps it fast."""
    script = (
        "import sys; from kvfs.cli import main; code = main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    for words in (["ls"], ["status"], ["prefixes"], ["du"]):
        ran = subprocess.run(
            [sys.executable, "-c", script, *words, "--store", str(store)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        heavy = {"trio", "lmdb", "torch", "rich", "numpy", "tokenizers", "pyfuse3", "asyncio"}
        assert heavy.isdisjoint(ran.stderr.split()), words
