"""Published files as symbolic links to their blobs: what is a link when, and where it leads."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.commands import kvfs
from tests.conftest import StartMount
from tests.e2e.calls import fails_with
from tests.files import store_at
from tests.mounts import MountProcess
from tests.processes import wait_until

CONFIG = "[mount]\nsymlink = true\n"


@pytest.fixture
def mounted(start_mount: StartMount) -> MountProcess:
    return start_mount(config=CONFIG, allow="its bytes changed")


@pytest.fixture
def place(mounted: MountProcess) -> Path:
    return mounted.mountpoint


def blob_of(path: Path) -> Path:
    """Where a name leads, which is in the store."""
    target = Path(os.readlink(path))
    assert target.is_absolute() and "blobs" in target.parts
    return target


def test_a_file_is_a_link_once_it_is_closed(place: Path, mounted: MountProcess) -> None:
    with open(place / "a", "wb", buffering=0) as file:
        file.write(b"half")
        number = os.lstat(place / "a").st_ino
        assert stat.S_ISREG(os.lstat(place / "a").st_mode)
        assert (place / "a").read_bytes() == b"half"
        file.write(b" and half")
    shown = os.lstat(place / "a")
    assert stat.S_ISLNK(shown.st_mode)
    assert shown.st_ino != number
    assert shown.st_size == len(os.readlink(place / "a"))
    assert blob_of(place / "a").is_relative_to(mounted.store)
    assert (place / "a").read_bytes() == b"half and half"
    assert os.stat(place / "a").st_size == len(b"half and half")
    assert (place / "a").is_file()
    with os.scandir(place) as items:
        assert {item.name: item.is_symlink() for item in items} == {".kvfs": False, "a": True}


def test_who_has_it_open_keeps_a_file(place: Path) -> None:
    writer = os.open(place / "a", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"first")
    reader = os.open(place / "a", os.O_RDONLY)
    os.close(os.dup(writer))  # a flush: published, and still open for writing
    assert stat.S_ISREG(os.lstat(place / "a").st_mode)
    os.write(writer, b" second")
    os.close(writer)
    wait_until((place / "a").is_symlink)
    assert os.pread(reader, 100, 0) == b"first second"
    assert stat.S_ISREG(os.fstat(reader).st_mode)
    os.close(reader)
    assert (place / "a").read_bytes() == b"first second"


def test_a_file_that_is_open_becomes_a_link_by_name_alone(place: Path) -> None:
    (place / "old").write_bytes(b"old")
    file = open(place / "new", "wb", buffering=0)  # noqa: SIM115  closed in the middle
    file.write(b"new")
    os.rename(place / "new", place / "old")
    assert not (place / "old").is_symlink()
    file.close()
    assert (place / "old").is_symlink() and (place / "old").read_bytes() == b"new"
    assert os.listdir(place) == [".kvfs", "old"]


def test_what_a_client_publishes_is_a_link(place: Path, mounted: MountProcess) -> None:
    assert not (place / "from-client").exists()
    store_at(mounted.store, b"from-client", b"one")
    assert (place / "from-client").is_symlink()
    assert (place / "from-client").read_bytes() == b"one"
    store_at(mounted.store, b"from-client", b"another")
    wait_until(lambda: (place / "from-client").read_bytes() == b"another")


def test_a_name_is_replaced_by_rename(place: Path) -> None:
    (place / "a").write_bytes(b"old")
    reader = os.open(place / "a", os.O_RDONLY)
    leads_to = blob_of(place / "a")
    (place / "b").write_bytes(b"new")
    os.rename(place / "b", place / "a")
    assert leads_to.read_bytes() == b"old"  # for who has read the link and is yet to open it
    assert (place / "a").read_bytes() == b"new"
    assert os.pread(reader, 10, 0) == b"old"
    os.close(reader)
    wait_until(lambda: not leads_to.exists())


def test_a_name_that_goes(place: Path, mounted: MountProcess) -> None:
    (place / "a").write_bytes(b"unlinked")
    (place / "b").write_bytes(b"evicted")
    readers = [os.open(place / name, os.O_RDONLY) for name in ("a", "b")]
    os.unlink(place / "a")
    with Client(mounted.store) as client:
        assert client.evict([b"b"]) == 1
    wait_until(lambda: os.listdir(place) == [".kvfs"])
    with fails_with(errno.ENOENT):
        os.lstat(place / "a")
    wait_until(lambda: not os.path.lexists(place / "b"))
    assert [os.read(reader, 100) for reader in readers] == [b"unlinked", b"evicted"]
    for reader in readers:
        os.close(reader)


def test_hard_links(place: Path) -> None:
    (place / "a").write_bytes(b"bytes")
    os.link(place / "a", place / "b", follow_symlinks=False)
    assert os.lstat(place / "b").st_nlink == 2
    assert os.lstat(place / "a").st_ino == os.lstat(place / "b").st_ino
    assert (place / "b").read_bytes() == b"bytes"
    (place / "a").unlink()
    assert os.lstat(place / "b").st_nlink == 1
    with open(place / "c", "wb", buffering=0) as file:
        os.link(place / "c", place / "d")
        file.write(b"more")
    assert (place / "d").is_symlink() and (place / "d").read_bytes() == b"more"


def test_the_blob_is_read_only(place: Path) -> None:
    (place / "a").write_bytes(b"bytes")
    blob = blob_of(place / "a")
    assert stat.S_IMODE(blob.stat().st_mode) & 0o222 == 0
    os.chmod(place / "a", 0o644)  # reaches the blob, until the link is read again
    assert stat.S_IMODE(blob_of(place / "a").stat().st_mode) & 0o222 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_its_owner_cannot_write_through_a_link_unless_he_is_root(
    place: Path, mounted: MountProcess, tmp_path: Path
) -> None:
    (place / "a").write_bytes(b"bytes")
    blob = blob_of(place / "a")
    owned = tmp_path / "owned"  # the same bits on a file of somebody who may go there
    owned.write_bytes(b"bytes")
    owned.chmod(stat.S_IMODE(blob.stat().st_mode))
    os.chown(owned, 65534, 65534)
    program = "import os, sys; os.setuid(65534); fd = int(sys.argv[1])\n"
    program += "for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):\n"
    program += "    try: os.open(f'/proc/self/fd/{fd}', flags)\n"
    program += "    except PermissionError: continue\n"
    program += "    sys.exit(1)\n"
    fd = os.open(owned, os.O_PATH)
    try:
        command = [sys.executable, "-c", program, str(fd)]
        assert subprocess.run(command, pass_fds=[fd], check=False).returncode == 0
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write through a link")
def test_what_root_wrote_through_a_link_is_found(place: Path, mounted: MountProcess) -> None:
    (place / "a").write_bytes(b"bytes")
    assert (place / "a").read_bytes() == b"bytes"
    with open(place / "a", "r+b") as file:
        file.write(b"B")
    with Client(mounted.store) as client:
        assert client.verify(b"a") is False
    wait_until(lambda: not os.path.lexists(place / "a"))


def test_attributes_of_the_link_are_the_names(place: Path) -> None:
    (place / "a").write_bytes(b"bytes")
    os.utime(place / "a", ns=(10**18, 10**18), follow_symlinks=False)
    assert os.lstat(place / "a").st_mtime_ns == 10**18
    if os.geteuid() == 0:
        os.lchown(place / "a", 1, 2)
        assert (os.lstat(place / "a").st_uid, os.lstat(place / "a").st_gid) == (1, 2)
    assert (place / "a").read_bytes() == b"bytes"


def test_own_links_and_special_files_stay_what_they_are(place: Path) -> None:
    os.symlink("nowhere", place / "own")
    os.mkfifo(place / "fifo")
    os.mknod(place / "empty")
    assert os.readlink(place / "own") == "nowhere"
    assert stat.S_ISFIFO(os.lstat(place / "fifo").st_mode)
    assert (place / "empty").is_symlink() and (place / "empty").read_bytes() == b""


def test_bad_bytes_are_found_when_the_link_is_read(
    start_mount: StartMount, mounted: MountProcess
) -> None:
    (mounted.mountpoint / "a").write_bytes(b"good" * 1000)
    blob = blob_of(mounted.mountpoint / "a")
    assert mounted.stop() == 0
    os.chmod(blob, 0o600)
    with open(blob, "r+b") as file:
        file.write(b"bad!")
    again = start_mount(config=CONFIG, allow="its bytes changed")
    with fails_with(errno.EIO):
        (again.mountpoint / "a").read_bytes()
    wait_until(lambda: not os.path.lexists(again.mountpoint / "a"))


def test_reading_a_link_is_a_use(place: Path, mounted: MountProcess) -> None:
    (place / "a").write_bytes(b"bytes")
    with Client(mounted.store) as client:
        before = client.stat(b"a")
        assert before is not None
        before_ns = before.used_ns
        assert (place / "a").read_bytes() == b"bytes"

        def is_noted() -> bool:
            now = client.stat(b"a")
            return now is not None and now.used_ns > before_ns

        wait_until(is_noted)


def test_links_come_and_go_with_the_option(start_mount: StartMount, tmp_path: Path) -> None:
    plain = start_mount()
    (plain.mountpoint / "a").write_bytes(b"bytes")
    assert stat.S_ISREG(os.lstat(plain.mountpoint / "a").st_mode)
    assert plain.stop() == 0
    linked = start_mount(config=CONFIG)
    assert (linked.mountpoint / "a").is_symlink()
    assert (linked.mountpoint / "a").read_bytes() == b"bytes"
    assert linked.stop() == 0
    again = start_mount()
    with open(again.mountpoint / "a", "r+b") as file:
        file.write(b"B")
    assert (again.mountpoint / "a").read_bytes() == b"Bytes"


def test_status_and_doctor_say_so(place: Path, mounted: MountProcess) -> None:
    status = json.loads((place / ".kvfs" / "status.json").read_text())
    assert status["mount"]["reads"] == "symlink"
    assert "symbolic links" in kvfs("status", store=mounted.store).stdout
    assert "symbolic links" in kvfs("doctor", store=mounted.store).stdout
