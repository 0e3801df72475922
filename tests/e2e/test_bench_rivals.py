"""The slow directories of the comparison with rivals, and the comparison, with kvfs alone."""

import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest

from scripts import bench_rivals
from scripts.slow_files import SlowDirectory

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
MIB = 1024 * 1024


def is_mounted(place: Path) -> bool:
    return str(place) in Path("/proc/self/mountinfo").read_text()


def test_a_read_waits_for_its_rate_and_gets_the_bytes(tmp_path: Path) -> None:
    content = os.urandom(4 * MIB)
    found: list[bytes] = []
    with SlowDirectory(tmp_path / "files", tmp_path / "slow", bytes_per_s=0) as slow:
        (slow.mountpoint / "written").write_bytes(content)
        reading = threading.Thread(
            target=lambda: found.append((slow.mountpoint / "written").read_bytes())
        )
        reading.start()
        reading.join(0.5)
        assert reading.is_alive()  # it wants more than a pause saves up, and there is no rate
        slow.set_rate(1e9)
        reading.join(DEADLINE_S)
        assert found == [content]
        assert (slow.files / "written").read_bytes() == content
    assert not is_mounted(tmp_path / "slow")


def test_who_finds_it_idle_waits_for_every_byte(tmp_path: Path) -> None:
    with SlowDirectory(tmp_path / "files", tmp_path / "slow", bytes_per_s=4 * MIB) as slow:
        (slow.files / "one").write_bytes(bytes(MIB))
        for pause_s in (0.0, 0.5):  # the second would save up more than the file has
            time.sleep(pause_s)
            began_s = time.monotonic()
            (slow.mountpoint / "one").read_bytes()
            assert time.monotonic() - began_s > 0.24  # of 0.25


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_server_that_is_ended_leaves_no_mount(tmp_path: Path, is_killed: bool) -> None:
    with SlowDirectory(tmp_path / "files", tmp_path / "slow", bytes_per_s=1e9) as slow:
        assert is_mounted(slow.mountpoint)
        slow.end(is_killed=is_killed)
    assert not is_mounted(tmp_path / "slow")


def test_bursts_come_by_chance_and_the_same_for_all() -> None:
    times_s = bench_rivals.arrivals(1000, 50.0, seed=3)
    assert times_s == bench_rivals.arrivals(1000, 50.0, seed=3) == sorted(times_s)
    assert times_s[0] == 0.0
    assert times_s[-1] == pytest.approx(20.0, rel=0.15)


def test_a_load_that_is_faster_than_the_tiers_ends_the_run() -> None:
    arguments = Namespace(chunks=8, mib=2, mb_per_s=[80.0, 40.0, 24.0])
    payload_bytes = 64 * 16 * MIB
    at_rate_s = payload_bytes / 144e6
    bench_rivals.check({"right": 64, "whole_s": at_rate_s}, "kvfs", 64, arguments)
    with pytest.raises(RuntimeError, match="kvfs: 1024 MiB came in"):
        bench_rivals.check({"right": 64, "whole_s": 0.99 * at_rate_s}, "kvfs", 64, arguments)
    with pytest.raises(RuntimeError, match="kvfs: 63 of 64 requests"):
        bench_rivals.check({"right": 63, "whole_s": at_rate_s}, "kvfs", 64, arguments)


def run_bench(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_rivals.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_comparison_stores_loads_and_reports(tmp_path: Path) -> None:
    words = ["--systems", "kvfs", "--rounds", "1", "--requests", "3", "--chunks", "2"]
    words += ["--mib", "1", "--mb-per-s", "800", "400", "240", "--json"]
    done = run_bench(*words, "--directory", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["systems"]["kvfs"]
    assert found["offline_mb_per_s"][0] > 0
    assert found["bursts"] == {}
    assert list(tmp_path.iterdir()) == []


def test_bursts_need_the_rival_whose_rate_they_come_at() -> None:
    done = run_bench("--systems", "kvfs", "--bursts", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("have lmcache among --systems")


def test_a_burst_is_loaded_as_it_comes_and_reported(tmp_path: Path) -> None:
    words = ["kvfs", tmp_path / "one", "--log", tmp_path / "log", "--requests", "3"]
    command = [sys.executable, ROOT / "scripts" / "rival_driver.py", *words]
    done = subprocess.run(
        [*command, "--chunks", "2", "--mib", "1"],
        input='["store"]\n["load", [0.0, 0.01, 0.03]]\n["load", [0.0]]\n',
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ready, stored, three, one = map(json.loads, done.stdout.splitlines())
    assert (ready, stored) == ("ready", None)
    assert three["right"] == len(three["took_s"]) == 3
    assert three["whole_s"] > 0.03
    assert one["right"] == 1
    assert bench_rivals.summary(bench_rivals.Measured([], {3: [three["took_s"]]}), 3)["mean_s"] > 0
