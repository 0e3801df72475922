"""What the comparison of tiers refuses to compare."""

from pathlib import Path
from typing import Any

import pytest

from scripts import bench_tiers_on_mount as bench


class ForgetfulDriver:
    """One chunk of four comes back with other bytes."""

    def ask(self, command: str, directory: Path) -> dict[str, Any]:
        return {"seconds": 1.0} if command == "write" else {"seconds": 1.0, "right": 3}


def test_bytes_other_than_those_written_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "drop_page_cache", lambda: True)
    monkeypatch.setattr(bench, "UNCHANGED_S", 0.0)
    with pytest.raises(RuntimeError, match="3 of 4 chunks came back as they were written"):
        list(bench.measure_once(ForgetfulDriver(), tmp_path, chunks=4))
