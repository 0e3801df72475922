"""Which directories can take nothing, and what is said of them."""

from typing import Any

import pytest

from kvfs.config import GIB, MIB
from kvfs.shell.fullness import full_directory

FINE = {
    "disk_free_bytes": 20 * GIB,
    "min_free_bytes": GIB,
    "max_bytes": None,
    "used_bytes": 2 * GIB,
    "blob_bytes": GIB,
    "trash_bytes": 0,
    "room_bytes": 19 * GIB,
    "refused_bytes": 0,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"disk_free_bytes": GIB // 2, "room_bytes": 0},  # what is stored may go
        {"max_bytes": 2 * GIB, "room_bytes": 0},
        {"refused_bytes": GIB},  # there is room again
    ],
)
def test_a_directory_that_takes_files_is_not_told(change: dict[str, Any]) -> None:
    assert full_directory({**FINE, **change}) is None


@pytest.mark.parametrize(
    ("change", "found", "advice"),
    [
        ({"min_free_bytes": 21 * GIB}, "min_free keeps 21", "lower min_free"),
        ({"disk_free_bytes": 0}, "0 B free and 1", "free the disk"),
        ({"max_bytes": GIB}, "max_bytes is 1", "raise max_bytes"),
        ({"refused_bytes": 2 * MIB, "room_bytes": MIB}, "pinned or in use", "kvfs unpin"),
    ],
)
def test_why_a_directory_takes_nothing(change: dict[str, Any], found: str, advice: str) -> None:
    why = full_directory({**FINE, **change})
    assert why is not None and found in why.found and advice in why.advice
