"""What workers tell the scheduler after a step, summed over the workers. Pure."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkerReport:
    """`settled`, `ended`, `stored`: how many workers say so of each save (see `saves`).
    `suspects`: hashes of chunks that must be written anew."""

    settled: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    suspects: set[bytes] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return not (self.settled or self.ended or self.suspects)

    def add(self, other: "WorkerReport") -> None:
        self.settled.update(other.settled)
        self.ended.update(other.ended)
        self.stored.update(other.stored)
        self.suspects |= other.suspects
