"""The doctor's findings from what a machine says."""

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.address import node_address
from kvfs.belonging import Belonging, write_belonging
from kvfs.home import file_system_of
from kvfs.shell.doctor.cluster import check_cluster
from kvfs.shell.doctor.deadline import within
from kvfs.shell.doctor.disk import check_file_system
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.fuse import check_fuse_device, check_fusermount, has_sys_admin
from kvfs.shell.doctor.machine import check_kernel, check_open_files, check_page_size
from kvfs.shell.doctor.mounts import check_mounts
from kvfs.shell.doctor.node import check_node
from kvfs.shell.doctor.software import installed_version, parse_version
from kvfs.shell.doctor.store import check_staging, check_store
from kvfs.shell.doctor.tiers import check_tiers
from kvfs.shell.locate import Mounted
from tests.conftest import StartNode


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("6.18.44-fc", Level.OK),
        ("6.9.0", Level.OK),
        ("6.8.12-generic", Level.WARN),
        ("5.15", Level.WARN),
        ("10.0", Level.OK),
        ("odd", Level.WARN),
    ],
)
def test_kernel(release: str, level: Level) -> None:
    assert check_kernel(release).level is level


def test_every_warning_says_what_to_do(tmp_path: Path) -> None:
    findings = [
        check_kernel("5.4"),
        check_page_size(65_536),
        check_fuse_device(tmp_path / "fuse"),
        check_fusermount(None, is_root=False),
        check_open_files((256, 256)),
        check_file_system("nfs4"),
        *check_store(tmp_path / "absent"),
    ]
    assert all(finding.level is not Level.OK and finding.advice for finding in findings)


def test_fusermount_is_for_people_who_are_not_root() -> None:
    assert check_fusermount(None, is_root=True).level is Level.OK
    assert check_fusermount(None, is_root=False).level is Level.FAIL
    assert check_fusermount("/bin/fusermount3", is_root=False).level is Level.OK


@pytest.mark.parametrize(
    ("hard", "level"),
    [(-1, Level.OK), (1_048_576, Level.OK), (4096, Level.WARN), (512, Level.FAIL)],
)
def test_open_files(hard: int, level: Level) -> None:
    assert check_open_files((hard, hard)).level is level


def test_capability(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t0000000000200000\n")
    assert has_sys_admin(status)
    status.write_text("CapEff:\t00000000000fffff\n")
    assert not has_sys_admin(status)
    assert not has_sys_admin(tmp_path / "absent")


def test_file_system_is_the_last_mounted_on_the_device(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"1 0 0:99 / / rw - ext4 /dev/x rw\n2 1 {number} / /a rw shared:1 - xfs /dev/y rw\nodd\n"
    )
    assert file_system_of(tmp_path, mountinfo) == "xfs"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store.json").write_text('{"version": 1, "id": "a"}')
    (tmp_path / "staging").mkdir()
    return tmp_path


def levels(findings: Iterator[Finding]) -> dict[str, Level]:
    return {finding.check: finding.level for finding in findings}


def test_a_stopped_store_is_fine(store: Path) -> None:
    found = levels(check_store(store))
    assert found["store"] is found["writing"] is found["node"] is found["staging"] is Level.OK
    assert sorted(item.name for item in store.iterdir()) == ["staging", "store.json"]


def test_a_store_that_init_has_made_and_no_node_began_is_fine(tmp_path: Path) -> None:
    (tmp_path / "kvfs.toml").touch()
    found = levels(check_store(tmp_path))
    assert found["store"] is found["settings"] is Level.OK


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kvfs.toml", "max_byte = 1"),
        ("part.json", '{"store": "/other", "id": "a"}'),
        ("store.json", "{"),
        ("meta/directories.json", "{"),
    ],
)
def test_a_store_that_cannot_start_is_told(store: Path, file: str, text: str) -> None:
    assert levels(check_store(store))["settings"] is Level.OK
    (store / file).parent.mkdir(exist_ok=True)
    (store / file).write_text(text)
    finding = next(f for f in check_store(store) if f.check == "settings")
    assert finding.level is Level.FAIL
    assert file in finding.found


def test_staging_files_of_a_dead_node_are_told(store: Path) -> None:
    (store / "staging" / "a.b.1").touch()
    assert check_staging(store, is_running=False).found == "1 file that no node is writing"
    assert check_staging(store, is_running=True) == Finding("staging", Level.OK, "1 file")


@pytest.mark.parametrize("is_running", [True, False])
def test_what_no_node_makes_in_staging_is_named(store: Path, is_running: bool) -> None:
    (store / "staging" / "a.b.1").mkdir()
    (store / "staging" / "a.b.2").touch()
    (store / "staging" / "b.b.\n").touch()
    finding = check_staging(store, is_running)
    assert finding.level is Level.WARN
    told = "1 file of nodes, and 2 foreign names: a.b.1 (a directory), b.b.\\x0a (a file)"
    assert finding.found == told


def test_what_goes_while_staging_is_looked_at_hides_nothing_else(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_one(item: os.DirEntry[str], store_id: str) -> bool:
        if item.name == "going":
            os.unlink(item.path)
        return False

    monkeypatch.setattr("kvfs.shell.doctor.store.is_own", remove_one)
    (store / "staging" / "going").touch()
    (store / "staging" / "link").symlink_to("/nowhere")
    finding = check_staging(store, is_running=True)
    assert finding.level is Level.WARN
    assert "going (No such file or directory), link (a symbolic link)" in finding.found


@pytest.mark.parametrize("damage", ["mark", "place"])
def test_staging_that_cannot_be_looked_at_is_told(store: Path, damage: str) -> None:
    (store / "staging" / "a.b.1").touch()
    if damage == "mark":
        (store / "store.json").write_text("{}")
    else:
        (store / "staging").rename(store / "aside")
        (store / "staging").touch()
    assert check_staging(store, is_running=False).level is Level.FAIL


@pytest.mark.parametrize("gone", ["staging", "blobs", "quarantine"])
def test_a_directory_that_was_removed_under_its_node_is_told(store: Path, gone: str) -> None:
    for part in ("blobs", "quarantine"):
        (store / part).mkdir()
    mark = os.open(store / "store.json", os.O_RDONLY)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)  # as a node has it
        assert "directories" not in levels(check_store(store))
        (store / gone).rmdir()
        finding = next(f for f in check_store(store) if f.check == "directories")
        assert finding.level is Level.FAIL
        assert finding.found == f"{gone}: removed under a running node"
    finally:
        os.close(mark)
    assert "directories" not in levels(check_store(store))  # the next start makes it


@pytest.mark.parametrize("is_left_over", [True, False])
def test_a_node_that_no_client_reaches_is_not_called_stopped(
    store: Path, is_left_over: bool
) -> None:
    if is_left_over:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(store / "node.sock"))
    (store / "staging" / "a.b.1").touch()
    mark = os.open(store / "store.json", os.O_RDONLY)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)
        found = {finding.check: finding for finding in check_store(store)}
    finally:
        os.close(mark)
    assert found["node"].level is Level.WARN
    assert "no client reaches it" in found["node"].found
    assert found["staging"].found == "1 file"  # not what gc may remove


def test_a_socket_that_nobody_listens_on_is_left_over(store: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(store / "node.sock"))
    is_running, finding = check_node(store)
    assert (is_running, finding.level) == (False, Level.OK)
    assert "left over" in finding.found


def test_a_node_is_running_and_a_stopped_one_is_told(start_node: StartNode) -> None:
    node = start_node()
    is_running, finding = check_node(node.store)
    assert (is_running, finding.level) == (True, Level.OK)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        is_running, finding = check_node(node.store)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert (is_running, finding.level) == (True, Level.FAIL)
    assert "does not answer" in finding.found and "kill -CONT" in finding.advice


def test_a_stopped_store_whose_min_free_lets_nothing_be_stored_is_told(store: Path) -> None:
    (store / "kvfs.toml").write_text('min_free = "100%"\n')
    finding = next(f for f in check_store(store) if f.check == "room")
    assert finding.level is Level.FAIL and f"{store} takes no file" in finding.found
    assert "lower min_free" in finding.advice and "free the disk" in finding.advice
    blob = store / "blobs" / "00" / "00" / "digest"
    blob.parent.mkdir(parents=True)
    blob.touch()
    assert "room" not in levels(check_store(store))  # it may go: the next node sees how much


def test_a_running_store_whose_min_free_lets_nothing_be_stored_is_told(
    start_node: StartNode,
) -> None:
    node = start_node(config='min_free = "100%"')
    finding = next(f for f in check_store(node.store) if f.check == "room")
    assert finding.level is Level.FAIL and "takes no file" in finding.found
    assert "lower min_free" in finding.advice


def test_a_store_that_has_room_says_nothing_of_it(start_node: StartNode) -> None:
    assert "room" not in levels(check_store(start_node().store))


def test_a_node_is_reached_however_long_the_path_of_its_store_is(store: Path) -> None:
    deep = store.joinpath(*["x" * 60] * 3)
    deep.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, node_address(deep) as address:
        listener.bind(address)
        listener.listen()
        is_running, finding = check_node(deep)
    assert is_running and "takes connections" in finding.found  # by whom nobody answers


def test_a_file_in_the_sockets_place_is_a_failure(store: Path) -> None:
    (store / "node.sock").touch()
    assert check_node(store)[1].level is Level.FAIL


def test_a_mount_that_answers_is_fine_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    mounts = [
        Mounted(tmp_path, tmp_path),
        Mounted(tmp_path / "absent", tmp_path),
        Mounted(tmp_path, tmp_path / "removed"),
    ]
    found = list(check_mounts(lambda: mounts))
    assert [item.level for item in found] == [Level.OK, Level.WARN, Level.FAIL]
    assert found[2].found == f"its store {tmp_path / 'removed'} was removed"


@pytest.mark.parametrize(
    ("node", "level"), [("none", Level.FAIL), ("silent", Level.WARN), ("serves", Level.OK)]
)
def test_a_mount_that_the_kernel_shows_to_its_user_only(
    store: Path, monkeypatch: pytest.MonkeyPatch, node: str, level: Level
) -> None:
    class Nothing:
        f_bsize = 0  # what the kernel itself says to others, also of a dead mount

    monkeypatch.setattr("mount.point.os.statvfs", lambda path: Nothing)
    if node == "serves":
        monkeypatch.setattr("kvfs.shell.doctor.mounts._status", lambda store: {"reads": "x"})
    with socket.socket(socket.AF_UNIX) as listener:
        if node == "silent":
            monkeypatch.setattr("kvfs.shell.doctor.mounts.STATUS_DEADLINE_S", 0.1)
            listener.bind(str(store / "node.sock"))
            listener.listen()
        (finding,) = check_mounts(lambda: [Mounted(Path("/mnt"), store)])
    assert finding.level is level
    assert ("kvfs umount /mnt" in finding.advice) == (level is Level.FAIL)


def test_what_may_not_be_looked_at_ends_no_other_check(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (store / "staging" / "a.b.1").touch()
    (store / "blobs").mkdir()
    for look in (
        "store.read_mark",
        "store.read_roster",
        "store.file_system_of",
        "tiers.load_config_of_store",
        "cluster.read_belonging",
        "metadata.subdirectories",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"kvfs.shell.doctor.{look}", refuse)
            found = list(check_store(store))
        refused = [item for item in found if "Permission denied" in item.found]
        assert refused and all(item.level is Level.FAIL for item in refused)
        assert all("the store's owner" in item.advice for item in refused)
        assert {"settings", "node", "metadata", "staging"} <= {item.check for item in found}, look


def test_a_store_in_a_dead_mount_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bool:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))

    monkeypatch.setattr("kvfs.shell.doctor.store.is_store", fail)
    (finding,) = check_store(store)
    assert (finding.check, finding.level) == ("store", Level.FAIL)
    assert "a mount whose process has died" in finding.advice


@pytest.mark.parametrize("file", ["store.json", "meta/directories.json", "meta/data.mdb"])
def test_a_fifo_in_place_of_a_stores_file_holds_up_nothing(store: Path, file: str) -> None:
    (store / "staging" / "a.b.1").touch()
    (store / file).parent.mkdir(exist_ok=True)
    (store / file).unlink(missing_ok=True)
    os.mkfifo(store / file)
    found = within(20, lambda: list(check_store(store)))
    (settings,) = (item for item in found if item.check == "settings")
    assert settings.level is Level.FAIL and f"{file}: is a FIFO" in settings.found


def test_versions() -> None:
    assert parse_version("3.17.2") == (3, 17, 2)
    assert parse_version("3.17.x") == (3, 17)
    assert parse_version("") == ()
    assert installed_version("no-such-distribution-anywhere") is None


def test_a_store_of_a_cluster_says_whether_its_next_start_finds_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "meta").mkdir(parents=True)
    assert list(check_cluster(store)) == []
    write_belonging(store, Belonging("one", "redis://host:6379", bytes(16)))
    (finding,) = check_cluster(store)
    assert finding.level is Level.WARN
    assert "--join redis://host:6379" in finding.advice
    for name, level in (("one", Level.OK), ("two", Level.WARN)):
        own = f'[cluster]\nmetadata = "redis://host:6379"\nname = "{name}"\n'
        (store / "kvfs.toml").write_text(own)
        assert [found.level for found in check_cluster(store)] == [level]
    (store / "meta" / "cluster").write_text("{}")
    assert [found.level for found in check_cluster(store)] == [Level.FAIL]


def test_tiers_of_a_store_without_a_node_are_only_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    assert list(check_tiers(store)) == []
    own = '[[tiers]]\nname = "scratch"\nkind = "shared"\npath = "/pfs/kvfs"\n'
    (store / "kvfs.toml").write_text(own)
    (finding,) = check_tiers(store)
    assert finding.level is Level.OK
    assert finding.found == "scratch: a node opens them when it starts"
    (store / "kvfs.toml").write_text("[[tiers]]\n")
    assert list(check_tiers(store)) == []
