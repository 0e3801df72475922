"""A replay on real tiers: made-up blocks are put into them, and read back as requests arrive."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvfs.config import (
    BATCH_ITEMS_MAX,
    MIB,
    REPLAY_DEADLINE_S,
    REPLAY_SLOTS_MIN,
    REPLAY_STAGING_BYTES,
)
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, QueueFull
from kvfs.file_io import allocate
from kvfs.replay.plan import Planned
from kvfs.replay.report import Loads, TierShare
from kvfs.tiers.contract import WritableTier
from kvfs.transfer.buffers import BufferPool
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import JobEnd, WantedChunk

_CLOSE_DEADLINE_S = 30.0
_NAME_BYTES = 16
_MADE_BYTES = MIB  # at once: what makes them takes several times as much memory


class Blocks:
    """Bytes that stand for blocks: all the same but for the block's number. One at a time."""

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes >= _NAME_BYTES
        self.block_bytes = block_bytes
        self._memory = allocate(block_bytes)
        generator = random.Random(0)  # nothing that compresses
        for begin in range(0, block_bytes, _MADE_BYTES):
            end = min(begin + _MADE_BYTES, block_bytes)
            self._memory[begin:end] = generator.randbytes(end - begin)

    def content(self, block: int) -> memoryview:
        """Good until the next call."""
        self._memory[:_NAME_BYTES] = block.to_bytes(_NAME_BYTES, "big")
        return self._memory

    def digests(self, planned: Sequence[Planned]) -> dict[int, bytes]:
        """Of all blocks that are to be read."""
        wanted = {block for one in planned for block, _ in one.hits}
        return {block: digest_of(self.content(block)) for block in sorted(wanted)}


@dataclass(frozen=True, slots=True)
class Missing:
    """What a tier must have for a replay and has not."""

    tier: WritableTier
    blocks: tuple[int, ...]
    wanted: int  # how many it must have


def find_missing(
    planned: Sequence[Planned], digests: Mapping[int, bytes], tiers: Sequence[WritableTier]
) -> list[Missing]:
    """Ask each tier for all blocks that are to be read from it."""
    found = []
    for number, tier in enumerate(tiers):
        blocks = sorted(
            {block for one in planned for block, holders in one.hits if number in holders}
        )
        missing: list[int] = []
        for part in _parts(blocks):
            sizes = tier.has([digests[block] for block in part])
            missing += [block for block, size in zip(part, sizes, strict=True) if size is None]
        found.append(Missing(tier, tuple(missing), len(blocks)))
    return found


def prepare(
    missing: Sequence[Missing],
    digests: Mapping[int, bytes],
    blocks: Blocks,
    on_put: Callable[[int], None],
) -> None:
    """Put what is missing; `on_put` is told of each block. Raises `InvalidInput`, before anything
    is put, when a tier has no room for it, and `OutOfSpace` and `TierTrouble`."""
    for one in missing:
        capacity = one.tier.capacity()
        wanted_bytes = len(one.blocks) * blocks.block_bytes
        if capacity is not None and capacity.free_bytes < wanted_bytes:
            raise InvalidInput(
                f"tier {one.tier.name}",
                f"has {capacity.free_bytes:,} bytes free, and {wanted_bytes:,} are to be put; use"
                " --limit, --capacity or --block-bytes",
            )
    for one in missing:
        for block in one.blocks:
            one.tier.put(digests[block], blocks.content(block), blocks.block_bytes)
            on_put(1)


def remove(digests: Mapping[int, bytes], tiers: Sequence[WritableTier]) -> None:
    """Take all blocks out of all tiers."""
    for tier in tiers:
        for digest in digests.values():
            tier.remove(digest)


class Replay:
    """Requests that arrive at their times, read by one `Transfer`."""

    def __init__(
        self, tiers: Sequence[WritableTier], digests: Mapping[int, bytes], block_bytes: int
    ) -> None:
        self._tiers = tiers
        self._digests = digests
        self._block_bytes = block_bytes
        self._changed = threading.Condition()
        self._took_s: list[float] = []
        self._ended_s = 0.0
        self._lost = 0

    def run(
        self,
        planned: Sequence[Planned],
        *,
        speed: float = 1.0,
        on_loaded: Callable[[int], None] = lambda blocks: None,
    ) -> Loads:
        """Return when all are read or lost. `on_loaded` is told of the blocks of each load that
        ended, on another thread. A request for which the transfer has no room waits."""
        hitting = [one for one in planned if one.hits]
        slots = max(REPLAY_SLOTS_MIN, REPLAY_STAGING_BYTES // self._block_bytes)
        transfer = Transfer(BufferPool(slots, self._block_bytes))
        try:
            for number, tier in enumerate(self._tiers):
                transfer.add_tier(number, tier)
            began_s = time.monotonic()
            for one in hitting:
                at_s = began_s + one.request.at_s / speed
                time.sleep(max(0.0, at_s - time.monotonic()))
                self._start(transfer, one, at_s, began_s, on_loaded)
            self._wait_ended(len(hitting))
            views = transfer.view().tiers
        finally:
            transfer.close(_CLOSE_DEADLINE_S)
        shares = tuple(
            TierShare(
                view.name,
                view.schedule.bytes_read,
                view.schedule.hedges_won,
                view.schedule.hedges_lost,
            )
            for view in views
        )
        return Loads(tuple(self._took_s), self._ended_s, self._lost, shares)

    def _start(
        self,
        transfer: Transfer,
        one: Planned,
        at_s: float,
        began_s: float,
        on_loaded: Callable[[int], None],
    ) -> None:
        chunks = [
            WantedChunk(self._digests[block], self._block_bytes, tiers) for block, tiers in one.hits
        ]

        def end(ending: JobEnd) -> None:
            now_s = time.monotonic()
            on_loaded(len(chunks))
            with self._changed:
                self._took_s.append(now_s - at_s)
                self._ended_s = max(self._ended_s, now_s - began_s)
                self._lost += len(ending.lost)
                self._changed.notify_all()

        while True:
            ended = len(self._took_s)
            try:
                transfer.start(chunks, Landed.give_back, deadline_s=REPLAY_DEADLINE_S, on_end=end)
                return
            except QueueFull:
                self._wait_ended(ended + 1)

    def _wait_ended(self, count: int) -> None:
        """Until so many loads have ended, which each does at its deadline."""
        with self._changed:
            while len(self._took_s) < count:
                self._changed.wait(1.0)


def _parts(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(blocks), BATCH_ITEMS_MAX):
        yield blocks[begin : begin + BATCH_ITEMS_MAX]
