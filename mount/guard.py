"""What ends a mount's connection when its process was killed and cannot go.

A process that is killed goes when its last thread has ended. One that is telling the kernel of a
change waits for the lock of a directory, which a program has whose request nobody answers any more:
neither ends, and every user of the mount hangs. So a small process is told by the kernel when the
mount's main thread ends, however that came, and aborts the connection. After a clean end there is
none any more.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mount.control import open_abort

log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("guardian.py")
_STOP_DEADLINE_S = 5.0


@contextlib.contextmanager
def guarded(device: str | None) -> Iterator[None]:
    """Have the connection of a mount aborted, should this process die within the `with` block. Call
    it in the main thread. `device`: the mount's, where it is known."""
    abort_fd = None if device is None else open_abort(device)
    if abort_fd is None:
        log.info("no guard: only root may end the connection of a mount that was killed")
        yield
        return
    process = _start(abort_fd)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait(_STOP_DEADLINE_S)


def _start(abort_fd: int) -> subprocess.Popen[bytes] | None:
    """The guardian; None where no process can be started, without which a mount serves as well.
    Closes the descriptor."""
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _PROGRAM, str(os.getpid()), str(abort_fd)],
            pass_fds=[abort_fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
    except OSError as error:
        log.warning("no guard, should this mount be killed: %s", error)
        return None
    finally:
        os.close(abort_fd)
