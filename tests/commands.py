"""The `kvfs` command as a person runs it; its output is piped, so it must be plain."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DEADLINE_S = 60


def kvfs(
    *words: object, store: Path | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    where = [] if store is None else ["--store", str(store)]
    return subprocess.run(
        [sys.executable, "-m", "kvfs", *map(str, words), *where],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=cwd,
    )


def kvfs_json(*words: str | Path, store: Path | None = None, code: int = 0) -> Any:
    """What it prints as JSON; it must say nothing else."""
    ran = kvfs(*words, "--json", store=store)
    assert (ran.returncode, ran.stderr) == (code, "")
    return json.loads(ran.stdout)


def kvfs_text(*words: str | Path, store: Path | None = None, code: int = 0) -> str:
    """What it prints for a person; it must say nothing else."""
    ran = kvfs(*words, store=store)
    assert (ran.returncode, ran.stderr) == (code, "")
    assert "\x1b" not in ran.stdout
    return ran.stdout
