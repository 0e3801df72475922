"""A store in which somebody took things away or put others in their place: named, never waited for,
and nothing is lost."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.client import Client
from kvfs.errors import InvalidInput, Unavailable
from kvfs.home import check_directory
from kvfs.mark import read_mark
from kvfs.settings.words import DirectoryConfig
from tests.chunks import store_chain
from tests.commands import DEADLINE_S, kvfs, kvfs_json, kvfs_text
from tests.conftest import StartNode
from tests.files import ODD_KINDS, store_bytes


def test_a_store_that_lost_its_mark_gets_it_again(start_node: StartNode, tmp_path: Path) -> None:
    part = tmp_path / "part"
    node = start_node(extra_stores=(part,))
    with Client(node.store) as client:
        paths = store_chain(client, "abcdef")
        store_bytes(client, b"plain", b"bytes")
    node.stop()
    for directory in (node.store, part):
        mark = directory / "store.json"
        text = mark.read_text()
        mark.unlink()
        for words in (("serve", "--store", directory), ("ls", "--store", directory)):
            ran = kvfs(*words)
            assert (ran.returncode, ran.stdout) == (2, ""), words
            told = f"has lost its store.json; kvfs init {directory}"
            if directory == node.store:
                assert told in ran.stderr.splitlines()[-1]
        found = kvfs_json("doctor", store=directory, code=1)
        assert "kvfs init" in next(f for f in found["findings"] if f["check"] == "store")["advice"]
        assert "store.json again" in kvfs_text("init", directory)
        assert json.loads(mark.read_text()) == json.loads(text)
    start_node(store=node.store)
    with Client(node.store) as client:
        assert None not in client.lookup([*paths, b"plain"])
    assert kvfs_json("verify", store=node.store)["files"] == 7


def test_a_mark_is_not_made_again_while_a_node_serves(start_node: StartNode) -> None:
    node = start_node()
    (node.store / "store.json").rename(node.store / "kept")
    ran = kvfs("init", node.store)
    assert ran.returncode == 2 and "is still served" in ran.stderr
    assert not (node.store / "store.json").exists()
    (node.store / "kept").rename(node.store / "store.json")


def test_a_mark_is_not_made_again_from_what_is_none(start_node: StartNode) -> None:
    node = start_node()
    node.stop()
    (node.store / "store.json").unlink()
    os.mkfifo(node.store / "part.json")
    ran = kvfs("init", node.store)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "part.json: is a FIFO" in ran.stderr


def test_a_store_that_lost_mark_and_metadata_has_its_chunks(start_node: StartNode) -> None:
    node = start_node()
    with Client(node.store) as client:
        paths = store_chain(client, "abc")
    node.stop()
    (node.store / "store.json").unlink()
    shutil.rmtree(node.store / "meta")
    assert kvfs("init", node.store).returncode == 0
    start_node(store=node.store, allow="rebuilding names")
    with Client(node.store) as client:
        assert None not in client.lookup(paths)


ODD_FILES = ("store.json", "part.json", "kvfs.toml", "node.log", "node.log.1", "meta/data.mdb",
             "meta/lock.mdb", "meta/directories.json", "meta/running")  # fmt: skip


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_what_stands_in_place_of_a_stores_files_is_named(
    start_node: StartNode, tmp_path: Path, kind: str
) -> None:
    node = start_node()
    node.stop()
    for name in ODD_FILES:
        file = node.store / name
        kept = file.rename(tmp_path / "kept") if file.exists() else None
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "directory":
            file.mkdir()
        else:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(os.fspath(file))
        for words in (("serve",), ("mount", tmp_path / "mnt"), ("ls",)):
            ran = kvfs(*words, store=node.store)
            assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
            assert f"{file}: is a {'FIFO' if kind == 'fifo' else kind}" in ran.stderr
            assert "move it away" in ran.stderr
        (file.rmdir if kind == "directory" else file.unlink)()
        if kept is not None:
            kept.rename(file)
    for odd in ("a directory", "a file"):
        path = node.store / "node.sock"
        path.mkdir() if odd == "a directory" else path.write_text("somebody's")
        for words in (("serve",), ("ls",)):
            ran = kvfs(*words, store=node.store)
            assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
            assert f"node.sock: is {odd} and no socket; move it away" in ran.stderr
        path.rmdir() if odd == "a directory" else path.unlink()
    for name in ("meta", "blobs", "staging", "quarantine"):
        (node.store / name).rename(tmp_path / name)
        (node.store / name).touch()
        ran = kvfs("serve", store=node.store)
        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
        assert f"{name}: is no directory; move it away" in ran.stderr
        (node.store / name).unlink()
        (tmp_path / name).rename(node.store / name)
    assert kvfs_text("ls", store=node.store) == ""


LINKED_FILES = (*ODD_FILES, "part.new", "peer.key", "meta/distrusted", "meta/cluster",
                "meta/cluster.new", "meta/joining", "meta/joining.new", "meta/directories.new",
                "meta/alone/data.mdb")  # fmt: skip
GIVEN_FILES = ("kvfs.toml", "peer.key")


@pytest.mark.parametrize("is_dangling", [True, False])
def test_links_in_place_of_a_stores_files_are_named_and_not_followed(
    start_node: StartNode, tmp_path: Path, is_dangling: bool
) -> None:
    node = start_node()
    node.stop()
    (node.store / "meta" / "alone").mkdir()
    target = tmp_path / "outside" / "target"
    target.parent.mkdir()
    for name in LINKED_FILES:
        file = node.store / name
        kept = file.rename(tmp_path / "kept") if file.exists() else None
        if not is_dangling:
            target.write_bytes(b"" if kept is None else kept.read_bytes())
        file.symlink_to(target)
        with (
            pytest.raises(InvalidInput) if name not in GIVEN_FILES or is_dangling else nullcontext()
        ):
            check_directory(node.store)
        if name in ("node.log", "meta/data.mdb", "meta/running"):
            before = None if is_dangling else target.read_bytes()
            for words in (("serve",), ("mount", tmp_path / "mnt"), ("ls",)):
                ran = kvfs(*words, store=node.store)
                assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), words
                assert f"{file}: is a symbolic link" in ran.stderr
            assert file.is_symlink()
            assert (target.read_bytes() if target.exists() else None) == before
        file.unlink()
        target.unlink(missing_ok=True)
        if kept is not None:
            kept.rename(file)
    assert os.listdir(target.parent) == []


def test_a_store_may_be_behind_a_link_and_its_configuration_elsewhere(
    start_node: StartNode, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kvfs.toml").write_text("fsync = true\n")
    (tmp_path / "real" / "kvfs.toml").symlink_to(tmp_path / "kvfs.toml")
    (tmp_path / "store").symlink_to("real")
    start_node(store=tmp_path / "store")
    with Client(tmp_path / "store") as client:
        store_bytes(client, b"plain", b"bytes")
    found = kvfs_json("doctor", store=tmp_path / "store")["findings"]
    assert [f["level"] for f in found if f["check"] == "settings"] == ["ok"]


def test_a_configuration_may_come_through_a_pipe_and_the_log_go_nowhere(tmp_path: Path) -> None:
    store, config = tmp_path / "store", tmp_path / "config"
    os.mkfifo(config)
    store.mkdir()
    (store / "node.log").symlink_to(os.devnull)
    (store / "kvfs.toml").touch()
    command = [
        sys.executable,
        "-m",
        "kvfs",
        "serve",
        "--store",
        str(store),
        "--config",
        str(config),
    ]
    with subprocess.Popen([*command, "--idle-exit", "0.1"], stderr=subprocess.PIPE) as serving:
        config.write_text("fsync = true\n")
        assert serving.wait(DEADLINE_S) == 0


def test_gc_clears_staging_of_what_is_older_than_the_node(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node()
    node.stop()
    staging = node.store / "staging"
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (staging / "file").write_bytes(b"x")
    (staging / "0123.4567.1").write_bytes(b"of another store")
    (staging / "link").symlink_to(target)
    os.mkfifo(staging / "fifo")
    (staging / "empty").mkdir()
    (staging / "full").mkdir()
    (staging / "full" / "photo.jpg").touch()
    start_node(store=node.store)
    (staging / "new").touch()
    with Client(node.store) as client:
        staged = client.stage([1])
        assert len(os.listdir(staging)) == 8
        ran = kvfs("gc", store=node.store)
        assert ran.returncode == 0 and "foreign names  5" in ran.stdout
        assert ran.stderr.count("\n") == 1 and "2 foreign names left: " in ran.stderr
        assert f"{staging}/full, {staging}/new" in ran.stderr
        assert sorted(set(os.listdir(staging)) & {"full", "new"}) == ["full", "new"]
        assert len(os.listdir(staging)) == 3
        removed = kvfs_json("gc", store=node.store)
        assert (removed["foreign_names"], removed["left_count"]) == (0, 2)
        assert removed["left"] == [f"{staging}/full", f"{staging}/new"]
        os.close(staged[0].fd)
    assert (target / "kept").exists() and (staging / "full" / "photo.jpg").exists()


def test_what_lies_where_a_staging_file_would_is_left_alone(tmp_path: Path) -> None:
    directory = BlobDirectory.open(DirectoryConfig(tmp_path / "store"))
    first = directory.stage()
    stem, _, serial = first.name.rpartition(".")
    in_the_way = Path(directory.stage_path(f"{stem}.{int(serial, 16) + 1:x}"))
    in_the_way.mkdir()
    second = directory.stage()
    assert os.listdir(in_the_way) == [] and second.name != in_the_way.name
    for number in range(3, 110):
        Path(directory.stage_path(f"{stem}.{number:x}")).touch()
    with pytest.raises(Unavailable, match="foreign files in the way"):
        directory.stage()
    for staged in (first, second):
        os.close(staged.fd)
    directory.close()


def put_odd_things(directory: Path, names: list[str], target: Path) -> dict[Path, str]:
    """What is no file, a directory with content first; each with what it is."""
    paths = [directory / name for name in names]
    kinds = {name: kind for name, kind in ODD_KINDS.items() if "device" not in name or is_root()}
    (paths[0] / "below").mkdir(parents=True)
    paths[1].symlink_to(target)
    for path, kind in zip(paths[2:], kinds.values(), strict=False):
        os.mknod(path, 0o600 | kind, os.makedev(1, 3))
    return dict(zip(paths, ["a directory", "a symbolic link", *kinds], strict=False))


def put_elsewhere(directory: Path, blobs: Path) -> Path:
    """A file with the name of a blob, to which a link in place of a fan-out directory leads."""
    first = next(name for name in ("00", "01") if not (blobs / name).exists())
    file = directory / "elsewhere" / "00" / f"{first}00{'0' * 28}"
    file.parent.mkdir(parents=True)
    file.touch()
    (blobs / first).symlink_to(directory / "elsewhere")
    return file


def is_root() -> bool:
    return os.geteuid() == 0


def test_what_is_no_file_is_foreign_whatever_its_name(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"plain", b"bytes")
    node.stop()
    (tmp_path / "target").write_bytes(b"kept")
    staging, store_id = node.store / "staging", read_mark(node.store)
    own = [f"{store_id}.0dead.{n}{'.00' * (n % 2)}" for n in range(5)]
    staged = put_odd_things(staging, own, tmp_path / "target")
    leaf = next(node.store.glob("blobs/*/*"))
    names = [f"{leaf.parent.name}{leaf.name}{n:028x}" for n in range(5)]
    lying = put_odd_things(leaf, names, tmp_path / "target")
    other = put_elsewhere(tmp_path, node.store / "blobs")
    lying |= {node.store / "blobs" / name: "" for name in ("note", other.name[:2])}
    (node.store / "blobs" / "note").touch()

    for is_running in (False, True):
        if is_running:
            start_node(store=node.store)
        found = json.loads(kvfs("doctor", "--json", store=node.store).stdout)["findings"]
        (finding,) = (f for f in found if f["check"] == "staging")
        assert finding["level"] == "warn"
        assert f"0 files of nodes, and {len(staged)} foreign names" in finding["found"]
        assert all(f"{path.name} ({kind})" in finding["found"] for path, kind in staged.items())
    assert all(os.path.lexists(path) for path in staged)
    removed = kvfs_json("gc", store=node.store)
    full = next(iter(staged))
    assert removed["left_count"] == 1 + len(lying)
    assert set(removed["left"]) == {str(path) for path in (full, *lying)}
    assert (removed["staging_files"], removed["orphan_blobs"]) == (0, 0)
    assert removed["foreign_names"] == len(staged) - 1
    assert os.listdir(staging) == [full.name] and os.listdir(full) == ["below"]
    assert kvfs_text("rebuild", store=node.store) == "0 names rebuilt\n"
    assert kvfs_json("verify", store=node.store)["files"] == 1
    assert all(os.path.lexists(path) for path in (*lying, other))
    assert os.listdir(node.store / "quarantine") == []
    assert (tmp_path / "target").read_bytes() == b"kept"
