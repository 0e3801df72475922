"""Where memory comes from, and how much of it the schedule may use.

Without a pool, chunks bring their own, and what repeats a read gets memory that is made for it:
bounded in bytes, but one chunk may always. With a pool, both are its slots. They are taken while
there are chunks to start and given back when there are none, so that others get some; a few are
kept for repeated reads, else there would be none just when a tier hangs.

Under the lock of the transfer, but for the calls of the pool, which are the caller's to make.
"""

from collections import Counter
from dataclasses import dataclass

from kvfs import config
from kvfs.file_io import allocate
from kvfs.schedule import MemoryFreed
from kvfs.transfer.memory import Memory, Role
from kvfs.transfer.words import Pool, Slot


@dataclass(frozen=True, slots=True)
class Balance:
    """What is to be done with the pool: slots that go back, and how many more are wanted."""

    surplus: list[Slot]
    short: int


class PlainSupply:
    """For chunks that bring their memory."""

    def __init__(self, scratch_reads: int) -> None:
        self._reads_max = scratch_reads
        self._largest: Counter[int] = Counter()  # jobs by the size of their largest chunk
        self._wanted = 0  # reads that may have memory of their own
        self._told = 0  # the same as the schedule knows it: more, until some that have it end
        self.scratch_reads = 0  # that have it, stranded ones too
        self._stranded = 0
        self._stranded_bytes = 0

    def take_scratch(self, size_bytes: int) -> Memory:
        self.scratch_reads += 1
        return Memory(Role.SCRATCH, allocate(size_bytes)[:size_bytes])

    def free(self, memory: Memory) -> MemoryFreed | None:
        """Nobody uses it any more. What the schedule is to be told."""
        if memory.role is Role.OWN:
            return None
        self.scratch_reads -= 1
        if not memory.is_stranded:
            return self._free_one()
        self._stranded -= 1
        self._stranded_bytes -= len(memory.view)
        return None

    def strand(self, memory: Memory) -> MemoryFreed | None:
        """Scratch may never be free again: more takes its place, up to as much as there is. What
        the schedule is to be told."""
        if self._stranded_bytes + len(memory.view) > config.TRANSFER_SCRATCH_BYTES:
            return None
        memory.is_stranded = True
        self._stranded += 1
        self._stranded_bytes += len(memory.view)
        return self._free_one()

    def _free_one(self) -> MemoryFreed | None:
        if self._told > self._wanted:
            self._told -= 1
            return None
        return MemoryFreed(scratch=1)

    def begin(self, largest_bytes: int) -> MemoryFreed | None:
        """A job begins whose largest chunk is so large. What the schedule is to be told."""
        self._largest[largest_bytes] += 1
        return self._limit()

    def end(self, largest_bytes: int) -> MemoryFreed | None:
        """It is over."""
        self._largest[largest_bytes] -= 1
        if not self._largest[largest_bytes]:
            del self._largest[largest_bytes]
        return self._limit()

    def _limit(self) -> MemoryFreed | None:
        largest_bytes = max(self._largest, default=0)
        fits = config.TRANSFER_SCRATCH_BYTES // max(1, largest_bytes)
        self._wanted = max(1, min(self._reads_max, fits)) if self._reads_max else 0
        used = self.scratch_reads - self._stranded
        change = max(self._wanted, used) - self._told
        self._told += change
        return MemoryFreed(scratch=change) if change else None


class PoolSupply:
    """For chunks that get a slot of a pool."""

    def __init__(self, pool: Pool, scratch_reads: int) -> None:
        self.pool = pool
        self._scratch_max = scratch_reads
        self._buffers: list[Slot] = []  # at hand: as many as the schedule may use
        self._scratch: list[Slot] = []
        self.buffers = 0  # in use by chunks, and at hand
        self.scratch = 0  # in use by reads that repeat others, at hand, and stranded
        self._stranded = 0
        self._is_short = False  # the pool has not been asked since more was stranded
        self.scratch_reads = 0

    def take_buffer(self) -> Memory:
        slot = self._buffers.pop()
        return Memory(Role.BUFFER, slot.memory, slot)

    def take_scratch(self, size_bytes: int) -> Memory:
        self.scratch_reads += 1
        slot = self._scratch.pop()
        assert size_bytes <= len(slot.memory)
        return Memory(Role.SCRATCH, slot.memory, slot)

    def free(self, memory: Memory) -> MemoryFreed:
        """Nobody uses a slot any more: it is at hand again. What the schedule is to be told."""
        assert memory.slot is not None
        is_scratch = memory.role is Role.SCRATCH
        if is_scratch:
            self.scratch_reads -= 1
            self.scratch -= 1
            self._stranded -= memory.is_stranded
        else:
            self.buffers -= 1
        if (is_scratch or self._stranded) and self._wants_scratch():
            return self._keep_scratch(memory.slot)
        self.buffers += 1
        self._buffers.append(memory.slot)
        return MemoryFreed(buffers=1)

    def strand(self, memory: Memory) -> None:
        """Scratch may never be free again: another slot takes its place, the next that is free or
        comes from the pool."""
        memory.is_stranded = True
        self._stranded += 1
        self._is_short = True

    def abandon(self, memory: Memory) -> None:
        """The same for the slot of a chunk that is not wanted any more."""
        memory.role = Role.SCRATCH
        self.buffers -= 1
        self.scratch += 1
        self.scratch_reads += 1
        self.strand(memory)

    def _wants_scratch(self) -> bool:
        """Whether a slot more is better kept for reads that repeat others: one in three is."""
        live = self.scratch - self._stranded
        return live < self._scratch_max and self.buffers > 2 * live

    def _keep_scratch(self, slot: Slot) -> MemoryFreed:
        self.scratch += 1
        self._scratch.append(slot)
        return MemoryFreed(scratch=1)

    def begin(self, largest_bytes: int) -> None:
        """A job begins: slots are all of one size."""

    def end(self, largest_bytes: int) -> None:
        """It is over: what it does not need any more is seen when all is balanced."""

    def stock(self, slots: list[Slot]) -> MemoryFreed:
        """Slots were taken from the pool. One in three, at most, is kept for reads that repeat
        others. What the schedule is to be told."""
        more_buffers = more_scratch = 0
        for slot in slots:
            has_none = self._scratch_max > 0 and self.scratch == self._stranded > 0
            if has_none or self._wants_scratch():
                self._keep_scratch(slot)
                more_scratch += 1
            else:
                self.buffers += 1
                more_buffers += 1
                self._buffers.append(slot)
        return MemoryFreed(buffers=more_buffers, scratch=more_scratch)

    def is_unbalanced(self, bare: int, *, is_reading: bool) -> bool:
        """Whether slots are at hand that nothing here needs, or more are needed."""
        has_surplus = len(self._buffers) > bare or bool(self._scratch and not is_reading)
        return has_surplus or (self._is_short and is_reading) or self._lacks_buffers(bare)

    def _lacks_buffers(self, bare: int) -> bool:
        return bool(bare and not self.buffers and self._scratch)

    def balance(self, bare: int, *, is_reading: bool) -> tuple[Balance, MemoryFreed | None]:
        """How the pool is to be used now: `bare` chunks have no slot yet. With it what the schedule
        is to be told before any slot goes back."""
        changed = 0
        if self._lacks_buffers(bare):  # chunks come before reads that repeat others
            self._buffers.append(self._scratch.pop())
            changed = 1
        excess = max(0, len(self._buffers) - bare)
        excess_scratch = 0 if is_reading else len(self._scratch)
        surplus = self._buffers[:excess] + self._scratch[:excess_scratch]
        del self._buffers[:excess], self._scratch[:excess_scratch]
        buffers, scratch = changed - excess, -changed - excess_scratch
        self.buffers += buffers
        self.scratch += scratch
        short = max(0, bare - len(self._buffers))
        live = self.scratch - self._stranded
        if is_reading and short:
            short += max(0, self._scratch_max - live)
        elif is_reading and self._stranded and not live and self._scratch_max:
            short = 1
        self._is_short = False
        told = MemoryFreed(buffers=buffers, scratch=scratch) if buffers or scratch else None
        return Balance(surplus, short), told
