"""Has an engine's own disk tier write and read chunks, and says how long that took.

Run by scripts/bench_tiers_on_mount.py with the interpreter of `.envs/lmcache` or `.envs/vllm`:

    python scripts/tier_driver.py fs|fs_native|vllm [--odirect] --chunks N --mib N --jobs N DIR ...

Each line on standard input is a command of JSON, each line on standard output its answer:
`["write", DIR]` stores chunks that no directory has yet, `["read", DIR]` loads what was last
written there into memory that was emptied before. Both answer the seconds, a read also how many
chunks came back as they were written. What the tier itself prints goes to standard error.
"""

import argparse
import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402  (path first)

from kvfs.digest import digest_of  # noqa: E402

MIB = 1024 * 1024
DEADLINE_S = 300.0
POLL_S = 0.0005
MODEL = "test/model-7b"

Names = Sequence[bytes]
Jobs = Sequence[Sequence[int]]  # chunk numbers; a job is what one request stores or loads


class Tier(Protocol):
    """An engine's tier in one directory. Both calls return when the last chunk was moved; a chunk
    that was not is for the caller to find."""

    def store(self, names: Names, jobs: Jobs) -> None: ...

    def load(self, names: Names, jobs: Jobs) -> None: ...


class LMCacheTier:
    """An L2 adapter of LMCache's multi-process mode, as its server makes it."""

    def __init__(self, kind: str, directory: Path, is_direct: bool, memory: np.ndarray) -> None:
        import torch
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
        from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

        config = get_l2_adapter_config_class(kind).from_dict(
            {"type": kind, "base_path": str(directory), "use_odirect": is_direct}
        )
        self._adapter = create_l2_adapter_from_registry(config)
        whole = torch.from_numpy(memory)
        count, size_bytes = memory.shape
        self._objects = [
            TensorMemoryObj(
                whole[number],
                MemoryObjMetadata(torch.Size([size_bytes]), torch.uint8, 0, size_bytes, 1),
                None,
            )
            for number in range(count)
        ]

    def store(self, names: Names, jobs: Jobs) -> None:
        left = {self._adapter.submit_store_task(*self._of(names, job)) for job in jobs}

        def is_done() -> bool:
            for task, result in self._adapter.pop_completed_store_tasks().items():
                assert result.is_successful(), "LMCache could not store"
                left.discard(task)
            return not left

        wait_until(is_done)

    def load(self, names: Names, jobs: Jobs) -> None:
        left = {self._adapter.submit_load_task(*self._of(names, job)) for job in jobs}

        def is_done() -> bool:
            for task in tuple(left):
                if self._adapter.query_load_result(task) is not None:
                    left.discard(task)
            return not left

        wait_until(is_done)

    def _of(self, names: Names, job: Sequence[int]) -> tuple[list[Any], list[Any]]:
        from lmcache.v1.distributed.api import ObjectKey

        keys = [ObjectKey(names[number], MODEL, 0) for number in job]
        return keys, [self._objects[number] for number in job]


class VllmTier:
    """vLLM's `fs` tier, between its files and what would be the memory of its first tier."""

    def __init__(self, directory: Path, is_direct: bool, memory: np.ndarray) -> None:
        from vllm.v1.kv_offload.tiering.fs import manager

        if not is_direct:  # it asks the directory, and has no option
            manager.probe_o_direct = lambda directory: False
        self._tier = manager.FileSystemTierManager(
            _vllm_spec(), memoryview(memory), "fs", str(directory)
        )
        assert self._tier._use_o_direct == is_direct, f"no O_DIRECT in {directory}"
        self._number = 0

    def store(self, names: Names, jobs: Jobs) -> None:
        self._move(names, jobs, self._tier.submit_store, is_load=False)

    def load(self, names: Names, jobs: Jobs) -> None:
        self._move(names, jobs, self._tier.submit_load, is_load=True)

    def _move(
        self, names: Names, jobs: Jobs, submit: Callable[[Any], None], *, is_load: bool
    ) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        for job in jobs:
            self._number += 1
            keys = [make_offload_key(names[number], 0) for number in job]
            context = ReqContext(f"request {self._number}")
            submit(TransferJob(self._number, keys, np.array(job), is_load, context))
        self._tier.drain_jobs()
        assert all(result.success for result in self._tier.get_finished_jobs()), "vLLM failed"


def _vllm_spec() -> Any:
    """As much of vLLM's offloading configuration as names the files."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
    )
    config = SimpleNamespace(
        groups=[],
        parallel=parallel,
        model=SimpleNamespace(name=MODEL, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=256),
        canonical_layout=False,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until true. Raises TimeoutError at the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the tier does not come to an end")
        time.sleep(POLL_S)


class Driver:
    """One memory for all directories, and a tier for each of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._count = arguments.chunks
        size_bytes = arguments.mib * MIB
        area = mmap.mmap(-1, self._count * size_bytes)  # on a page boundary, as O_DIRECT wants it
        self._memory = np.frombuffer(area, np.uint8).reshape(self._count, size_bytes)
        self._content = np.random.default_rng().integers(0, 256, size_bytes, np.uint8)
        self._jobs = [list(range(n, self._count, arguments.jobs)) for n in range(arguments.jobs)]
        self._tiers = {
            str(directory): self._tier(arguments.tier, directory, arguments.odirect)
            for directory in arguments.directories
        }
        self._names: dict[str, list[bytes]] = {}
        self._digests: dict[str, list[bytes]] = {}

    def _tier(self, kind: str, directory: Path, is_direct: bool) -> Tier:
        if kind == "vllm":
            return VllmTier(directory, is_direct, self._memory)
        return LMCacheTier(kind, directory, is_direct, self._memory)

    def write(self, directory: str) -> dict[str, Any]:
        self._memory[:] = self._content
        self._memory[:, :16] = np.frombuffer(os.urandom(16 * self._count), np.uint8).reshape(-1, 16)
        self._digests[directory] = [digest_of(chunk.data) for chunk in self._memory]
        names = [hashlib.sha256(os.urandom(32)).digest() for _ in range(self._count)]
        self._names[directory] = names
        began_s = time.perf_counter()
        self._tiers[directory].store(names, self._jobs)
        return {"seconds": time.perf_counter() - began_s}

    def read(self, directory: str) -> dict[str, Any]:
        self._memory[:] = 0
        began_s = time.perf_counter()
        self._tiers[directory].load(self._names[directory], self._jobs)
        seconds = time.perf_counter() - began_s
        wanted = self._digests[directory]
        right = sum(
            digest_of(chunk.data) == digest
            for chunk, digest in zip(self._memory, wanted, strict=True)
        )
        return {"seconds": seconds, "right": right}


def main() -> int:
    """Obey until there are no more commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tier", choices=["fs", "fs_native", "vllm"])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--odirect", action="store_true")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver = Driver(arguments)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        command, directory = json.loads(line)
        answer = driver.write(directory) if command == "write" else driver.read(directory)
        print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        # The tiers leave threads behind that would keep the process alive.
        sys.stderr.flush()
        if code == 0:
            os._exit(0)
