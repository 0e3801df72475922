"""mount(8), umount(8) and fstab with a kvfs, as an operator uses them."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from mount.point import find_mount, source_of
from tests.mounts import entries_at, is_mounted
from tests.processes import is_gone, pid_of, wait_until

KVFS = Path(sys.executable).parent / "kvfs"
DOCS = Path(__file__).parents[2] / "docs" / "mount.md"
HELPER = Path("/sbin/mount.fuse.kvfs")  # mount(8) looks nowhere else, and keeps no PATH

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mount(8) needs root"),
    pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount(8)"),
    pytest.mark.skipif(not KVFS.exists(), reason="kvfs is not installed as a command"),
]


@pytest.fixture(scope="module")
def linked() -> Iterator[None]:
    """Our `kvfs` as mount(8)'s helper, as docs/mount.md tells an operator to link it."""
    if not HELPER.is_symlink():
        HELPER.symlink_to(KVFS)
    elif os.readlink(HELPER) != os.fspath(KVFS):
        pytest.skip(f"{HELPER} is a link to another kvfs")
    yield
    HELPER.unlink()


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """An empty directory whose mounts are gone afterwards."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    yield mountpoint
    while is_mounted(mountpoint):
        run("umount", "-l", mountpoint)


@pytest.mark.usefixtures("linked")
def test_mount_and_umount(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    done = run("mount", "-t", "fuse.kvfs", store, where, "-o", "max_bytes=64MiB,noexec,nofail")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (where / "a").write_bytes(b"data")
    with Client(store) as client:
        assert client.status()["directories"][0]["max_bytes"] == 64 * 1024 * 1024
    flags = next(
        line for line in Path("/proc/mounts").read_text().splitlines() if f" {where} " in line
    )
    assert flags.startswith(f"{store} {where} fuse.kvfs rw,nosuid,nodev,noexec")
    pid = pid_of(store)
    done = run("umount", where)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wait_until(lambda: is_gone(pid))
    assert os.listdir(where) == []
    log = (store / "node.log").read_text()
    assert not any(word in log for word in ("WARNING", "ERROR", "Traceback"))


@pytest.mark.usefixtures("linked")
def test_mounted_again_while_the_old_process_goes(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for turn in range(4):
        done = run("mount", "-t", "fuse.kvfs", f"kvfs:{store}", where)
        assert done.returncode == 0, done.stderr
        assert entries_at(where) == 1
        (where / f"f{turn}").write_bytes(b"data")
        assert run("umount", where).returncode == 0
    assert run("mount", "-t", "fuse.kvfs", store, where).returncode == 0
    assert sorted(os.listdir(where)) == [".kvfs", "f0", "f1", "f2", "f3"]


@pytest.mark.usefixtures("linked")
def test_mounted_over_a_dead_mount(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fstab = tmp_path / "fstab"
    fstab.write_text(f"{store} {where} fuse.kvfs defaults 0 0\n")
    for turn in range(3):
        done = run("mount", "-T", fstab, where)
        assert (done.returncode, done.stderr) == (0, "")
        assert entries_at(where) == 1
        (where / f"f{turn}").write_bytes(b"data")
        os.kill(pid_of(store), signal.SIGKILL)
    assert run("mount", "-T", fstab, where).returncode == 0
    assert sorted(os.listdir(where)) == [".kvfs", "f0", "f1", "f2"]
    assert run("umount", where).returncode == 0
    assert entries_at(where) == 0


@pytest.mark.usefixtures("linked")
def test_lines_of_fstab(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "a store"
    store.mkdir()
    options = "allow_other,noauto,nofail,_netdev,x-systemd.requires-mounts-for=/"
    fstab = tmp_path / "fstab"
    source = str(store).replace(" ", r"\040")
    fstab.write_text(f"{source} {where} fuse.kvfs {options} 0 0\n")
    done = run("mount", "-T", fstab, where)
    assert (done.returncode, done.stderr) == (0, "")
    assert run("umount", where).returncode == 0


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("name", ["plain", "a store"])
def test_mount_a_sees_what_is_mounted_already(where: Path, tmp_path: Path, name: str) -> None:
    """The line that docs/mount.md shows, and the way of writing a path that it tells of."""
    store = tmp_path / name
    store.mkdir()
    line = next(line for line in DOCS.read_text().splitlines() if "nofail,x-systemd" in line)
    line = line.replace("for=/nvme", "for=/").replace("/nvme/kvfs", source_of(store))
    fstab = tmp_path / "fstab"
    fstab.write_text(f"{line.replace('/mnt/kv', str(where)).strip()}\n")
    for _ in range(2):
        done = run("mount", "-T", fstab, "-a")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert entries_at(where) == 1
    assert run("findmnt", "-no", "SOURCE", where).stdout.strip() == source_of(store)
    entry = find_mount(where)
    assert entry is not None and entry.store == store
    pid = pid_of(store)
    assert run("umount", where).returncode == 0
    wait_until(lambda: is_gone(pid))


@pytest.mark.usefixtures("linked")
def test_read_only(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run("mount", "-t", "fuse.kvfs", f"kvfs:{store}", where).returncode == 0
    (where / "a").write_bytes(b"data")
    assert run("umount", where).returncode == 0
    assert run("mount", "-r", "-t", "fuse.kvfs", store, where).returncode == 0
    assert (where / "a").read_bytes() == b"data"
    with pytest.raises(OSError, match="Read-only file system"):
        (where / "b").write_bytes(b"data")
    with pytest.raises(OSError, match="Read-only file system"):
        (where / "a").unlink()


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("{store}", "uid=5", "option uid=5: kvfs has none such"),
        ("{store}", "max_bytes=lots", "'lots' is no size"),
        ("{store}", "max_bytes=", "option max_bytes=: has no value"),
        ("{foreign}", "rw", "holds other files"),
        ("kvfs:nowhere", "rw", "name its directory from the root"),
    ],
)
def test_what_is_refused(where: Path, tmp_path: Path, source: str, options: str, said: str) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "photo.jpg").write_bytes(b"")
    source = source.format(store=tmp_path / "store", foreign=foreign)
    done = run("mount", "-t", "fuse.kvfs", source, where, "-o", options)
    assert done.returncode in (1, 32)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not is_mounted(where)
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(
    shutil.which("mount.fuse") is None, reason="there is no /sbin/mount.fuse (package fuse3)"
)
def test_without_a_link_by_way_of_mount_fuse(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = run("mount", "-t", "fuse", f"{KVFS}#{store}", where, "-o", "allow_other")
    assert (done.returncode, done.stderr) == (0, "")
    entry = find_mount(where)
    assert entry is not None and entry.store == store
    assert run("umount", where).returncode == 0


def test_called_as_the_helper(where: Path, tmp_path: Path) -> None:
    helper = tmp_path / "mount.fuse.kvfs"
    helper.symlink_to(KVFS)
    store = tmp_path / "store"
    done = run(helper, store, where, "-o", "rw,noauto", "-t", "fuse.kvfs")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert is_mounted(where)
    done = run(helper, tmp_path / "other", where)
    assert done.returncode == 32
    assert "is mounted here already" in done.stderr
    assert entries_at(where) == 1
    done = run(helper, store)
    assert done.returncode == 1
    assert "write SOURCE MOUNTPOINT" in done.stderr


@pytest.mark.usefixtures("linked")
def test_umount_while_busy_then_lazily(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run("mount", "-t", "fuse.kvfs", f"kvfs:{store}", where).returncode == 0
    pid = pid_of(store)
    (where / "old").write_bytes(b"old")
    reader = os.open(where / "old", os.O_RDONLY)
    writer = os.open(where / "new", os.O_WRONLY | os.O_CREAT)
    os.write(writer, b"first ")
    done = run("umount", where)
    assert done.returncode == 32
    assert "busy" in done.stderr
    assert is_mounted(where)
    assert not is_gone(pid)
    os.write(writer, b"second ")
    (where / "other").write_bytes(b"goes on")
    assert run("umount", "-l", where).returncode == 0
    assert not is_mounted(where)
    assert os.read(reader, 100) == b"old"
    os.write(writer, b"third")
    os.close(writer)
    done = run("mount", "-t", "fuse.kvfs", store, where)
    assert done.returncode == 32
    assert "served to files that are open" in done.stderr and str(pid) in done.stderr
    assert not is_mounted(where)
    os.close(reader)
    wait_until(lambda: is_gone(pid))
    assert run("mount", "-t", "fuse.kvfs", store, where).returncode == 0
    assert entries_at(where) == 1
    assert (where / "new").read_bytes() == b"first second third"
    assert sorted(os.listdir(where)) == [".kvfs", "new", "old", "other"]


def test_a_node_that_a_client_started_gives_its_place_up(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with Client(store, start=True) as client:
        spare = int(client.status()["pid"])
        assert client.status()["mountpoint"] is None
        done = run(KVFS, "mount", where, "--store", store)
        assert (done.returncode, done.stderr) == (0, "")
        wait_until(lambda: is_gone(spare))
        assert pid_of(store) != spare
    assert "gives its place up" in (store / "node.log").read_text()
