"""vLLM's tiered offloading on a machine without a GPU, so that its `fs` tier can be measured.

vLLM's own spec refuses to start on a CPU because its worker copies with CUDA streams. Everything
else of it runs anywhere: here only the worker is another, which copies with memcpy between the
engine's blocks and the shared region that the secondary tiers read and write. Scheduler, look-ups,
promotion, files and thread pools are vLLM's, unchanged.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
     {"spec_name": "CpuTieringSpec", "spec_module_path": "scripts.vllm_cpu_tiering",
      "cpu_bytes_to_use": 536870912, "secondary_tiers": [{"type": "fs", "root_dir": DIRECTORY}]}}
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with a worker that needs no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """Copies at once, in the engine's thread: a transfer has ended when it was submitted, so that
    its request never waits for a further step. numpy copies: torch would start a team of
    threads, which on a busy machine waits for its slowest. Owns `region`."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._group_refs = kv_caches.group_data_refs
        self._blocks: list[np.ndarray] = []  # one row a block
        self._chunks: list[np.ndarray] = []  # one row a chunk, blocks_per_chunk blocks wide
        self._block_bytes: list[int] = []
        for cache in kv_caches.tensors:
            size_bytes = cache.page_size_bytes
            self._block_bytes.append(size_bytes)
            blocks = cache.tensor.view(torch.int8).view(-1, size_bytes)
            chunks = region.create_next_worker_view(size_bytes * blocks_per_chunk)
            self._blocks.append(blocks.numpy())
            self._chunks.append(chunks.numpy())
        self._ended: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        return  # nothing is ever under way

    def shutdown(self) -> None:
        self._blocks.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(
        self, job_id: int, engine: GPULoadStoreSpec, offloaded: LoadStoreSpec, *, is_store: bool
    ) -> bool:
        assert isinstance(offloaded, BlockIDsLoadStoreSpec)
        began_s = time.perf_counter()
        copied_bytes = 0
        block_ids = engine.block_ids.tolist()
        chunk_ids = offloaded.block_ids.tolist()
        for refs, count, index in zip(
            self._group_refs, engine.group_sizes, engine.block_indices, strict=True
        ):
            if not count:
                continue
            skipped = index % self._blocks_per_chunk  # blocks of the first chunk that are not ours
            chunk_count = -(-(skipped + count) // self._blocks_per_chunk)
            copied_bytes += self._copy_group(
                refs, block_ids[:count], chunk_ids[:chunk_count], skipped, is_store
            )
            del block_ids[:count], chunk_ids[:chunk_count]
        assert not block_ids and not chunk_ids
        seconds = time.perf_counter() - began_s
        self._ended.append(TransferResult(job_id, True, copied_bytes, seconds))
        return True

    def _copy_group(
        self,
        refs: Sequence[CanonicalKVCacheRef],
        block_ids: Sequence[int],
        chunk_ids: Sequence[int],
        skipped: int,
        is_store: bool,
    ) -> int:
        copied_bytes = 0
        for ref in refs:
            blocks, chunks = self._blocks[ref.tensor_idx], self._chunks[ref.tensor_idx]
            for number, block_id in enumerate(block_ids, skipped):
                chunk_id = chunk_ids[number // self._blocks_per_chunk]
                begin = number % self._blocks_per_chunk * self._block_bytes[ref.tensor_idx]
                block = blocks[block_id, : ref.page_size_bytes]
                stored = chunks[chunk_id, begin : begin + ref.page_size_bytes]
                if is_store:
                    stored[:] = block
                else:
                    block[:] = stored
                copied_bytes += ref.page_size_bytes
        return copied_bytes
