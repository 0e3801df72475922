"""POSIX, random calls on a file's bytes against a model in memory: a short run of the script."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.exercise_mount import CALLS, Exercised, Mismatch, exercise


@pytest.fixture
def directory(ground: str) -> Iterator[Path]:
    yield Path.cwd()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_on_two_files(directory: Path, seed: int) -> None:
    counts = exercise(directory, seed, operations=1500, files=2)
    assert set(CALLS) <= set(counts)


def test_a_wrong_byte_is_found_and_told(directory: Path) -> None:
    file = Exercised(directory / "a", random.Random(1), 100_000, keeps_versions=False)
    while len(file.content) < 1000:
        file.do_write()
    file.content[500] ^= 1
    with pytest.raises(Mismatch, match=r"byte 500 is .* 1 differ"):
        file.do_read_anew()
    file.content[500] ^= 1
    file.finish()
