"""Uses wait, fall together, and are written in one go."""

import pytest

from kvfs import uses
from kvfs.errors import OutOfSpace
from kvfs.uses import Uses


class Engine:
    """As much of an engine as uses take."""

    def __init__(self) -> None:
        self.written: list[list[tuple[int, int]]] = []
        self.is_full = False

    def restamp(self, stamps: list[tuple[int, int]]) -> None:
        if self.is_full:
            raise OutOfSpace("full")
        self.written.append(stamps)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def waiting(engine: Engine) -> Uses:
    return Uses(engine)  # type: ignore[arg-type]  # as much as it takes


def test_uses_of_one_file_fall_together(engine: Engine, waiting: Uses) -> None:
    waiting.note([5, 6, 5], 100)
    waiting.note([6], 200)
    assert engine.written == []
    waiting.write()
    waiting.write()
    assert engine.written == [[(5, 100), (6, 200)]]


def test_a_newer_stamp_stays(engine: Engine, waiting: Uses) -> None:
    waiting.note([5, 6], 100)
    waiting.forget(5)
    waiting.forget(7)
    waiting.write()
    assert engine.written == [[(6, 99)]]


def test_many_are_written_at_once(
    engine: Engine, waiting: Uses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses, "USES_WAITING_MAX", 3)
    waiting.note([1, 2], 100)
    waiting.note([3], 101)
    waiting.note([4], 102)
    assert engine.written == [[(1, 100), (2, 99), (3, 101)]]


def test_a_full_disk_keeps_nobody_from_reading(engine: Engine, waiting: Uses) -> None:
    engine.is_full = True
    waiting.note([1], 100)
    waiting.write()
    engine.is_full = False
    waiting.note([2], 101)
    waiting.write()
    assert engine.written == [[(2, 101)]]
