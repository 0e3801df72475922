"""Records that say wrongly that nobody holds a blob: its file stays, and no start ends at them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.meta import records
from kvfs.meta.lmdb import LmdbEngine
from kvfs.meta.records import State
from tests.contract.meta_words import T0, digest, publication


@pytest.fixture
def engine(tmp_path: Path) -> LmdbEngine:
    return LmdbEngine.open(tmp_path, now_ns=T0)


def doom(engine: LmdbEngine, *numbers: int) -> None:
    with engine._writing() as txn:
        for number in numbers:
            txn.put(digest(number), b"", db=engine._tables.doomed)


def dooms(engine: LmdbEngine) -> list[bytes]:
    with engine._reading() as view:
        return list(view.keys(view.tables.doomed, b""))


@pytest.mark.parametrize("drop", [lambda e: e.recover(), lambda e: e.bury([digest(1), digest(2)])])
def test_a_wrong_doom_takes_nothing_and_goes(
    engine: LmdbEngine, drop: Callable[[LmdbEngine], object]
) -> None:
    engine.publish([publication(1, b"f")], T0)
    doom(engine, 1, 2)  # of what a file holds, and of what nobody knows
    assert engine.doomed(9) == []
    drop(engine)
    assert dooms(engine) == []
    [blob] = engine.blobs([digest(1)])
    assert blob is not None and blob.references == 1
    assert engine.usage().blobs == 1
    engine.forget([engine.unlink(1, b"f", T0).ino])
    assert [blob.digest for blob in engine.doomed(9)] == [digest(1)]
    engine.bury([digest(1)])
    assert engine.usage().blobs == 0


def test_totals_that_went_wrong_are_the_nearest_that_a_record_holds() -> None:
    state = State(7, inodes=-1, blobs=-2, size_bytes=2**64, allocated_bytes=[-5, 6])
    read = records.decode_state(records.encode_state(state))
    assert read == State(7, 0, 0, 2**64 - 1, [0, 6])
