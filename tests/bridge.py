"""All of the bridge that moves chunks, between a memory and a node in memory."""

from dataclasses import replace

import torch

from gpu_bridge.copies import CpuCopier
from gpu_bridge.counters import Counters
from gpu_bridge.layout import GroupLayout, group_layout
from gpu_bridge.loads import Loader, LoadOutcome
from gpu_bridge.plan import ChunkSave, Geometry, Group, Place, RequestLoad, chunk_of, plan_load
from gpu_bridge.saves import Saver
from gpu_bridge.shard import Shard
from gpu_bridge.staging import StagingPool
from kvfs.config import BRIDGE_OPEN_BATCH
from kvfs.reader.complaints import Complaints
from tests.memory_node import MemoryNode
from tests.processes import wait_until

BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 16, 16, 32
GEOMETRY = Geometry(CHUNK_TOKENS, BLOCK_TOKENS, (Group(0, BLOCK_TOKENS),), shards=1)
PLACE = Place(b"kv/m@" + b"0" * 32, "m", "0" * 32)
HASHES = [i.to_bytes(32, "big") for i in range(1, 2 * BRIDGE_OPEN_BATCH * 3)]
WAIT_S = 30.0


class Memory:
    """An engine's KV memory: two layers of random bytes."""

    def __init__(self) -> None:
        self.layers = {
            name: torch.randint(0, 255, (BLOCKS, 3, 64), dtype=torch.uint8) for name in "ab"
        }
        layout: GroupLayout = group_layout(0, list("ab"), self.layers, BLOCKS)
        self.shard = Shard(0, "test 1", GEOMETRY, {0: layout})

    def block(self, number: int) -> bytes:
        return b"".join(layer[number].numpy().tobytes() for layer in self.layers.values())

    def blocks(self) -> list[bytes]:
        return [self.block(number) for number in range(BLOCKS)]


class Bench:
    """Everything that moves chunks, between one memory and one node."""

    def __init__(self, *, slots: int = 4, deadline_s: float = WAIT_S) -> None:
        self.memory = Memory()
        self.node = MemoryNode()
        self.complaints = Complaints(self.node, WAIT_S)
        self.counters = Counters()
        self.copier = CpuCopier()
        slot_bytes = self.memory.shard.file_bytes_max("m")
        self.staging = StagingPool(slots, slot_bytes, pin=False)
        self.loader = Loader(
            self.memory.shard, self.node, self.complaints, self.staging, self.copier, self.counters,
            threads=2, deadline_s=deadline_s,
        )  # fmt: skip
        self.saver = Saver(
            self.memory.shard, self.node, self.staging, self.copier, self.counters, threads=2
        )

    def save(self, *chunks: int, first_block: int = 1, job: int = 0, **changes: object) -> None:
        saves = [
            ChunkSave(
                job + n,
                chunk_of(GEOMETRY, HASHES, index, GEOMETRY.groups[0]),
                (first_block + 2 * n, first_block + 2 * n + 1),
                tuple(range(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)),
                False,
            )
            for n, index in enumerate(chunks)
        ]
        self.saver.submit(PLACE, [replace(save, **changes) for save in saves], None)

    def load(self, request: str, blocks: list[int], place: Place = PLACE) -> None:
        tokens = len(blocks) * BLOCK_TOKENS
        chunks = plan_load(GEOMETRY, HASHES, {0: blocks}, 0, tokens)
        self.loader.submit(place, RequestLoad(request, chunks), None)

    def outcome(self) -> LoadOutcome:
        found: list[LoadOutcome] = []
        wait_until(lambda: bool(found.extend(self.loader.take_outcomes()) or found), WAIT_S)
        (outcome,) = found
        return outcome

    def path(self, index: int) -> bytes:
        return self.memory.shard.path(PLACE, chunk_of(GEOMETRY, HASHES, index, GEOMETRY.groups[0]))

    def counts(self) -> dict[str, float]:
        return self.counters.take().sums

    def close(self) -> None:
        self.saver.close(WAIT_S)
        self.loader.close()
        self.complaints.close()
        wait_until(lambda: self.staging.free == self.staging.count)
