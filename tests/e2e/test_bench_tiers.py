"""The comparison of ways to read from several tiers runs, and finds no wrong byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_tiers.py"
QUICK = ("--rounds", "1", "--seconds", "0.1", "--chunk-mib", "0.25")

pytestmark = pytest.mark.e2e


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *QUICK, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_scenario_gives_its_rows(tmp_path: Path) -> None:
    done = run("--json", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {
        (row["scenario"], row["side"]): row for row in map(json.loads, done.stdout.splitlines())
    }
    for scenario in ("steady", "changing"):
        for side in ("kvfs", "static split", "first in list"):
            row = rows[scenario, side]
            assert 0 < row["smallest"] <= row["median"] <= row["largest"]
            assert (row["wrong"], row["lost"]) == (0, 0)
    for key in (("frozen", "kvfs"), ("frozen", "comes back"), ("corrupt", "kvfs")):
        assert (rows[key]["wrong"], rows[key]["lost"]) == (0, 0)
    assert ("single", "hedged / not") in rows and ("cost", "the transfer's own") in rows
    assert not list(tmp_path.iterdir()), "something is left"


def test_an_unknown_scenario_is_refused() -> None:
    done = run("--only", "steady,nonsense")
    assert done.returncode == 2
    assert "unknown scenario 'nonsense'" in done.stderr
