#!/usr/bin/env python3
"""The bridge's Saver and Loader over memory that stands for an engine's, without an engine: what
benchmarks and tests of the bridge share.

usage: bridge_rig.py STORE CHUNKS CHUNK_BYTES

Chunks have 16 layers of 16 blocks of 16 tokens. As a command it loads for `Reader`, for example in
the network of another node: a line of block hashes in, a line of JSON about their load out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (path first)
import xxhash  # noqa: E402

from gpu_bridge.copies import CpuCopier  # noqa: E402
from gpu_bridge.counters import Counters  # noqa: E402
from gpu_bridge.layout import group_layout  # noqa: E402
from gpu_bridge.link import Link  # noqa: E402
from gpu_bridge.loads import Loader  # noqa: E402
from gpu_bridge.plan import (  # noqa: E402
    ChunkSave,
    Geometry,
    Group,
    Place,
    RequestLoad,
    chunk_of,
    plan_load,
)
from gpu_bridge.saves import Saver  # noqa: E402
from gpu_bridge.shard import Shard  # noqa: E402
from gpu_bridge.staging import StagingPool  # noqa: E402
from kvfs.client import Client  # noqa: E402
from kvfs.config import BRIDGE_STAGING_BYTES, BRIDGE_THREADS  # noqa: E402
from kvfs.names import fingerprint_of, namespace_path  # noqa: E402
from kvfs.reader.complaints import Complaints  # noqa: E402

FINGERPRINT = fingerprint_of({"bench": 1})
PLACE = Place(namespace_path("bench", FINGERPRINT), "bench", FINGERPRINT)
LAYERS, BLOCK_TOKENS, CHUNK_TOKENS = 16, 16, 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
GEOMETRY = Geometry(CHUNK_TOKENS, BLOCK_TOKENS, (Group(0, BLOCK_TOKENS),), shards=1)
DEADLINE_S = 120.0
STOP_DEADLINE_S = 20.0
HASH_BYTES = 32


class Engine:
    """KV memory of random bytes for `count` chunks, and as much to load them into."""

    def __init__(self, store: Path, count: int, chunk_bytes: int, threads: int) -> None:
        self.count = count
        self.blocks = count * CHUNK_BLOCKS
        row_bytes = chunk_bytes // (LAYERS * CHUNK_BLOCKS)
        self.layers = {
            f"layer{n}": torch.randint(0, 255, (1 + 2 * self.blocks, row_bytes), dtype=torch.uint8)
            for n in range(LAYERS)
        }
        layout = group_layout(0, list(self.layers), self.layers, 1 + 2 * self.blocks)
        shard = Shard(0, "bench", GEOMETRY, {0: layout})
        slot_bytes = shard.file_bytes_max(PLACE.model)
        staging = StagingPool(
            max(2 * threads, BRIDGE_STAGING_BYTES // slot_bytes), slot_bytes, pin=False
        )
        self.counters = counters = Counters()
        copier = CpuCopier()
        self.links = [Link(store, deadline_s=DEADLINE_S, start=False) for _ in range(2)]
        self.complaints = Complaints(Client(store), DEADLINE_S)
        self.loader = Loader(
            shard, self.links[0], self.complaints, staging, copier, counters,
            threads=threads, deadline_s=DEADLINE_S,
        )  # fmt: skip
        self.saver = Saver(shard, self.links[1], staging, copier, counters, threads=threads)
        self.shard = shard
        self.hashes: list[bytes] = []

    def change(self) -> None:
        """Other content under other names, as far as the disk is concerned."""
        for layer in self.layers.values():
            layer[1 : 1 + self.blocks, :8].random_(0, 255)
        self.clear()
        self.hashes = [os.urandom(HASH_BYTES) for _ in range(self.blocks)]

    def clear(self) -> None:
        """Nothing is in the blocks into which chunks are loaded."""
        for layer in self.layers.values():
            layer[1 + self.blocks :] = 0

    def store(self) -> float:
        """Seconds until every chunk is published."""
        saves = [
            ChunkSave(
                index,
                chunk_of(GEOMETRY, self.hashes, index, GEOMETRY.groups[0]),
                tuple(range(1 + index * CHUNK_BLOCKS, 1 + (index + 1) * CHUNK_BLOCKS)),
                tuple(range(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)),
                False,
            )
            for index in range(self.count)
        ]
        began = time.perf_counter()
        self.saver.submit(PLACE, saves, None)
        assert self.saver.flush(DEADLINE_S)
        spent = time.perf_counter() - began
        self.saver.take_settled()
        ends = self.saver.take_ends()
        assert len(ends) == self.count and all(end.is_stored for end in ends), "chunks were dropped"
        return spent

    def load(self) -> float:
        """Seconds until every chunk is in its blocks."""
        seconds, is_whole = self.try_load()
        assert is_whole, "chunks were not loaded"
        return seconds

    def try_load(self) -> tuple[float, bool]:
        """Seconds until the load has ended, and whether every chunk is in its blocks."""
        targets = list(range(1 + self.blocks, 1 + 2 * self.blocks))
        chunks = plan_load(GEOMETRY, self.hashes, {0: targets}, 0, self.blocks * BLOCK_TOKENS)
        began = time.perf_counter()
        self.loader.submit(PLACE, RequestLoad("bench", chunks), None)
        while not (outcomes := self.loader.take_outcomes()):
            self.loader.wait(DEADLINE_S)
        spent = time.perf_counter() - began
        return spent, outcomes[0].is_whole

    def check(self) -> None:
        for name, layer in self.layers.items():
            same = torch.equal(layer[1 : 1 + self.blocks], layer[1 + self.blocks :])
            assert same, f"{name}: other bytes came back"

    def paths(self) -> list[bytes]:
        """Of the chunks."""
        chunks = [
            chunk_of(GEOMETRY, self.hashes, index, GEOMETRY.groups[0])
            for index in range(self.count)
        ]
        return [self.shard.path(PLACE, chunk) for chunk in chunks]

    def evict(self) -> None:
        """Take the chunks away, and wait until their room is free."""
        client = self.links[0].client
        client.evict(self.paths())
        end_s = time.monotonic() + DEADLINE_S
        while client.status()["directories"][0]["trash_bytes"]:
            assert time.monotonic() < end_s, "what was evicted is not removed"
            time.sleep(0.01)

    def close(self) -> None:
        self.saver.close(DEADLINE_S)
        self.loader.close()
        self.complaints.close()
        for link in self.links:
            link.close()


@contextmanager
def engine_of(store: Path, count: int, chunk_bytes: int, threads: int) -> Iterator[Engine]:
    engine = Engine(store, count, chunk_bytes, threads)
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Load:
    """How a load of a `Reader` went."""

    seconds: float
    is_whole: bool
    remote_bytes: int  # of it straight from other nodes
    digest: str  # of what is in the blocks, layer by layer


def digest_of(engine: Engine, first_block: int) -> str:
    """Of an engine's blocks from one on, as many as its chunks have, layer by layer."""
    hashing = xxhash.xxh3_128()
    for layer in engine.layers.values():
        hashing.update(layer[first_block : first_block + engine.blocks].numpy().data)
    return hashing.hexdigest()


class Reader:
    """An engine's loads in a process of its own, in the network where `prefix` runs commands."""

    def __init__(
        self, store: Path, chunks: int, chunk_bytes: int, prefix: Sequence[str] = ()
    ) -> None:
        self._process = subprocess.Popen(
            [
                *prefix, sys.executable, __file__, os.fspath(store), str(chunks), str(chunk_bytes),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def load(self, hashes: Sequence[bytes]) -> Load:
        """Load the chunks of a prompt by their block hashes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"".join(hashes).hex() + "\n")
        self._process.stdin.flush()
        return Load(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("chunks", type=int)
    parser.add_argument("chunk_bytes", type=int)
    options = parser.parse_args()
    with engine_of(options.store, options.chunks, options.chunk_bytes, BRIDGE_THREADS) as engine:
        for line in sys.stdin:
            joined = bytes.fromhex(line)
            engine.hashes = [
                joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)
            ]
            seconds, is_whole = engine.try_load()
            sums = engine.counters.take().sums
            remote_bytes = int(sums.get("loaded_remote_bytes", 0))
            digest = digest_of(engine, 1 + engine.blocks)
            print(json.dumps(asdict(Load(seconds, is_whole, remote_bytes, digest))), flush=True)


if __name__ == "__main__":
    main()
