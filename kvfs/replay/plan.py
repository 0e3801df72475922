"""What of each request of a trace is cached, and where: a cache for each tier, of so many blocks,
from which the least recently used goes."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvfs.replay.trace import Request


@dataclass(frozen=True, slots=True)
class Planned:
    """A request and its hits: its leading blocks that are cached, each with the numbers of the
    tiers that have it."""

    request: Request
    hits: tuple[tuple[int, tuple[int, ...]], ...]


class BlockCache:
    """Blocks of one tier. `capacity_blocks` None: all that come."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, block: int) -> None:
        """It is here now, and the last that would go."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if self._capacity_blocks is not None and len(self._blocks) > self._capacity_blocks:
            self._blocks.popitem(last=False)


def plan(requests: Iterable[Request], capacities_blocks: Sequence[int | None]) -> Iterator[Planned]:
    """Requests in their order. Each puts all its blocks into all tiers when it comes, the first
    block last, since those behind it are of no use without it."""
    caches = [BlockCache(capacity) for capacity in capacities_blocks]
    everywhere = tuple(range(len(caches)))
    for request in requests:
        hits = []
        for block in request.blocks:
            tiers = tuple(number for number in everywhere if block in caches[number])
            if not tiers:
                break
            hits.append((block, tiers))
        yield Planned(request, tuple(hits))
        for cache in caches:
            for block in reversed(request.blocks):
                cache.use(block)
