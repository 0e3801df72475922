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
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvfs.config import CLIENT_START_DEADLINE_S, IDLE_EXIT_S
from kvfs.errors import OWNED_ELSEWHERE, Unavailable

Connection = TypeVar("Connection")

_NODE_NEEDS = ("lmdb", "trio")


def node_command() -> list[str] | None:
    """How the command `kvfs` runs on this machine with all that a node needs; None when neither
    this environment has it nor the PATH names one."""
    if all(importlib.util.find_spec(name) is not None for name in _NODE_NEEDS):
        return [sys.executable, "-m", "kvfs"]
    found = shutil.which("kvfs")
    return None if found is None else [found]


def start_node(store: Path, connect: Callable[[], Connection]) -> Connection:
    """Start a node and connect to it. Of several processes that do so at once one wins the store's
    lock; all connect to its node.

    Raises `Unavailable` with what the node said when it could not run.
    """
    command = node_command()
    if command is None:
        raise Unavailable(
            f"{store}: no node serves it, and none can be started: this environment lacks"
            f" {' or '.join(_NODE_NEEDS)}, and there is no kvfs on the PATH"
        )
    command += ["serve", "--store", os.fspath(store), "--idle-exit", str(IDLE_EXIT_S)]
    said = os.memfd_create("kvfs-serve-stderr")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        end_s = time.monotonic() + CLIENT_START_DEADLINE_S
        while True:
            code = process.poll()  # before we look: a winner of the lock may serve by now
            try:
                return connect()
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > end_s:
                    process.kill()
                    raise
            if code not in (None, 0):
                lines = os.pread(said, 65_536, 0).decode("utf-8", "replace").splitlines()
                if not any(OWNED_ELSEWHERE in line for line in lines):
                    reason = lines[-1].removeprefix("kvfs serve: ") if lines else f"code {code}"
                    raise Unavailable(f"{store}: no node could be started: {reason}")
            time.sleep(0.02)
    finally:
        os.close(said)
