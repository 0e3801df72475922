"""kvfs in scripts/bench_rivals.py: its tiers and the runner of its schedule, with a pool of staging
memory as the bridge has one."""

import argparse
import queue
from pathlib import Path

from kvfs.config import BRIDGE_STAGING_BYTES, MIB
from kvfs.digest import digest_of
from kvfs.settings.tiers import parse_tiers
from kvfs.settings.words import TierConfig
from kvfs.tiers.opening import open_tier
from kvfs.transfer.buffers import BufferPool
from kvfs.transfer.job import Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import JobEnd, WantedChunk
from scripts.rival_systems import DEADLINE_S, Blocks


class Kvfs:
    """A tier for each directory, read by one `Transfer` through a pool, as the bridge does."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._blocks = Blocks(arguments)
        rows = range(len(self._blocks.names))
        self._digests = [digest_of(self._blocks.content(row).data) for row in rows]
        self._size_bytes = arguments.mib * MIB
        self._tiers = [
            open_tier(kvfs_tier(f"tier{number}", arguments.kind, directory), f"{number:032x}")
            for number, directory in enumerate(arguments.directories)
        ]
        self._transfer = Transfer(
            BufferPool(BRIDGE_STAGING_BYTES // self._size_bytes, self._size_bytes)
        )
        for number, tier in enumerate(self._tiers):
            self._transfer.add_tier(number, tier)
        self._ended: queue.SimpleQueue[tuple[int, JobEnd]] = queue.SimpleQueue()

    def store(self) -> None:
        for row, digest in enumerate(self._digests):
            content = memoryview(self._blocks.content(row))
            for tier in self._tiers:
                tier.put(digest, content, self._size_bytes, DEADLINE_S)

    def forget(self) -> None:
        self._blocks.forget()

    def begin(self, request: int) -> None:
        rows = self._blocks.rows_of(request)
        everywhere = tuple(range(len(self._tiers)))
        chunks = [WantedChunk(self._digests[row], self._size_bytes, everywhere) for row in rows]

        def take(landed: Landed) -> None:
            with landed:
                self._blocks.rows[rows[landed.chunk]] = landed.memory

        self._transfer.start(
            chunks,
            take,
            deadline_s=DEADLINE_S,
            on_end=lambda end: self._ended.put((request, end)),
        )

    def step(self) -> list[int]:
        ended = []
        while not self._ended.empty():
            request, end = self._ended.get()
            assert not end.lost, f"kvfs lost chunks of request {request}: {end}"
            ended.append(request)
        return ended

    def collect(self) -> None:
        return  # they were copied as they came

    def count_right(self) -> int:
        return self._blocks.count_right()

    def close(self) -> None:
        self._transfer.close(DEADLINE_S)
        for tier in self._tiers:
            tier.close()


def kvfs_tier(name: str, kind: str, directory: Path) -> TierConfig:
    """As a configuration that says nothing more of it would have it."""

    directory.parent.mkdir(parents=True, exist_ok=True)
    return parse_tiers([{"name": name, "kind": kind, "path": str(directory)}])[0]
