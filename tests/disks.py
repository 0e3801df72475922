"""File systems that are soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of so much ("4m") at a directory, which is made where it is missing; skips where
    nobody may mount one."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    path.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True, timeout=30
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, timeout=30)
