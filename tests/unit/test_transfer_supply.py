"""How much memory a transfer's schedule may use, and whose memory is handed over."""

import pytest

from kvfs import config
from kvfs.schedule import MemoryFreed
from kvfs.transfer.memory import Memory, Part, Place, Role
from kvfs.transfer.supply import PlainSupply, PoolSupply
from tests.transfers import SlotPool, StoredTier

TIER = StoredTier("t", {})


def place_of(role: Role) -> Place:
    return Place(Memory(role, memoryview(bytearray(100))))


def add_part(place: Place, begin: int, end: int, memory: Memory | None = None) -> Memory:
    memory = memory or Memory(Role.SCRATCH, memoryview(bytearray(100)))
    place.parts.append(Part(begin, end, memory, 0, TIER))
    return memory


def test_what_landed_at_home_stays_there() -> None:
    place = place_of(Role.BUFFER)
    add_part(place, 0, 100, place.home)
    assert place.target() is place.home


def test_a_callers_memory_is_where_its_chunk_goes() -> None:
    place = place_of(Role.OWN)
    add_part(place, 0, 100)
    assert place.target() is place.home


@pytest.mark.parametrize("role", [Role.OWN, Role.BUFFER])
def test_memory_to_which_a_late_read_may_write_is_not_handed_over(role: Role) -> None:
    place = place_of(role)
    add_part(place, 0, 60, place.home)
    scratch = add_part(place, 60, 100)
    place.home.writers = 1
    assert place.target() is scratch


def test_of_slots_the_fullest_is_handed_over() -> None:
    place = place_of(Role.BUFFER)
    add_part(place, 0, 40, place.home)
    add_part(place, 40, 50)
    fullest = add_part(place, 50, 100)
    assert place.target() is fullest


def test_parts_are_copied_to_their_places() -> None:
    place = place_of(Role.OWN)
    scratch = Memory(Role.SCRATCH, memoryview(bytearray(range(100))))
    add_part(place, 20, 30, scratch)
    place.parts[0].copy_to(place.home)
    assert bytes(place.home.view) == bytes(20) + bytes(range(20, 30)) + bytes(70)


def test_large_chunks_are_repeated_by_fewer_reads_at_a_time() -> None:
    large_bytes = config.TRANSFER_SCRATCH_BYTES // 2
    supply = PlainSupply(4)
    assert supply.begin(4096) == MemoryFreed(scratch=4)
    assert supply.begin(large_bytes) == MemoryFreed(scratch=-2)
    assert supply.begin(4 * large_bytes) == MemoryFreed(scratch=-1)  # one may always
    assert supply.end(4 * large_bytes) == MemoryFreed(scratch=1)
    assert supply.begin(large_bytes) is None
    assert supply.end(large_bytes) is None
    assert supply.end(large_bytes) == MemoryFreed(scratch=2)


def test_what_is_in_use_is_taken_back_when_it_is_free() -> None:
    supply = PlainSupply(3)
    supply.begin(4096)
    used = [supply.take_scratch(4096) for _ in range(3)]
    assert supply.begin(config.TRANSFER_SCRATCH_BYTES) is None, "all of it is in use"
    assert [supply.free(memory) for memory in used] == [None, None, MemoryFreed(scratch=1)]


def test_one_slot_in_three_is_kept_for_reads_that_repeat_others() -> None:
    pool = SlotPool(9, 4096)
    supply = PoolSupply(pool, 4)
    slots = [pool.take_nowait() for _ in range(9)]
    told = supply.stock([slot for slot in slots if slot is not None])
    assert told == MemoryFreed(buffers=6, scratch=3)
    balance, told_back = supply.balance(bare=2, is_reading=True)
    assert (len(balance.surplus), balance.short) == (4, 0)
    assert told_back == MemoryFreed(buffers=-4, scratch=0)
    balance, told_back = supply.balance(bare=0, is_reading=False)
    assert len(balance.surplus) == 5
    assert (supply.buffers, supply.scratch) == (0, 0)


def test_scratch_that_a_call_may_keep_for_ever_is_replaced() -> None:
    half_bytes = config.TRANSFER_SCRATCH_BYTES // 2
    supply = PlainSupply(1)
    supply.begin(half_bytes)
    kept = []
    for told in (MemoryFreed(scratch=1), MemoryFreed(scratch=1), None):  # in bytes it has a bound
        kept.append(supply.take_scratch(half_bytes))
        assert supply.strand(kept[-1]) == told
    assert [supply.free(memory) for memory in kept] == [None, None, MemoryFreed(scratch=1)]
    assert supply.scratch_reads == 0


def test_a_slot_that_a_call_may_keep_for_ever_is_replaced_by_the_next_that_is_free() -> None:
    pool = SlotPool(4, 4096)
    supply = PoolSupply(pool, 1)
    taken = [pool.take_nowait() for _ in range(4)]
    assert supply.stock([s for s in taken if s]) == MemoryFreed(buffers=3, scratch=1)
    stuck, buffers = supply.take_scratch(4096), [supply.take_buffer() for _ in range(3)]
    supply.strand(stuck)
    assert supply.is_unbalanced(0, is_reading=True)
    balance, told = supply.balance(0, is_reading=True)
    assert (balance.short, told) == (1, None)  # of the pool, if it has one
    assert supply.free(buffers[0]) == MemoryFreed(scratch=1)
    assert supply.free(buffers[1]) == MemoryFreed(buffers=1)
    assert supply.free(stuck) == MemoryFreed(buffers=1), "scratch has its place again"
    assert (supply.buffers, supply.scratch) == (3, 1)


def test_chunks_come_before_reads_that_repeat_others() -> None:
    pool = SlotPool(4, 4096)
    supply = PoolSupply(pool, 4)
    supply.stock([slot for slot in (pool.take_nowait() for _ in range(4)) if slot])
    assert (supply.buffers, supply.scratch) == (3, 1)
    stuck, buffers = supply.take_scratch(4096), [supply.take_buffer() for _ in range(3)]
    supply.strand(stuck)
    for memory in buffers:
        supply.free(memory)
    assert (supply.buffers, supply.scratch) == (2, 2), "one in three of those that do not hang"
    balance, told = supply.balance(0, is_reading=True)
    assert (len(balance.surplus), told) == (2, MemoryFreed(buffers=-2))
    assert supply.is_unbalanced(1, is_reading=True), "a chunk has none, and a slot is at hand"
    balance, told = supply.balance(1, is_reading=True)
    assert (balance.surplus, told) == ([], MemoryFreed(buffers=1, scratch=-1))
