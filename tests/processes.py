"""Real kvfs processes for tests: started, watched for warnings, and always gone afterwards."""

import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from kvfs.client import Client
from kvfs.errors import Unavailable

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 20.0
_UNEXPECTED = re.compile(r"\b(WARNING|ERROR|CRITICAL|Traceback)\b")


def wait_until(condition: Callable[[], bool], deadline_s: float = 15.0) -> None:
    """Poll until true; AssertionError at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "condition not reached in time"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pid_of(store: Path) -> int:
    """The process that owns a store."""
    with Client(store) as client:
        return int(client.status()["pid"])


class KvfsProcess(ABC):
    """A `kvfs` process with its log. `allow` is a pattern of log lines that its test expects."""

    def __init__(self, arguments: Sequence[str], log: Path, allow: str | None) -> None:
        self.log = log
        self._allow = allow
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvfs", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @abstractmethod
    def _serves(self) -> bool: ...

    def wait_serving(self) -> None:
        """Return when it serves; AssertionError with its log when it does not in time."""
        end_s = time.monotonic() + START_DEADLINE_S
        while not self._serves():
            assert self._process.poll() is None, self.log.read_text(errors="replace")
            assert time.monotonic() < end_s, self.log.read_text(errors="replace")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9, as a crash does."""
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
        """Stop, and fail on log lines that nobody expected."""
        self.stop()
        for line in self.log.read_text(errors="replace").splitlines():
            if _UNEXPECTED.search(line) and not (self._allow and re.search(self._allow, line)):
                raise AssertionError(f"unexpected in {self.log.name}: {line}")


class NodeProcess(KvfsProcess):
    """A `kvfs serve` process that serves."""

    def __init__(self, store: Path, arguments: list[str], log: Path, allow: str | None) -> None:
        super().__init__(["serve", *arguments], log, allow)
        self.store = store
        try:
            self.wait_serving()
        except BaseException:
            self.kill()  # nobody else will
            raise

    def _serves(self) -> bool:
        try:
            with Client(self.store) as client:
                return bool(client.status()["pid"] == self.pid)
        except Unavailable:
            return False


def allocated_bytes(path: Path) -> int:
    """What `du` counts below a directory, itself included."""
    taken = {}  # by file, which may have several names
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            status = os.lstat(os.path.join(folder, name))
            taken[status.st_ino] = status.st_blocks * 512
    return sum(taken.values())
