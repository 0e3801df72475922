"""POSIX, directories: listings while they change, what entries say, and the counts of statfs."""

import os
import stat
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from scripts.exercise_directory import list_while_changing
from tests.e2e.posix_ground import KINDS, make, needs_root, outcome, write

MIB = 1024 * 1024


def test_listings_of_10000_entries_while_they_change(ground: str) -> None:
    found = list_while_changing(Path(), 10_000, seconds=4.0, seed=1)
    assert found.problems == []
    assert found.listings > 0
    assert found.changes > 0


@needs_root
def test_entries_say_what_stat_says(ground: str) -> None:
    for kind in KINDS:
        make(kind, kind)
    os.link("file", "second")
    with os.scandir() as entries:
        for entry in entries:
            status = os.lstat(entry.name)
            assert entry.inode() == status.st_ino, entry.name
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
            assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)
            assert entry.is_file(follow_symlinks=False) == stat.S_ISREG(status.st_mode)


def test_dot_and_dot_dot(ground: str) -> None:
    os.makedirs("d/e")
    assert os.path.samefile("d/e/..", "d")
    assert os.path.samefile("d/e/.", "d/e")
    listed = subprocess.run(["ls", "-ai", "d/e"], capture_output=True, text=True, check=True).stdout
    numbers = {line.split()[1]: int(line.split()[0]) for line in listed.splitlines()}
    assert numbers == {".": os.stat("d/e").st_ino, "..": os.stat("d").st_ino}


def test_link_counts_of_directories(ground: str) -> None:
    os.mkdir("d")
    for number in range(20):
        os.mkdir(f"d/{number}")
    write("d/file", b"")
    assert os.stat("d").st_nlink == 22
    os.rmdir("d/7")
    os.rename("d/8", "8")
    assert os.stat("d").st_nlink == 20


def test_a_deep_tree(ground: str) -> None:
    depth, top = 200, os.open(".", os.O_RDONLY)
    place = os.dup(top)
    for _ in range(depth):
        os.mkdir("deep-directory", dir_fd=place)
        deeper = os.open("deep-directory", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = deeper
    os.close(os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=place))
    found = subprocess.run(["find", ".", "-name", "leaf"], capture_output=True, check=True).stdout
    assert found.count(b"/") == depth + 1
    os.close(place)
    os.close(top)
    subprocess.run(["rm", "-rf", "deep-directory"], check=True)
    assert os.listdir() == []


def test_removing_while_listing(ground: str) -> None:
    for number in range(2000):
        os.mknod(f"{number:04}")
    seen = Counter[str]()
    with os.scandir() as entries:
        for entry in entries:
            seen[entry.name] += 1
            os.unlink(entry.name)
    assert len(seen) == 2000
    assert set(seen.values()) == {1}
    assert os.listdir() == []


# df and du ----------------------------------------------------------------------------------------
def test_statfs(ground: str) -> None:
    room = os.statvfs(".")
    assert room.f_bsize == room.f_frsize == 4096
    assert room.f_namemax == 255
    assert room.f_blocks >= room.f_bfree >= room.f_bavail > 0
    assert room.f_files >= room.f_ffree > 0
    write("a", b"")
    fd = os.open("a", os.O_RDONLY)
    assert os.fstatvfs(fd).f_blocks == room.f_blocks
    os.close(fd)


def test_df_counts_what_is_written_and_removed(ground: str) -> None:
    # Others write on this disk, and remove, too: once of a few times they leave it alone.
    assert any(counts_a_file(f"a{n}") for n in range(5))
    shown = subprocess.run(["df", "-P", "."], capture_output=True, text=True, check=True).stdout
    assert len(shown.splitlines()) == 2


def counts_a_file(name: str) -> bool:
    """Whether df shows some room less, and a file, for a new file of 16 MiB."""
    os.sync()
    before = os.statvfs(".")
    with open(name, "wb") as file:
        file.write(os.urandom(16 * MIB))
        os.fsync(file.fileno())
    after = os.statvfs(".")
    os.unlink(name)
    taken = (before.f_bfree - after.f_bfree) * 4096
    return 8 * MIB < taken < 64 * MIB and after.f_ffree < before.f_ffree


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, MIB])
def test_du_of_a_file(ground: str, size: int) -> None:
    with open("a", "wb") as file:
        file.write(os.urandom(size))
        os.fsync(file.fileno())
    words = ["du", "--apparent-size", "--block-size=1", "a"]
    assert subprocess.run(words, capture_output=True, check=True).stdout.split()[0] == b"%d" % size
    blocks = os.stat("a").st_blocks
    assert size <= blocks * 512 <= size + 4096
    assert os.stat("a").st_blksize == 4096


def test_du_of_a_hole(ground: str) -> None:
    fd = os.open("a", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(fd, MIB)
    os.close(fd)
    # The mount keeps no account of holes: a file counts as long as it is.
    assert os.stat("a").st_blocks == (MIB // 512 if ground == "mount" else 0)


@needs_root
def test_a_removed_working_directory(ground: str) -> None:
    os.mkdir("d")
    place = os.open("d", os.O_RDONLY)
    before = os.getcwd()
    os.chdir("d")
    os.rmdir("../d")
    try:
        assert os.stat(".").st_nlink == 0
        assert outcome(os.getcwd) == "ENOENT"
        assert os.listdir(".") == []
        assert outcome(lambda: os.stat("x")) == "ENOENT"
        assert outcome(lambda: os.mkdir("x")) == "ENOENT"
        assert outcome(lambda: os.stat("..")) in ("ok", "ENOENT")
    finally:
        os.chdir(before)
        os.close(place)
