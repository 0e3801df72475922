"""A mount for the length of a `with` block, which can also be killed: what scripts share."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mount.point import find_mounts

ROOT = Path(__file__).parent.parent
SERVING_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0


class MountRig:
    """A `kvfs mount --foreground` process. Its log lies beside the store; RuntimeErrors end with
    the end of it."""

    def __init__(
        self, store: Path, mountpoint: Path, *, passthrough: bool = True, words: Sequence[str] = ()
    ) -> None:
        self.store = store
        self.mountpoint = mountpoint
        self.log = Path(f"{store}.log")
        mount = ["mount", str(mountpoint), "--store", str(store), "--foreground", *words]
        if not passthrough:
            mount += ["-o", "no_passthrough"]
        self._command = [sys.executable, "-m", "kvfs", *mount]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Mount, and return when it serves. A dead mount at the place is replaced."""
        self.launch()
        assert self._process is not None
        end_s = time.monotonic() + SERVING_DEADLINE_S
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > end_s:
                said = self.log.read_text(errors="replace")
                raise RuntimeError(f"kvfs mount does not serve:\n{said[-3000:]}")
            time.sleep(0.01)

    def launch(self) -> None:
        """Start the process, and wait for nothing."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)

    def _serves(self) -> bool:
        if self.count_entries() == 0:
            return False
        try:
            status = (self.mountpoint / ".kvfs" / "status.json").read_text()
        except OSError:  # of a dead process, which ours is about to replace
            return False
        return f'"pid": {self.pid}' in status

    def count_entries(self) -> int:
        """How many mounts there are at the place, dead ones included."""
        place = Path(os.path.realpath(self.mountpoint.parent)) / self.mountpoint.name
        return sum(entry.mountpoint == place for entry in find_mounts())

    def kill(self) -> None:
        """kill -9, as a crash does; the mount point stays, dead."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; the exit code. Nothing is mounted afterwards."""
        code = 0
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            try:
                code = self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                code = -signal.SIGKILL
        while self.count_entries():
            subprocess.run(["umount", "-l", self.mountpoint], check=True, timeout=30)
        return code

    def cpu_s(self) -> float:
        """Seconds of processor that the process has used so far, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def mounted(
    scratch: Path, name: str = "kvfs", *, passthrough: bool = True, words: Sequence[str] = ()
) -> Iterator[MountRig]:
    """A fresh store and its mount, both below `scratch` and named after `name`."""
    mountpoint = scratch / f"{name}-mnt"
    mountpoint.mkdir()
    rig = MountRig(scratch / f"{name}-store", mountpoint, passthrough=passthrough, words=words)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@contextmanager
def fresh_place(directory: Path | None) -> Iterator[Path]:
    """An empty directory below `directory`, else in a mount of its own; gone afterwards."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvfs-") as scratch:
        if directory is not None:
            yield Path(scratch)
            return
        with mounted(Path(scratch)) as rig:
            place = rig.mountpoint / "place"
            place.mkdir()
            yield place
