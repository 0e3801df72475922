"""A process for each node that calls statfs, ls, stat and open all the time, and how long each call
took at most. A process of its own, so that nothing but the call itself is measured."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from ctypes import Array, c_double
from pathlib import Path

OPERATIONS = ("statfs", "ls", "stat", "open")
PAUSE_S = 0.1
PHASES_MAX = 64
_JOIN_S = 10.0
_COUNT = len(OPERATIONS)
_SINCE = PHASES_MAX * _COUNT  # where it says which call is under way: since when, or 0; and which
_PHASE = _SINCE + 2


class Probe:
    """One node's. `local` is a file whose bytes the node has, `other` one that another node has."""

    def __init__(self, mountpoint: Path, directory: str, local: str, other: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._board: Array[c_double] = context.RawArray(c_double, _PHASE + 1)
        self._process = context.Process(
            target=_probe, args=(self._board, mountpoint, directory, local, other), daemon=True
        )
        self._process.start()

    def enter(self, phase: int) -> None:
        """From now on calls count for another phase."""
        assert phase < PHASES_MAX
        self._board[_PHASE] = phase

    def longest_s(self, phase: int) -> dict[str, float]:
        """The longest call of each kind that ended or began in a phase, or still lasts."""
        found = {name: self._board[phase * _COUNT + index] for index, name in enumerate(OPERATIONS)}
        since_s = self._board[_SINCE]
        if since_s and int(self._board[_PHASE]) == phase:
            name = OPERATIONS[int(self._board[_SINCE + 1])]
            found[name] = max(found[name], time.monotonic() - since_s)
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(_JOIN_S)


def _probe(
    board: "Array[c_double]", mountpoint: Path, directory: str, local: str, other: str
) -> None:
    root = mountpoint / directory
    calls: Sequence[Callable[[], object]] = (
        lambda: os.statvfs(mountpoint),
        lambda: os.listdir(root),
        lambda: os.stat(root / other),
        (root / local).read_bytes,
    )
    while True:
        for index, call in enumerate(calls):
            began_in = int(board[_PHASE])
            board[_SINCE + 1] = index
            began_s = time.monotonic()
            board[_SINCE] = began_s
            try:
                call()
            except OSError:
                pass  # a dead mount answers at once; what readers see is counted elsewhere
            took_s = time.monotonic() - began_s
            board[_SINCE] = 0.0
            for phase in {began_in, int(board[_PHASE])}:
                place = phase * _COUNT + index
                board[place] = max(board[place], took_s)
        time.sleep(PAUSE_S)
