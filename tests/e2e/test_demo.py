"""`make run` and `make stop`, as far as they go beyond set-up: the demo shows its first result."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounts import is_mounted

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo.py"


def run_demo(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("demo_model")
def test_the_first_result_and_a_second_run(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    place = ["--store", tmp_path / "store", "--mountpoint", mountpoint]
    try:
        for _ in range(2):
            done = run_demo(*place)
            assert done.returncode == 0, done.stdout + done.stderr
            found = re.findall(r"time to first token, .*?(\d+\.\d+) s", done.stdout)
            computed_s, from_files_s = map(float, found)
            assert 0 < from_files_s < computed_s
            assert "2,048 of 2,048 tokens" in done.stdout
            assert re.search(r"0-2048 +8 chunks", done.stdout)
            assert "make stop" in done.stdout
            assert is_mounted(mountpoint)
            # The warm-up is not left in the store.
            assert len(list(mountpoint.glob("kv/*/*/*.safetensors"))) == 8
    finally:
        stopped = run_demo("--stop", *place)
    assert stopped.returncode == 0, stopped.stderr
    assert not is_mounted(mountpoint)


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    inside = tmp_path / "store" / "mnt"
    done = run_demo("--store", tmp_path / "store", "--mountpoint", inside)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert str(inside) in done.stderr
    assert not is_mounted(inside)
