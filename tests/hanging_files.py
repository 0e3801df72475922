"""A directory seen through FUSE, by a process that a test may stop: all that touches it then waits.

usage: python -m tests.hanging_files DIRECTORY MOUNTPOINT [SECONDS]

SIGCONT lets it go on. SECONDS: how long each read takes, whatever its size.
"""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pyfuse3
import trio

from scripts.passing_files import Passing

ROOT = Path(__file__).parent.parent


class HangingFiles:
    """A file system whose server can be stopped. Each read takes `read_s`."""

    def __init__(self, root: Path, mountpoint: Path, read_s: float = 0.0) -> None:
        self.root, self.mountpoint = root, mountpoint
        root.mkdir()
        mountpoint.mkdir()
        command = [sys.executable, "-m", "tests.hanging_files", root, mountpoint, str(read_s)]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        subprocess.run(["umount", "-l", self.mountpoint], check=False, timeout=30)
        self._process.kill()
        self._process.wait(30)


def main() -> None:
    directory, mountpoint, *read_s = sys.argv[1:]
    assert stat.S_ISDIR(os.stat(directory).st_mode)
    options = set(pyfuse3.default_options) | {"fsname=hanging-files"}
    options.discard("default_permissions")
    pyfuse3.init(Passing(directory, float(read_s[0]) if read_s else 0.0), mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
