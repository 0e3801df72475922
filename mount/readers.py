"""Who reads from the mount: processes, whose threads may take turns."""

from collections import OrderedDict
from pathlib import Path

from kvfs.config import PREFETCH_READERS_MAX

_PROC = Path("/proc")
_FIELD = b"\nTgid:"
_STATUS_BYTES = 512  # of which the field is near the start


class Readers:
    """Remembers which process a thread belongs to, of the threads that asked last."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._processes: OrderedDict[int, int] = OrderedDict()

    def process_of(self, thread: int) -> int | None:
        """The process of a thread, as the kernel numbers them for the mount; None for one outside
        of the mount's PID namespace. One that is hidden or has gone is a process by itself."""
        if thread == 0:
            return None
        process = self._processes.pop(thread, None)
        if process is None:
            process = self._find(thread)
        self._processes[thread] = process
        if len(self._processes) > PREFETCH_READERS_MAX:
            self._processes.popitem(last=False)
        return process

    def _find(self, thread: int) -> int:
        try:
            with open(self._proc / str(thread) / "status", "rb", buffering=0) as status:
                return int(status.read(_STATUS_BYTES).partition(_FIELD)[2].split(None, 1)[0])
        except (OSError, IndexError, ValueError):
            return thread
