"""The patched pyfuse3 and `mount.passthrough` against the kernel, without the rest of the mount."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "passthrough_probe.py"
STOP_DEADLINE_S = 20.0
CANNOT = 3
BYTES = os.urandom(1 << 20) + b"not a multiple of a page"


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    path.write_bytes(BYTES)
    return path


@pytest.fixture
def shown(tmp_path: Path, backing: Path) -> Iterator[Path]:
    """The file as the mount shows it."""
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(mountpoint), str(backing)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if answer != "ready":
        assert process.wait(STOP_DEADLINE_S) == CANNOT
        process.stdout.close()
        pytest.skip(f"no passthrough here: {answer}")
    try:
        yield mountpoint / "file"
    finally:
        subprocess.run(["umount", mountpoint], check=True, timeout=STOP_DEADLINE_S)
        assert process.wait(STOP_DEADLINE_S) == 0
        assert process.stdout.read() == ""
        process.stdout.close()


def test_reads_come_from_the_backing_file(shown: Path) -> None:
    assert shown.read_bytes() == BYTES
    fd = os.open(shown, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == BYTES
    os.close(fd)


def test_writes_go_to_the_backing_file(shown: Path, backing: Path) -> None:
    fd = os.open(shown, os.O_RDWR)
    assert os.pwrite(fd, b"by write", 5000) == 8
    with mmap.mmap(fd, 0) as mapped:
        mapped[9000:9010] = b"by mapping"
    assert os.pwrite(fd, b"longer", len(BYTES)) == 6
    os.close(fd)
    stored = backing.read_bytes()
    expected = bytearray(BYTES + b"longer")
    expected[5000:5008] = b"by write"
    expected[9000:9010] = b"by mapping"
    assert stored == expected
    assert os.stat(shown).st_size == len(expected)


def test_opens_at_the_same_time_share_an_id(shown: Path) -> None:
    """Two ids for one inode would be EIO; the next round of opens gets a new one."""
    for _ in range(3):
        fds = [os.open(shown, flags) for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY)]
        assert os.pread(fds[0], 100, 1) == BYTES[1:101]
        for fd in fds:
            os.close(fd)


def test_an_open_file_outlives_its_backing_name(shown: Path, backing: Path) -> None:
    fd = os.open(shown, os.O_RDONLY)
    backing.rename(backing.with_name("elsewhere"))
    assert os.pread(fd, len(BYTES), 0) == BYTES
    backing.with_name("elsewhere").unlink()
    assert os.pread(fd, len(BYTES), 0) == BYTES
    os.close(fd)
    backing.write_bytes(b"others")
    assert shown.read_bytes() == b"others"
