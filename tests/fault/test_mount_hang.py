"""A disk that hangs: the mount ends all the same, and whoever waits is told."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.shell.doctor.finding import Level
from kvfs.shell.doctor.mounts import check_mounts
from kvfs.shell.locate import Mounted
from mount.point import find_mount
from tests.conftest import StartMount
from tests.mounts import is_mounted
from tests.processes import wait_until

# A mount whose threads hang as on a bad disk, each having said so.
HANGING = """
import sys, threading
from pathlib import Path
from kvfs import checks
from kvfs.settings.words import Config, DirectoryConfig, MountConfig
from mount import content, run

def hang(*arguments):
    Path(sys.argv[4]).touch()
    threading.Event().wait()

if sys.argv[3] == "digest":
    checks.digest_file = hang
else:
    content.OpenBytes._read_cached = lambda self, offset, size: None
    content._read_whole = hang
run.MOUNT_STOP_DEADLINE_S = 0.5
config = Config((DirectoryConfig(Path(sys.argv[1])),), mount=MountConfig(passthrough=False))
sys.exit(run.mount_command(config, Path(sys.argv[2]), True, None))
"""


@pytest.mark.parametrize("where", ["digest", "read"])
def test_a_read_that_hangs_keeps_no_mount(
    start_mount: StartMount, tmp_path: Path, where: str
) -> None:
    first = start_mount()
    (first.mountpoint / "a").write_bytes(b"bytes" * 1000)
    assert first.stop() == 0
    hangs = tmp_path / "hangs"
    words = [str(first.store), str(first.mountpoint), where, str(hangs)]
    process = subprocess.Popen([sys.executable, "-c", HANGING, *words], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: is_mounted(first.mountpoint))
        reader = subprocess.Popen(["cat", first.mountpoint / "a"], stderr=subprocess.PIPE)
        wait_until(hangs.exists)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0, said
        assert b"are given up" in said
        assert not is_mounted(first.mountpoint)
        told = reader.communicate(timeout=30)[1].decode()
        assert any(os.strerror(code) in told for code in (errno.ECONNABORTED, errno.ENOTCONN)), told
    finally:
        process.kill()
        process.wait(30)
        if is_mounted(first.mountpoint):
            subprocess.run(["umount", "-l", first.mountpoint], check=False)


def found_of(mountpoint: Path, store: Path) -> tuple[Level, str]:
    [finding] = check_mounts(lambda: [Mounted(mountpoint, store)])
    return finding.level, finding.found


def test_doctor_asks_the_mount_and_not_the_kernels_cache(start_mount: StartMount) -> None:
    mount = start_mount()
    os.stat(mount.mountpoint)  # the kernel has it for a minute
    assert found_of(mount.mountpoint, mount.store) == (Level.OK, f"serves {mount.store}")
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        os.stat(mount.mountpoint)
        level, found = found_of(mount.mountpoint, mount.store)
        assert level is Level.FAIL and "no answer" in found
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    mount.kill()
    assert find_mount(mount.mountpoint) is not None
    assert found_of(mount.mountpoint, mount.store) == (Level.FAIL, "its node has died")
