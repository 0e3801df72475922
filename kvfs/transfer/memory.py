"""Whose bytes are where: the memory of chunks under way, and of reads that repeat others.

A tier cannot be told to stop, so a read that is not wanted any more may write until its call ends.
What it writes to must be nobody's meanwhile: each piece of memory counts its users, and is free
when the last has let it go. A read that repeats another has memory as large as the whole chunk, and
puts its range at the range's own place: so memory is handed over by changing places.

Under the lock of the transfer, all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvfs.tiers.contract import Tier
from kvfs.transfer.words import Slot


class Role(Enum):
    """What memory is, and is again when it is free."""

    OWN = "own"  # what the caller brought for a chunk
    BUFFER = "buffer"  # a slot of the pool for a chunk
    SCRATCH = "scratch"  # for a read that repeats another


class Memory:
    """Room for one chunk. `users`: the chunk that has it, reads that write to it, ranges of a chunk
    that lie in it, the callback that has got it."""

    __slots__ = ("is_stranded", "role", "slot", "users", "view", "writers")

    def __init__(self, role: Role, view: memoryview, slot: Slot | None = None) -> None:
        self.role = role
        self.view = view
        self.slot = slot
        self.is_stranded = False  # scratch that only a call has that nobody can end
        self.users = 0
        self.writers = 0  # of them, reads under way


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a chunk that is there."""

    begin: int
    end: int
    memory: Memory
    tier_number: int
    tier: Tier

    def copy_to(self, target: Memory) -> None:
        """To the same place there. Leaves the interpreter to others."""
        source = np.frombuffer(self.memory.view[self.begin : self.end], np.uint8)
        np.copyto(np.frombuffer(target.view[self.begin : self.end], np.uint8), source)


@dataclass(slots=True)
class Place:
    """Where a chunk's bytes are."""

    home: Memory
    parts: list[Part] = field(default_factory=list)

    def memories(self) -> Iterator[Memory]:
        """Those that it uses, as often as it does."""
        yield self.home
        for part in self.parts:
            yield part.memory

    def target(self) -> Memory:
        """Where all of it is to be: its home, unless a read may still write there. Slots of a pool
        are all alike, so there it is the one that has the most of it."""
        home = self.home
        assert self.parts
        if home.writers == 0 and home.role is Role.OWN:
            return home
        have: dict[Memory, int] = {}
        for part in self.parts:
            have[part.memory] = have.get(part.memory, 0) + part.end - part.begin
        if home.writers:
            have.pop(home, None)  # what is not wanted any more of it came in another way
        return max(have, key=lambda memory: (have[memory], memory is home))
