"""A real `kvfs mount` process for tests: started, watched for warnings, unmounted in any case."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0
_UNEXPECTED = re.compile(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b")


def is_mounted(mountpoint: Path) -> bool:
    """Say whether a FUSE file system is mounted here, also one whose process is dead."""
    wanted = os.fsencode(os.path.abspath(mountpoint))
    with open("/proc/self/mounts", "rb") as table:
        for line in table:
            _, place, kind = line.split(b" ")[:3]
            if kind.startswith(b"fuse") and _unescaped(place) == wanted:
                return True
    return False


def _unescaped(place: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), place)


class MountProcess:
    """A `kvfs mount --foreground` process. `allow`: a pattern of log lines that may be warnings."""

    def __init__(
        self, store: Path, mountpoint: Path, arguments: list[str], log: Path, allow: str | None
    ) -> None:
        self.store = store
        self.mountpoint = mountpoint
        self.log = log
        self._allow = allow
        if not is_mounted(mountpoint):
            mountpoint.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvfs", "mount", str(mountpoint), "--foreground"]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_serving(self) -> None:
        """Return when the mount answers; AssertionError with its log when it does not in time."""
        end_s = time.monotonic() + START_DEADLINE_S
        while not self._serves():
            assert self._process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < end_s, self.log.read_text(errors="replace")
            time.sleep(0.02)

    def _serves(self) -> bool:
        if not is_mounted(self.mountpoint):
            return False
        try:
            os.stat(self.mountpoint / ".kvfs" / "status.json")
        except OSError:  # the mount of a dead process, which ours is about to replace
            return False
        return True

    def kill(self) -> None:
        """kill -9, as a crash does. The mount point stays, dead."""
        self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; the exit code. Kills, and fails, when it does not leave in time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return self._process.returncode

    def close(self) -> None:
        """Stop, unmount what is left, and fail on log lines that nobody expected."""
        was_killed = self._process.poll() == -signal.SIGKILL
        try:
            self.stop()
        finally:
            left_mounted = is_mounted(self.mountpoint)
            if left_mounted:
                subprocess.run(["umount", "-l", self.mountpoint], check=False, timeout=30)
        assert was_killed or not left_mounted, f"{self.mountpoint} was still mounted after SIGTERM"
        for line in self.log.read_text(errors="replace").splitlines():
            if _UNEXPECTED.search(line) and not (self._allow and re.search(self._allow, line)):
                raise AssertionError(f"unexpected in the mount's log: {line}")
