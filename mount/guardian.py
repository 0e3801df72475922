"""The program behind `mount.guard`, alone and small: it imports nothing of ours.

    guardian.py PID DESCRIPTOR

Waits until the main thread of its parent PID has ended, and writes to DESCRIPTOR.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2); the kernel's "parent" is the thread that started us
_ENDED = signal.SIGRTMIN


def main(parent: int, descriptor: int) -> None:
    # Whoever stops a whole group of processes means the mount, which then stops us.
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    signal.pthread_sigmask(signal.SIG_BLOCK, {_ENDED, *stopping})
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, _ENDED, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == parent:
        signal.sigwait({_ENDED})
    try:
        os.write(descriptor, b"1")
    except OSError:
        pass  # the connection has gone with the process


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
