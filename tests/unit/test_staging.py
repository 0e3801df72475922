"""Slots: page-aligned, bounded, and always given back."""

import threading

import pytest

from gpu_bridge.staging import StagingPool, slots_for
from kvfs.config import PAGE_BYTES
from kvfs.errors import InvalidInput


def test_slots_are_whole_pages_that_do_not_overlap() -> None:
    pool = StagingPool(3, 2 * PAGE_BYTES, pin=False)
    with pool.slot(0) as a, pool.slot(0) as b, pool.slot(0) as c:
        assert a is not None and b is not None and c is not None
        for number, slot in enumerate((a, b, c), 1):
            assert slot.tensor.data_ptr() % PAGE_BYTES == 0
            slot.memory[:] = bytes([number]) * 2 * PAGE_BYTES
        assert [int(s.tensor.float().mean()) for s in (a, b, c)] == [1, 2, 3]


def test_no_slot_is_a_value_and_not_an_error() -> None:
    pool = StagingPool(1, PAGE_BYTES, pin=False)
    with pool.slot(0) as first:
        assert first is not None
        with pool.slot(0.01) as second:
            assert second is None
    assert pool.free == 1


def test_a_slot_comes_back_when_its_holder_fails() -> None:
    pool = StagingPool(1, PAGE_BYTES, pin=False)
    for error in (OSError, MemoryError, KeyboardInterrupt):
        with pytest.raises(error), pool.slot(0):
            raise error
        assert pool.free == 1


def test_spare_slots_stay_for_others() -> None:
    pool = StagingPool(2, PAGE_BYTES, pin=False)
    with pool.slot(0, spare=1) as save:
        assert save is not None
        with pool.slot(0, spare=1) as second_save:
            assert second_save is None
        with pool.slot(0) as load:
            assert load is not None


def test_who_waits_gets_the_slot_that_comes_back() -> None:
    pool = StagingPool(1, PAGE_BYTES, pin=False)
    got = threading.Event()

    def wait() -> None:
        with pool.slot(30) as slot:
            if slot is not None:
                got.set()

    with pool.slot(0):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not got.is_set()
    thread.join(30)
    assert got.is_set()
    assert pool.free == 1


def test_a_pool_has_the_usual_size_but_a_slot_for_each_thread() -> None:
    assert slots_for(None, 64, 16, threads=2) == 4
    assert slots_for(None, 64, 60, threads=4) == 5
    assert slots_for(48, 1000, 16, threads=9) == 3


def test_too_little_staging_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidInput, match=r"kvfs\.staging_bytes: 20 bytes .* at least 32"):
        slots_for(20, 1000, 16, threads=1)
