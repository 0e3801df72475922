"""Reading the kernel's list of mounts, and naming a mount so that it can be read."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfs.errors import InvalidInput, KvfsError
from mount import point
from mount.point import MountEntry, find_triggers, parse_mountinfo, prepare, source_of

MOUNTINFO = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:39 / /mnt/kv rw,nosuid,nodev,relatime - fuse.kvfs /var/lib/kvfs rw,user_id=7
41 22 0:40 / /mnt/with\040blank\134and\011tab rw shared:5 master:1 - fuse.kvfs kvfs:/a%20b%2Cc rw
42 22 0:41 / /mnt/ssh rw - fuse.sshfs host:/x rw
43 22 0:42 / /mnt/other rw - fuse.kvfs something rw
44 22 0:43 / /proc rw - proc proc rw
45 22 0:45 / /mnt/on\040demand rw,relatime shared:9 - autofs systemd-1 rw,fd=51,direct
broken line
"""


def test_parsing() -> None:
    assert parse_mountinfo(MOUNTINFO) == [
        MountEntry(Path("/mnt/kv"), Path("/var/lib/kvfs"), "0:39", 7),
        MountEntry(Path("/mnt/with blank\\and\ttab"), Path("/a b,c"), "0:40"),
    ]


def test_places_that_mount_on_demand() -> None:
    assert find_triggers(MOUNTINFO) == {Path("/mnt/on demand")}


@pytest.mark.parametrize(
    "store", ["/var/lib/kvfs", "/a b,c\\d", "/100%", "/new\nline", "/üñ", "/\udcff", "/x:y@z=1"]
)
def test_a_store_survives_being_a_source(store: str) -> None:
    source = source_of(Path(store))
    assert source.isascii()
    assert source == store or source.startswith("kvfs:")
    assert not set(source) & set(" ,\\\n\t")
    line = f"1 2 0:3 / /m rw - fuse.kvfs {source} rw"
    assert parse_mountinfo(line) == [MountEntry(Path("/m"), Path(store), "0:3")]


def test_places_that_cannot_be_mount_points(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "file").write_bytes(b"")
    os.symlink(tmp_path, tmp_path / "link")
    places = [
        store,
        store / "below",
        tmp_path,
        tmp_path / "link" / "store",
        tmp_path / "file",
        tmp_path / "file" / "x",
    ]
    for place in places:
        with pytest.raises(InvalidInput):
            prepare(place, [store])
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_missing_place_is_made(tmp_path: Path) -> None:
    place = prepare(tmp_path / "a" / "b", [tmp_path / "store"])
    assert place == tmp_path / "a" / "b"
    assert place.is_dir()


def test_a_mount_of_another_user_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "entry for /mnt/kv not found in mtab")

    uid = os.getuid() + 1
    monkeypatch.setattr(
        point, "find_mounts", lambda: [MountEntry(Path("/mnt/kv"), Path("/s"), "", uid)]
    )
    monkeypatch.setattr(point, "_user_name", lambda uid: "her")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(
        KvfsError, match=r"^/mnt/kv was mounted by her: unmount it as that user, or"
    ):
        point._unmount(Path("/mnt/kv"), lazy=False)
