"""Runs a program that is told to end when the thread that started it has ended, however it ended.

    with_parent.py PARENT PROGRAM [ARGUMENT ...]

PARENT is the process of that thread. The program takes the place of this one, with its number.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def main(parent: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == parent:  # else it ended before it could be asked for
        os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
