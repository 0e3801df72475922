"""A node for the length of a `with` block: what benchmarks share."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.client import Client
from kvfs.errors import Unavailable

ROOT = Path(__file__).parent.parent
NODE_DEADLINE_S = 30.0


@contextmanager
def node_of(store: Path) -> Iterator[None]:
    """`kvfs serve` for the length of the block. RuntimeError with the end of its log, which lies
    beside the store, when it does not answer."""
    log_file = Path(f"{store}.log")
    command = [sys.executable, "-m", "kvfs", "serve", "--store", str(store)]
    with (
        open(log_file, "wb") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as node,
    ):
        try:
            if not _answers(store, node):
                said = log_file.read_text(errors="replace")
                raise RuntimeError(f"kvfs serve does not answer:\n{said[-3000:]}")
            yield
        finally:
            node.terminate()
            try:
                node.wait(NODE_DEADLINE_S)
            except subprocess.TimeoutExpired:
                node.kill()


def _answers(store: Path, node: "subprocess.Popen[bytes]") -> bool:
    """Wait until the node answers; False when it does not."""
    end_s = time.monotonic() + NODE_DEADLINE_S
    while node.poll() is None and time.monotonic() < end_s:
        try:
            with Client(store) as client:
                client.status()
                return True
        except Unavailable:
            time.sleep(0.02)
    return False
