"""The process that holds a store, answering or not, as the kernel's list of locks has it."""

import os
from pathlib import Path

from kvfs.home import STORE_MARK

_LOCKS = Path("/proc/locks")


def describe_holder(store: Path) -> str:
    """It in words, to be put behind its store, with what to do about one that is stopped; empty
    where it is not to be seen: in another PID namespace, on another machine, or gone."""
    pid = _pid_of_lock(store / STORE_MARK)
    state = "" if pid is None else process_state(pid)
    if not state:
        return ""
    stopped = f", which is stopped: kill -CONT {pid}" if state in ("T", "t") else ""
    return f" (process {pid}{stopped})"


def process_state(pid: int) -> str:
    """Of a process's main thread, as in proc(5); empty when that is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _pid_of_lock(file: Path) -> int | None:
    try:
        status = os.stat(file)
        lines = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:  # 1: FLOCK  ADVISORY  WRITE 708 fe:00:4284457 0 EOF
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[3:6:2] == ["WRITE", place] and fields[4].isdigit():
            return int(fields[4])
    return None
