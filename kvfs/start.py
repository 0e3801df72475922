"""Starting a node for a store that has none: `kvfs serve`, which leaves some time after its last
client.

An engine's environment need not have what a node needs; then the `kvfs` command that a person finds
on the PATH serves, from an environment of its own.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvfs.config import CLIENT_START_INTERVAL_S, IDLE_EXIT_S
from kvfs.errors import OwnedElsewhere, Unavailable

Connected = TypeVar("Connected")

_NODE_NEEDS = ("lmdb", "trio")
_POLL_S = 0.02
_SAID_BYTES_MAX = 65_536


def node_command() -> list[str] | None:
    """How the command `kvfs` runs on this machine with all that a node needs; None when neither
    this environment has it nor the PATH names one."""
    if all(importlib.util.find_spec(name) is not None for name in _NODE_NEEDS):
        return [sys.executable, "-m", "kvfs"]
    found = shutil.which("kvfs")
    return None if found is None else [found]


class NodeStarter:
    """Starts a node for one store, and waits for it as long as a caller has time.

    A node may take minutes before it serves: after a crash of the machine it reads all chunk
    headers, and one that were killed meanwhile would begin again. So it is left to itself, and
    whoever comes later waits for the same one.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._child: _Child | None = None

    def close(self) -> None:
        """Forget a node that was started; it stays."""
        if self._child is not None:
            self._child.forget()
            self._child = None

    def connect(self, connect: Callable[[], Connected], end_s: float) -> Connected:
        """Start a node, unless one is on its way, and connect to it. Of several processes that do
        so at once one wins the store's lock; all connect to its node.

        Raises `Unavailable` at the deadline, and with what the node said when it could not run.
        """
        if self._child is None or self._child.is_over():
            self.close()
            self._child = _Child(self._command())
        while True:
            failure = self._child.failure()  # before we look: a winner of the lock may serve by now
            try:
                return connect()
            except (FileNotFoundError, ConnectionRefusedError):
                if failure is not None:
                    self.close()
                    raise Unavailable(
                        f"{self._store}: no node could be started: {failure}"
                    ) from None
                if time.monotonic() >= end_s:
                    raise Unavailable(
                        f"{self._store}: {self._child.delay()}; after a crash of the machine"
                        f" a node first rebuilds its names from all chunk files, which may take"
                        f" minutes. Try again; {self._store}/node.log says more"
                    ) from None
            time.sleep(_POLL_S)

    def _command(self) -> list[str]:
        command = node_command()
        if command is None:
            raise Unavailable(
                f"{self._store}: no node serves it, and none can be started: this environment lacks"
                f" {' or '.join(_NODE_NEEDS)}, and there is no kvfs on the PATH"
            )
        idle_s = str(IDLE_EXIT_S)
        return [*command, "serve", "--store", os.fspath(self._store), "--idle-exit", idle_s]


class _Child:
    """A process that is to become the node, and what it says of why it cannot."""

    def __init__(self, command: Sequence[str]) -> None:
        self._began_s = time.monotonic()
        self._said = os.memfd_create("kvfs-serve-stderr")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._said)
            raise

    def forget(self) -> None:
        os.close(self._said)

    def is_over(self) -> bool:
        """Whether it has ended, and another may be started. One that found the store owned is not
        followed at once: who owns it may rebuild for minutes before it serves."""
        if self._process.poll() is None:
            return False
        is_early = time.monotonic() < self._began_s + CLIENT_START_INTERVAL_S
        return not (is_early and self._was_too_late())

    def failure(self) -> str | None:
        """Why it could not serve; None while it may, and when another node owns the store."""
        code = self._process.poll()
        if code in (None, 0) or self._was_too_late():
            return None
        lines = self._lines()
        return lines[-1].removeprefix("kvfs serve: ") if lines else f"code {code}"

    def delay(self) -> str:
        """Why nobody can connect yet."""
        if self._was_too_late():
            return "another node has it, which still starts, or whose socket was removed"
        return "its node is still starting"

    def _was_too_late(self) -> bool:
        return any(OwnedElsewhere.words in line for line in self._lines())

    def _lines(self) -> list[str]:
        return os.pread(self._said, _SAID_BYTES_MAX, 0).decode("utf-8", "replace").splitlines()
