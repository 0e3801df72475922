"""Mounting and unmounting as a person does it, and what `.kvfs` shows."""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.address import node_address
from mount.point import MountEntry, find_mount, find_mounts, probe
from tests.commands import kvfs
from tests.conftest import StartMount, StartNode
from tests.mounts import is_mounted
from tests.processes import is_gone, pid_of, wait_until


def mount_at(where: Path, store: Path) -> int:
    """Mount in the background; the process id."""
    done = kvfs("mount", where, "--store", store)
    assert done.returncode == 0, done.stderr
    return pid_of(store)


def test_mount_in_the_background_and_umount(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = kvfs("mount", where, "--store", store, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (where / "a").write_bytes(b"data")
    assert find_mounts()[-1] == MountEntry(where, store, find_mounts()[-1].device)
    assert f"mounted {store} at {where}" in (store / "node.log").read_text()
    pid = pid_of(store)
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    done = kvfs("umount", where)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert is_gone(pid)
    assert not is_mounted(where)
    assert os.listdir(where) == []
    log = (store / "node.log").read_text()
    assert not any(word in log for word in ("WARNING", "ERROR", "Traceback"))
    done = kvfs("mount", where, "--store", store)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (where / "a").read_bytes() == b"data"


def test_store_paths_that_mount_options_cannot_hold(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "a,b\\c d%20é\n"
    assert kvfs("mount", where, "--store", store).returncode == 0
    assert find_mount(where) == MountEntry(where, store, find_mounts()[-1].device)
    assert kvfs("umount", where).returncode == 0
    odd = tmp_path / "m nt\\é,x"
    assert kvfs("mount", odd, "--store", store).returncode == 0
    assert find_mount(odd) is not None
    assert kvfs("umount", odd).returncode == 0
    assert find_mount(odd) is None


def test_what_cannot_be_mounted(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").write_bytes(b"")
    for words, said in (
        ((tmp_path / "file", "--store", store), "is no directory"),
        ((store / "mnt", "--store", store), "in or above the store"),
        ((tmp_path, "--store", store), "in or above the store"),
        ((where, "--store", tmp_path / "foreign"), "holds other files"),
        ((where, "--store", store, "--tokenizer", tmp_path), "tokenizer.json"),
    ):
        done = kvfs("mount", *words)
        assert done.returncode == 2, words
        assert said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert find_mounts() == [] or not is_mounted(where)
    assert os.listdir(tmp_path / "foreign") == ["photo.jpg"]


def test_a_mount_that_fails_leaves_no_directory_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    joining = ("--store", tmp_path / "store", "--join", "redis://127.0.0.1:1")
    for words in (("mount",), ("mount", "--foreground")):
        for place in ("made/for/it", "there", "there/made"):
            done = kvfs(*words, tmp_path / place, *joining)
            assert done.returncode == 2 and "see that a server runs at" in done.stderr, done.stderr
    assert not (tmp_path / "made").exists()
    assert os.listdir(tmp_path / "there") == []


def test_names_that_a_start_finds_lost_are_told(where: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = ("mount", where, "--store", store)
    assert kvfs(*words).returncode == 0
    (where / "a").write_bytes(b"data")
    assert kvfs("umount", where).returncode == 0
    (store / "meta" / "data.mdb").write_bytes(b"garbage" * 4096)
    done = kvfs(*words)
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"kvfs mount: {store}/meta/data.mdb is damaged")
    lost = "all names that were not of chunk files are lost, 1 blobs of 4 bytes with them"
    assert lost in done.stderr
    assert lost in kvfs("status", "--store", store).stdout
    assert kvfs("umount", where).returncode == 0
    done = kvfs(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lost, 1" not in kvfs("status", "--store", store).stdout


def test_a_place_or_store_that_is_taken(where: Path, tmp_path: Path, start_node: StartNode) -> None:
    mount_at(where, tmp_path / "store")
    done = kvfs("mount", where, "--store", tmp_path / "other")
    assert done.returncode == 2
    assert "is mounted here already" in done.stderr
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for store in ("store", "link"):
        done = kvfs("mount", tmp_path / "second", "--store", tmp_path / store)
        assert done.returncode == 2
        assert f"is mounted at {where} already" in done.stderr
    start_node(tmp_path / "served")
    done = kvfs("mount", tmp_path / "second", "--store", tmp_path / "served")
    assert done.returncode == 2
    assert "kvfs serve" in done.stderr
    assert not is_mounted(tmp_path / "second")
    (where / "a").write_bytes(b"still fine")


def test_a_directory_that_is_not_empty_is_hidden(where: Path, tmp_path: Path) -> None:
    where.mkdir()
    (where / "below").write_bytes(b"")
    done = kvfs("mount", where, "--store", tmp_path / "store")
    assert done.returncode == 0
    assert "not empty: 1 names are hidden" in done.stderr
    assert os.listdir(where) == [".kvfs"]
    assert kvfs("umount", where).returncode == 0
    assert os.listdir(where) == ["below"]


def test_umount_while_in_use(where: Path, tmp_path: Path) -> None:
    pid = mount_at(where, tmp_path / "store")
    (where / "a").write_bytes(b"data")
    with open(where / "a", "rb") as file:
        done = kvfs("umount", where)
        assert done.returncode == 1
        assert "in use" in done.stderr
        assert "--lazy" in done.stderr
        assert is_mounted(where)
        assert kvfs("umount", where, "--lazy").returncode == 0
        assert not is_mounted(where)
        assert file.read() == b"data"
    wait_until(lambda: is_gone(pid))
    done = kvfs("umount", where)
    assert done.returncode == 2
    assert "no kvfs is mounted here" in done.stderr


def test_umount_says_what_it_waits_for(where: Path, tmp_path: Path) -> None:
    pid = mount_at(where, tmp_path / "store")
    os.kill(pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "kvfs", "umount", str(where)]
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as umount:
            assert umount.stderr is not None
            said = umount.stderr.readline()
            assert f"waiting up to 30 s for its process {pid}" in said
            assert f"kill -CONT {pid}" in said
            os.kill(pid, signal.SIGCONT)
            assert umount.wait(60) == 0
            assert umount.stderr.read() == ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert is_gone(pid)


def test_umount_does_not_hang_where_a_stopped_mount_takes_no_connection(
    where: Path, tmp_path: Path
) -> None:
    pid = mount_at(where, tmp_path / "store")
    os.kill(pid, signal.SIGSTOP)
    command = [sys.executable, "-m", "kvfs", "umount", str(where)]
    try:
        with contextlib.ExitStack() as stack:
            fill_queue(tmp_path / "store", stack)
            umount = stack.enter_context(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            )
            stack.callback(umount.kill)
            assert umount.stderr is not None
            assert select.select([umount.stderr], [], [], 20)[0], "it hangs"
            assert "its process (which takes no connection: is it stopped?)" in (
                umount.stderr.readline()
            )
            os.kill(pid, signal.SIGCONT)
            assert umount.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert is_gone(pid)


def fill_queue(store: Path, stack: contextlib.ExitStack) -> None:
    """Connect to a node that accepts nobody until there is no room for more."""
    for _ in range(1000):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.setblocking(False)
        try:
            with node_address(store) as address:
                connection.connect(address)
        except BlockingIOError:
            return
    raise AssertionError("the queue has no end")


def test_a_missing_directory_of_the_store_is_told(where: Path, tmp_path: Path) -> None:
    store, disk = tmp_path / "store", tmp_path / "disk"
    words = ("mount", where, "--store", store)
    assert kvfs(*words, "--store", disk).returncode == 0
    assert kvfs("umount", where).returncode == 0
    disk.rename(tmp_path / "away")
    for is_there in (False, True):
        if is_there:
            disk.mkdir()
        for also_named in ((), ("--store", disk)):
            done = kvfs(*words, *also_named)
            cause = "is its disk mounted?" if is_there else "is not there"
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
            assert done.stderr.startswith(f"kvfs mount: {disk} ") and cause in done.stderr
            assert done.stderr.count("\n") == 1
            (where / "a").write_bytes(b"data")
            assert kvfs("umount", where).returncode == 0
    assert os.listdir(disk) == []
    disk.rmdir()
    (tmp_path / "away").rename(disk)
    done = kvfs(*words)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_detached_mount_that_ends_leaves_its_successor_alone(where: Path, tmp_path: Path) -> None:
    old = mount_at(where, tmp_path / "old")
    (where / "a").write_bytes(b"old")
    reader = os.open(where / "a", os.O_RDONLY)
    assert kvfs("umount", where, "--lazy").returncode == 0
    new = mount_at(where, tmp_path / "new")
    (where / "a").write_bytes(b"new")
    assert os.read(reader, 100) == b"old"
    os.kill(old, signal.SIGTERM)
    wait_until(lambda: is_gone(old))
    with contextlib.suppress(OSError):  # a stock pyfuse3 still asks who has gone
        os.close(reader)
    assert (where / "a").read_bytes() == b"new"
    assert not is_gone(new)
    assert [entry.store for entry in find_mounts() if entry.mountpoint == where] == [
        tmp_path / "new"
    ]


def test_sigterm_takes_the_mount_down_and_drops_what_is_half(where: Path, tmp_path: Path) -> None:
    pid = mount_at(where, tmp_path / "store")
    (where / "whole").write_bytes(b"data")
    half = os.open(where / "half", os.O_WRONLY | os.O_CREAT)
    os.write(half, b"only the beg")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: is_gone(pid))
    assert not is_mounted(where)
    with pytest.raises(OSError, match="not connected"):
        os.write(half, b"inning")  # which may still go into the file that the kernel had been given
        os.fsync(half)
    with pytest.raises(OSError, match="not connected"):
        os.close(half)
    mount_at(where, tmp_path / "store")
    assert sorted(os.listdir(where)) == [".kvfs", "whole"]
    assert not any((tmp_path / "store" / "staging").iterdir())


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_end_of_its_terminal_takes_a_mount_down_unless_that_is_ignored(
    where: Path, tmp_path: Path, is_ignored: bool
) -> None:
    options = ["--foreground", "--store", tmp_path / "store"]
    words = [sys.executable, "-m", "kvfs", "mount", where, *options]
    prefix = ["nohup"] if is_ignored else ["env", "--default-signal=HUP"]  # as a terminal has it
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(
            [*prefix, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as own,
    ):
        wait_until(lambda: is_mounted(where) and probe(where) == 0)
        (where / "a").write_bytes(b"data")
        own.send_signal(signal.SIGHUP)
        if is_ignored:
            assert (where / "a").read_bytes() == b"data"
            own.send_signal(signal.SIGTERM)
        assert own.wait(30) == 0
    said = (tmp_path / "log").read_text()
    assert ("SIGHUP: stopping" in said, "SIGTERM: stopping" in said) == (not is_ignored, is_ignored)
    assert not is_mounted(where)


def test_plain_umount_ends_the_process(where: Path, tmp_path: Path) -> None:
    pid = mount_at(where, tmp_path / "store")
    subprocess.run(["umount", where], check=True)
    wait_until(lambda: is_gone(pid))
    assert "Traceback" not in (tmp_path / "store" / "node.log").read_text()


def test_read_ahead_is_raised(start_mount: StartMount) -> None:
    mount = start_mount(config="[mount]\nread_ahead_kib = 2048\n")
    entry = find_mount(mount.mountpoint)
    assert entry is not None
    if os.geteuid() == 0:  # a moment after the first request was served
        setting = Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb")
        wait_until(lambda: setting.read_text() == "2048\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's place")
@pytest.mark.parametrize("allow_other", [False, True])
def test_other_users(start_mount: StartMount, allow_other: bool) -> None:
    mount = start_mount(
        mountpoint=Path(f"/tmp/kvfs-test-{os.getpid()}"),
        config=f"[mount]\nallow_other = {str(allow_other).lower()}\n",
    )
    (mount.mountpoint / "a").write_bytes(b"data")
    os.chmod(mount.mountpoint / "a", 0o644)
    code = f"import os; os.setuid(65534); print(open({str(mount.mountpoint / 'a')!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout == "data\n") is allow_other, done.stderr
    assert ("Permission denied" in done.stderr) is not allow_other
    mount.stop()
    mount.mountpoint.rmdir()


# The view -----------------------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("is_killed", [False, True])
def test_another_users_mount_is_not_said_to_answer(
    start_mount: StartMount, tmp_path: Path, is_killed: bool
) -> None:
    mounted = start_mount()
    if is_killed:
        mounted.kill()
    tmp_path.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(mounted.mountpoint.parent)  # not what lies above it, which is closed to all
            os.setresuid(65534, 65534, 65534)
            os._exit(probe(Path(mounted.mountpoint.name)) or 0)
        finally:
            os._exit(255)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EACCES


def test_the_view_of_the_store(start_mount: StartMount) -> None:
    mount = start_mount()
    view = mount.mountpoint / ".kvfs"
    (mount.mountpoint / "a").write_bytes(b"data")
    status = json.loads((view / "status.json").read_bytes())
    assert status["mountpoint"] == str(mount.mountpoint)
    assert status["store"] == str(mount.store)
    shown = subprocess.run(["cat", view / "status.json"], capture_output=True, check=True)
    assert json.loads(shown.stdout)["pid"] == mount.pid
    assert os.listdir(view) == ["metrics", "prefixes", "status.json"]
    assert os.listdir(view / "prefixes") == []
    subprocess.run(f"rm -rf '{mount.mountpoint}'/*", shell=True, check=True)
    assert os.listdir(mount.mountpoint) == [".kvfs"]


def test_the_view_is_not_for_changes(start_mount: StartMount) -> None:
    mount = start_mount()
    view = mount.mountpoint / ".kvfs"
    (mount.mountpoint / "a").write_bytes(b"data")
    attempts = [
        lambda: (view / "status.json").write_bytes(b""),
        (view / "status.json").unlink,
        lambda: (view / "new").write_bytes(b""),
        (view / "new").mkdir,
        lambda: os.rename(mount.mountpoint / "a", view / "a"),
        lambda: os.rename(view, mount.mountpoint / "b"),
        lambda: os.rename(mount.mountpoint / "a", view),
        lambda: os.rmdir(view),
        lambda: os.chmod(view, 0o777),
        lambda: os.truncate(view / "status.json", 0),
        lambda: os.mkdir(view),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match=r"not permitted|denied|exists|directory"):
            attempt()
    assert (mount.mountpoint / "a").read_bytes() == b"data"
    assert json.loads((view / "status.json").read_bytes())["pid"] == mount.pid
