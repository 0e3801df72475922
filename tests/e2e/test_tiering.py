"""Nodes that use their tiers: copies behind stores, names without local copies, room, restarts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.shell.doctor.finding import Level
from kvfs.shell.doctor.tiers import check_tiers
from kvfs.shell.tiers import tier_lines
from scripts.s3_rig import BUCKET, CREDENTIALS, S3Server
from tests.conftest import StartMount, StartNode
from tests.files import load_bytes
from tests.own_node import chunk_file
from tests.processes import wait_until
from tests.tier_nodes import (
    STORE,
    blobs_of,
    data_of,
    files_in,
    names_of,
    store_files,
    tier,
    tiering_of,
    wait_copied,
)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """With the keys to it in what nodes inherit."""
    for key, value in CREDENTIALS.items():
        monkeypatch.setenv(key, value)
    return s3_server


def test_a_mount_holds_more_than_its_store_and_reads_all_of_it_back(
    start_mount: StartMount, tmp_path: Path, s3: S3Server
) -> None:
    bucket = (
        f'[[tiers]]\nname = "bucket"\nkind = "object"\nurl = "s3://{BUCKET}/x"\n'
        f'endpoint = "http://127.0.0.1:{s3.port}"\n'
    )
    config = STORE + tier("scratch", tmp_path / "tier") + bucket
    expected = {f"f{n:02}": data_of(n) for n in range(40)}
    mount = start_mount(config=config)
    for name, data in expected.items():
        (mount.mountpoint / name).write_bytes(data)
    for start in range(2):
        for name, data in expected.items():
            assert (mount.mountpoint / name).read_bytes() == data, (start, name)
        shown = json.loads((mount.mountpoint / ".kvfs" / "tiers").read_text())
        assert [one["name"] for one in shown["tiers"]] == ["scratch", "bucket"]
        assert shown["reading"]["brought_files"] >= 16
        if start == 0:
            with Client(mount.store) as client:
                wait_copied(client)
            assert files_in(tmp_path / "tier") == names_of(range(40))
            mount.stop()
            mount = start_mount(config=config)
    metrics = (mount.mountpoint / ".kvfs" / "metrics").read_text()
    assert 'kvfs_tier_up{tier="scratch"} 1' in metrics and "kvfs_lookups_total 0" in metrics
    status = json.loads((mount.mountpoint / ".kvfs" / "status.json").read_text())
    assert status["used_bytes"] <= 24 * MIB
    assert sum(one["read_share"] for one in status["tiering"]["tiers"]) == pytest.approx(1)


def test_what_was_promised_is_copied_after_a_kill(start_node: StartNode, tmp_path: Path) -> None:
    rest = tmp_path / "away"
    config = tier("scratch", tmp_path / "tier")
    node = start_node(config=config)
    with Client(node.store) as client:
        store_files(client, {b"f0": data_of(0)})
        wait_copied(client)
    os.rename(tmp_path / "tier", rest)  # so that nothing more can be copied
    with Client(node.store) as client:
        store_files(client, {b"f%d" % n: data_of(n) for n in range(1, 9)})
    node.kill()
    os.rename(rest, tmp_path / "tier")
    assert files_in(tmp_path / "tier") == names_of([0])
    node = start_node(config=config)
    with Client(node.store) as client:
        wait_until(lambda: files_in(tmp_path / "tier") == names_of(range(9)))
        wait_copied(client)
        assert tiering_of(client)["tiers"][0]["blobs"] == 9  # type: ignore[index]


def test_kills_in_the_middle_of_copies_and_demotions_leave_nothing_partial(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = STORE + tier("scratch", tmp_path / "tier")
    stored: dict[bytes, bytes] = {}
    waiting = []  # to be copied, when the node was killed
    for run in range(3):
        node = start_node(config=config)
        with Client(node.store) as client:
            for n in range(run * 30, run * 30 + 30):
                store_files(client, {b"f%d" % n: data_of(n)})
                stored[b"f%d" % n] = data_of(n)
            waiting.append(tiering_of(client)["behind"]["waiting"])
        node.kill()
    assert any(waiting), "each kill was after all copies"
    for name in files_in(tmp_path / "tier"):
        file = tmp_path / "tier" / "blobs" / name[:2] / name[2:4] / name
        assert digest_of(file.read_bytes()).hex() == name
    node = start_node(config=config)
    with Client(node.store) as client:
        for path, data in stored.items():
            assert load_bytes(client, path) == data
        wait_copied(client)
        assert files_in(tmp_path / "tier") == names_of(range(90))
        assert client.gc()["orphan_blobs"] == 0


def test_rules_say_what_is_copied(start_node: StartNode, tmp_path: Path) -> None:
    rules = (
        '[[tier_copies]]\nprefix = "never/"\ncopies = "never"\n'
        '[[tier_copies]]\nprefix = "one/"\ncopies = 1\n'
        '[[tier_copies]]\nprefix = "read/"\nsecond_use = true\n'
    )
    config = rules + tier("a", tmp_path / "a") + tier("b", tmp_path / "b")
    node = start_node(config=config)
    paths = [b"never/0", b"one/1", b"read/2", b"read/3", b"all/4"]
    with Client(node.store) as client:
        store_files(client, {path: data_of(n) for n, path in enumerate(paths)})
        wait_copied(client)
        assert files_in(tmp_path / "a") == names_of([1, 4])
        assert files_in(tmp_path / "b") == names_of([4])
        assert load_bytes(client, b"read/3") == data_of(3)
        wait_until(lambda: files_in(tmp_path / "b") == names_of([3, 4]))
        wait_copied(client)
        assert files_in(tmp_path / "a") == names_of([1, 3, 4])
        assert client.tiers_of([digest_of(data_of(n)) for n in (4, 1, 0)]) == [
            ["a", "b"], ["a"], [],
        ]  # fmt: skip


def test_bytes_that_vanished_or_are_wrong_everywhere_are_a_clean_miss(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = STORE + tier("scratch", tmp_path / "tier")
    node = start_node(config=config, allow="wrong bytes|corrupt|digest")
    with Client(node.store) as client:
        store_files(client, {b"f%d" % n: data_of(n) for n in range(3)})
        wait_copied(client)
        assert client.evict_copies([b"f0", b"f1", b"f2"]) == (3, 3)
        gone, bad, _ = (digest_of(data_of(n)).hex() for n in range(3))
        blobs = tmp_path / "tier" / "blobs"
        (blobs / gone[:2] / gone[2:4] / gone).unlink()
        (blobs / bad[:2] / bad[2:4] / bad).write_bytes(data_of(7))
        assert [load_bytes(client, b"f%d" % n) for n in range(3)] == [None, None, data_of(2)]
        wait_until(lambda: client.lookup([b"f0", b"f1", b"f2"]) == [None, None, MIB])


def test_a_local_copy_with_wrong_bytes_is_replaced_from_a_tier(
    start_mount: StartMount, tmp_path: Path
) -> None:
    config = STORE + tier("scratch", tmp_path / "tier")
    mount = start_mount(config=config, allow="quarantined")
    (mount.mountpoint / "f").write_bytes(data_of(1))
    with Client(mount.store) as client:
        wait_copied(client)
    mount.stop()
    name = digest_of(data_of(1)).hex()
    blob = mount.store / "blobs" / name[:2] / name[2:4] / name
    shutil.copy(blob, tmp_path / "other")
    blob.chmod(0o600)
    blob.write_bytes(data_of(2))
    mount = start_mount(config=config, allow="quarantined")
    assert (mount.mountpoint / "f").read_bytes() == data_of(1)


def test_what_lay_on_a_disk_that_is_missing_comes_from_a_tier(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = tier("scratch", tmp_path / "tier")
    disk = tmp_path / "disk"
    node = start_node(config=config, extra_stores=[disk])
    with Client(node.store) as client:
        store_files(client, {b"f%d" % n: data_of(n) for n in range(8)})
        wait_copied(client)
        assert {blob.directory for blob in blobs_of(client, 8)} == {0, 1}
    assert node.stop() == 0
    os.rename(disk, tmp_path / "elsewhere")
    node = start_node(config=config, allow="missing until it is back")
    with Client(node.store) as client:
        assert [load_bytes(client, b"f%d" % n) for n in range(8)] == [data_of(n) for n in range(8)]
        assert {blob.directory for blob in blobs_of(client, 8)} == {0}
    assert node.stop() == 0
    os.rename(tmp_path / "elsewhere", disk)
    node = start_node(config=config, extra_stores=[disk])
    with Client(node.store) as client:
        assert [load_bytes(client, b"f%d" % n) for n in range(8)] == [data_of(n) for n in range(8)]
        assert client.gc()["orphan_blobs"] > 0  # the copies that lie there are not used any more


def test_a_tier_that_cannot_be_opened_stops_nothing_and_joins_in_later(
    start_node: StartNode, tmp_path: Path
) -> None:
    (tmp_path / "tier").write_bytes(b"no directory")
    node = start_node(config=tier("scratch", tmp_path / "tier"), allow="scratch cannot be opened")
    with Client(node.store) as client:
        store_files(client, {b"f": data_of(1)})
        shown = tiering_of(client)["tiers"][0]  # type: ignore[index]
        assert not shown["is_open"] and shown["trouble"]
        (tmp_path / "tier").unlink()
        wait_until(lambda: bool(tiering_of(client)["tiers"][0]["is_open"]))  # type: ignore[index]
        wait_until(lambda: files_in(tmp_path / "tier") == names_of([1]))


@pytest.mark.parametrize("is_wiped", [True, False])
def test_names_of_chunk_files_are_found_again_in_tiers(
    start_node: StartNode, tmp_path: Path, is_wiped: bool
) -> None:
    config = tier("scratch", tmp_path / "tier")
    node = start_node(config=config)
    chunks = dict(chunk_file(number) for number in range(1, 6))
    with Client(node.store) as client:
        store_files(client, chunks)
        store_files(client, {b"other": b"no chunk" * 1000})
        wait_copied(client)
        client.evict_copies(list(chunks))
    assert node.stop() == 0
    if is_wiped:
        shutil.rmtree(node.store)
    else:
        (node.store / "meta" / "running").write_text("of another start of the machine")
    node = start_node(config=config, allow="rebuilding names")
    with Client(node.store) as client:
        if is_wiped:
            assert client.lookup(list(chunks)) == [None] * 5
            assert client.rebuild() == 5
        wait_until(lambda: None not in client.lookup(list(chunks)))
        assert {path: load_bytes(client, path) for path in chunks} == chunks
        assert client.stat(b"other") is None
        namespace = next(iter(chunks)).rsplit(b"/", 2)[0]
        assert len(client.children(namespace, b"")) == 5


def test_doctor_says_how_tiers_are(start_node: StartNode, tmp_path: Path) -> None:
    home = tmp_path / "store"
    home.mkdir()
    (tmp_path / "file").touch()
    own = tier("good", tmp_path / "good") + tier("bad", tmp_path / "file")
    (home / "kvfs.toml").write_text(own)
    start_node(home, allow="bad cannot be opened")
    good, bad = check_tiers(home)
    assert (good.level, bad.level) == (Level.OK, Level.FAIL)
    assert "good: open" in good.found and "bad is not open" in bad.found and bad.advice
    (home / "kvfs.toml").write_text(own + tier("new", tmp_path / "new"))
    new = list(check_tiers(home))[2]
    assert new.level is Level.WARN and "restart the node" in new.advice


def test_a_bucket_that_is_not_there_is_seen_by_who_looks(
    start_node: StartNode, tmp_path: Path, s3: S3Server
) -> None:
    home = tmp_path / "store"
    home.mkdir()
    (home / "kvfs.toml").write_text(
        '[[tiers]]\nname = "bucket"\nkind = "object"\nurl = "s3://mistyped/x"\n'
        f'endpoint = "http://127.0.0.1:{s3.port}"\n'
    )
    node = start_node(home, allow="tier bucket keeps failing")
    with Client(home) as client:
        store_files(client, {b"f%d" % number: data_of(number) for number in range(4)})
        wait_until(lambda: "tier bucket keeps failing" in node.log.read_text())
        told = tiering_of(client)
    assert "NoSuchBucket" in told["tiers"][0]["trouble"]  # type: ignore[index]
    assert any("NoSuchBucket" in line for line in tier_lines(told))
    (finding,) = check_tiers(home)
    assert finding.level is Level.WARN and "NoSuchBucket" in finding.found
    assert "see that the bucket is there" in finding.advice
    assert node.log.read_text().count("tier bucket keeps failing") == 1


def test_another_place_behind_the_same_url_costs_no_names(
    start_node: StartNode, tmp_path: Path
) -> None:
    place = tmp_path / "bucket"
    config = f'[[tiers]]\nname = "bucket"\nkind = "object"\nurl = "file://{place}"\n'
    node = start_node(config=STORE + config, allow="tier bucket keeps failing")
    with Client(node.store) as client:
        store_files(client, {b"f": data_of(1)})
        wait_copied(client)
        assert client.evict_copies([b"f"]) == (1, 1)
        place.rename(tmp_path / "away")
        place.mkdir()
        assert load_bytes(client, b"f") is None
        assert client.lookup([b"f"]) == [MIB]
        place.rmdir()
        (tmp_path / "away").rename(place)
        wait_until(lambda: load_bytes(client, b"f") == data_of(1))


def test_the_shell_shows_tiers(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(config=STORE + tier("scratch", tmp_path / "tier"))
    with Client(node.store) as client:
        store_files(client, {b"f": data_of(1)})
        wait_copied(client)
        client.evict_copies([b"f"])
    environment = {**os.environ, "COLUMNS": "200"}

    def kvfs(*words: str) -> str:
        command = [sys.executable, "-m", "kvfs", *words, "--store", str(node.store)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, env=environment
        )
        return done.stdout

    status = kvfs("status")
    assert "scratch" in status and "1 of 1 MiB" in status and "0 waiting" in status, status
    top = kvfs("top", "--interval=0.1", "--count=2")
    assert top.count("files stored") == 2 and "1 of 1 MiB" in top, top
    lines = kvfs("top", "--interval=0.1", "--count=2", "--json").splitlines()
    assert [json.loads(line)["tiering"]["behind"]["copied_files"] for line in lines] == [1, 1]
    shown = kvfs("show", "/f")
    assert "not on this node" in shown and "scratch" in shown
    assert json.loads(kvfs("show", "/f", "--json"))["tiers"] == ["scratch"]
