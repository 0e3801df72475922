"""Faults in a cluster that is written and read all the while. `scripts/fault_cluster.py` has all of
them, longer, and says how long recovery takes."""

import os
from pathlib import Path

import pytest

from scripts.fault_cluster import PROMISED_S, Report, run

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]
FAULTS = ("kill", "stop", "cable", "server-empty", "full", "fuzz")
SECONDS = 2.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    base: Path = tmp_path_factory.mktemp("faults")
    found = run(base, ("none", *FAULTS), count=3, seconds=SECONDS, seed=7, calm_s=0.5)
    return {report.fault: report for report in found}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_wrong_or_lost_and_all_is_well_again(
    reports: dict[str, Report], fault: str
) -> None:
    report = reports[fault]
    assert (report.wrong, report.lost, report.recovery_s is None) == (0, 0, False), report
    assert report.reads > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_statfs_and_ls_do_not_hang(reports: dict[str, Report], fault: str) -> None:
    """Less than 2 s is what a node promises where it has a processor to run on. How long it waits
    for one here shows without a fault; with one, the others have more to do."""
    for name in ("statfs", "ls"):
        limit_s = PROMISED_S + 5 * reports["none"].longest_s[name]
        assert reports[fault].longest_s[name] < limit_s, (name, reports["none"].longest_s)
