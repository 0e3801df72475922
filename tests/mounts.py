"""A real `kvfs mount` process for tests: started, watched for warnings, unmounted in any case."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

from mount.point import find_mounts
from tests.processes import KvfsProcess


def is_mounted(mountpoint: Path) -> bool:
    """Say whether a FUSE file system is mounted here, also one whose process is dead."""
    wanted = os.fsencode(os.path.abspath(mountpoint))
    with open("/proc/self/mounts", "rb") as table:
        for line in table:
            _, place, kind = line.split(b" ")[:3]
            if kind.startswith(b"fuse") and _unescaped(place) == wanted:
                return True
    return False


def entries_at(mountpoint: Path) -> int:
    """How many mounts lie on a mount point, one above the other."""
    return sum(entry.mountpoint == mountpoint for entry in find_mounts())


def _unescaped(place: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), place)


class MountProcess(KvfsProcess):
    """A `kvfs mount --foreground` process. Killed, it leaves its mount point, dead."""

    def __init__(
        self, store: Path, mountpoint: Path, arguments: list[str], log: Path, allow: str | None
    ) -> None:
        self.store = store
        self.mountpoint = mountpoint
        if not is_mounted(mountpoint):
            mountpoint.mkdir(parents=True, exist_ok=True)
        super().__init__(["mount", str(mountpoint), "--foreground", *arguments], log, allow)

    def _serves(self) -> bool:
        if not is_mounted(self.mountpoint):
            return False
        try:
            os.stat(self.mountpoint / ".kvfs" / "status.json")
        except OSError:  # the mount of a dead process, which ours is about to replace
            return False
        return True

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
        super().close()


def describe(mount: MountProcess) -> dict[str, object]:
    """What a mount says of itself."""
    status = json.loads((mount.mountpoint / ".kvfs" / "status.json").read_text())
    found: dict[str, object] = status["mount"]
    return found
