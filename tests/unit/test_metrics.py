"""What Prometheus reads of a node, and what `kvfs top` makes of two looks at it."""

import re
from typing import Any

import pytest

from kvfs.metrics import metrics_text
from kvfs.shell.top import rates

_LINE = re.compile(r'kvfs_[a-z_]+(\{[a-z]+="(?:[^"\\]|\\.)*"\})? -?[0-9.e+-]+')


def status(tiering: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    directory = {
        "present": True, "path": '/a "b"\\\n', "used_bytes": 1, "room_bytes": 2,
        "disk_free_bytes": 3, "staging_bytes": 0,
    }  # fmt: skip
    return {
        "clients": 1, "files": 2, "blobs": 3, "size_bytes": 4, "used_bytes": 5,
        "started_ns": 10**9, "now_ns": 3 * 10**9, "counters": {"lookups": 10, "opens": 4},
        "directories": [directory, {"present": False, "index": 1}], "tiering": tiering,
        "mount": None, **fields,
    }  # fmt: skip


TIER = {
    "name": "scratch", "health": "up", "blobs": 1, "size_bytes": 2, "free_bytes": None,
    "in_flight": 0, "read_bytes_per_s": 7, "put_bytes_per_s": 0, "expected_bytes_per_s": 1.5e9,
    "latency_s": 0.001, "reads_wanted": 2, "hits": 3, "misses": 0, "read_bytes": 9, "puts": 1,
    "put_bytes": 2, "failures": 0, "stalls": 0, "corrupt": 0, "hedges_won": 0, "hedges_lost": 1,
}  # fmt: skip
TIERING = {
    "tiers": [TIER],
    "behind": {
        "waiting": 1, "copied_files": 2, "copied_bytes": 3, "dropped_files": 4, "demoted_files": 5,
    },
    "reading": {"under_way": 0, "brought_files": 1, "brought_bytes": 2, "failed_files": 0},
    "evicted": {"blobs": 1, "bytes": 2},
}  # fmt: skip


def test_each_line_is_of_the_format_and_each_metric_has_one_type() -> None:
    text = metrics_text(status(TIERING))
    assert text.endswith("\n")
    lines = text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(_LINE.fullmatch(line) for line in samples), samples
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(typed) == len(set(typed))
    assert {re.split(r"[{ ]", line)[0] for line in samples} == set(typed)
    assert "kvfs_lookups_total 10" in samples
    assert 'kvfs_tier_hits_total{tier="scratch"} 3' in samples
    assert r'kvfs_directory_room_bytes{directory="/a \"b\"\\\n"} 2' in samples
    assert not any("free_bytes{tier" in line for line in samples)  # nobody knows it


def test_a_mount_says_what_is_open_and_what_waits() -> None:
    mount = {
        "reads": "passthrough", "why_not_passthrough": None, "open_in_passthrough": 1,
        "open_in_python": 2, "unsettled_files": 3, "unsettled_bytes": 4, "unsettled_why": None,
    }  # fmt: skip
    samples = metrics_text(status(mount=mount)).splitlines()
    assert "kvfs_mount_unsettled_bytes 4" in samples
    assert all(_LINE.fullmatch(line) for line in samples if not line.startswith("#"))
    assert "kvfs_mount" not in metrics_text(status())


def test_a_node_without_tiers_says_nothing_of_them() -> None:
    assert "tier" not in metrics_text(status())


def test_rates_are_of_the_time_between_two_looks() -> None:
    later = status(now_ns=5 * 10**9, counters={"lookups": 30, "opens": 4})
    assert rates(status(), later) == {"lookups": pytest.approx(10), "opens": 0}


def test_a_node_that_was_started_anew_counts_from_its_start() -> None:
    anew = status(started_ns=4 * 10**9, now_ns=6 * 10**9, counters={"lookups": 4, "opens": 0})
    assert rates(status(), anew) == {"lookups": pytest.approx(2), "opens": 0}
