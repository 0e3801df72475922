"""The scheduler's book of saves under way: which chunks, which blocks, for which request. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpu_bridge.plan import Chunk, ChunkSave
from gpu_bridge.reports import WorkerReport


@dataclass(slots=True)
class _Entry:
    request_id: str
    chunk: Chunk
    block_ids: tuple[int, ...]
    unsettled: int
    unended: int
    stored: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A chunk that no worker works on any more."""

    request_id: str
    chunk: Chunk
    is_stored: bool  # by every worker


@dataclass(slots=True)
class SaveLedger:
    """`workers`: how many of them must say so before a save has settled or ended."""

    workers: int
    _next: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _saving: set[tuple[bytes, int]] = field(default_factory=set)
    _jobs_of_block: dict[int, set[int]] = field(default_factory=dict)
    _unsettled_of_request: dict[str, set[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def is_saving(self, chunk: Chunk) -> bool:
        return (chunk.hash, chunk.group) in self._saving

    def open(
        self,
        request_id: str,
        chunk: Chunk,
        block_ids: tuple[int, ...],
        token_ids: tuple[int, ...] | None,
        *,
        is_replacing: bool,
    ) -> ChunkSave:
        """Enter a save and give it its number."""
        number = self._next
        self._next += 1
        self._entries[number] = _Entry(request_id, chunk, block_ids, self.workers, self.workers)
        self._saving.add((chunk.hash, chunk.group))
        self._unsettled_of_request.setdefault(request_id, set()).add(number)
        for block in block_ids:
            self._jobs_of_block.setdefault(block, set()).add(number)
        return ChunkSave(number, chunk, block_ids, token_ids, is_replacing)

    def unsettled(self, request_id: str) -> tuple[int, ...]:
        """Saves of a request whose blocks must be kept."""
        return tuple(sorted(self._unsettled_of_request.get(request_id, ())))

    def touching(self, block_ids: Iterable[int]) -> set[int]:
        """Unsettled saves that copy from any of these blocks."""
        if not self._jobs_of_block:
            return set()
        return {job for block in block_ids for job in self._jobs_of_block.get(block, ())}

    def note(self, report: WorkerReport) -> list[Ended]:
        """Enter what workers said; the saves that ended by it."""
        for number, count in report.settled.items():
            self._settle(number, count)
        ended = []
        for number, count in report.ended.items():
            entry = self._entries.get(number)
            if entry is None:
                continue
            entry.unended -= count
            entry.stored += report.stored.get(number, 0)
            if entry.unended <= 0:
                ended.append(self._close(number, entry))
        return ended

    def _settle(self, number: int, count: int) -> None:
        entry = self._entries.get(number)
        if entry is None or entry.unsettled <= 0:
            return
        entry.unsettled -= count
        if entry.unsettled <= 0:
            self._release(number, entry)

    def _close(self, number: int, entry: _Entry) -> Ended:
        if entry.unsettled > 0:
            self._release(number, entry)
        del self._entries[number]
        self._saving.discard((entry.chunk.hash, entry.chunk.group))
        return Ended(entry.request_id, entry.chunk, entry.stored >= self.workers)

    def _release(self, number: int, entry: _Entry) -> None:
        entry.unsettled = 0
        for block in entry.block_ids:
            jobs = self._jobs_of_block[block]
            jobs.discard(number)
            if not jobs:
                del self._jobs_of_block[block]
        own = self._unsettled_of_request[entry.request_id]
        own.discard(number)
        if not own:
            del self._unsettled_of_request[entry.request_id]


def blocks_from(tables: Sequence[Sequence[int]], first: Sequence[int]) -> list[int]:
    """The block ids of every group from its `first` block on."""
    return [
        block
        for table, start in zip(tables, first, strict=True)
        for block in table[start:]
        if block
    ]
