"""Drives LMCache's own storage manager over a directory. Runs in LMCache's environment.

    python lmcache_storage.py local_disk|fs DIRECTORY [--odirect] [--chunks N] [--mib N]

Stores chunks of random bytes through one storage manager and loads them back, `fs` through a second
manager as after a restart (local_disk forgets its index). Prints one JSON line: what was loaded
equal, by number, and which files lie in the directory.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

STORE_DEADLINE_S = 60.0
LAYERS, HEADS, CHUNK_TOKENS = 4, 8, 256
MODEL = "test/model-7b"  # the slash must end in a file name, one way or another


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until true; exits the program at the deadline."""
    end_s = time.monotonic() + STORE_DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            sys.exit(f"{what}: not within {STORE_DEADLINE_S:.0f} s")
        time.sleep(0.02)


def configure(backend: str, directory: Path, odirect: bool, pool_gib: float) -> Any:
    """The configuration that a user would write for this backend."""
    if backend == "local_disk":
        return LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=pool_gib,
            local_disk=str(directory),
            max_local_disk_size=4.0,
            extra_config={"use_odirect": odirect, "disk_io_threads": 4},
        )
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=pool_gib,
        remote_storage_plugins=["fs"],
        extra_config={
            "remote_storage_plugin.fs.base_path": str(directory),
            "fs_connector_use_odirect": odirect,
            # The 28 bytes before the data rule out O_DIRECT.
            "save_chunk_meta": not odirect,
        },
    )


def open_manager(config: Any, chunk_bytes: int) -> StorageManager:
    """A storage manager as the engine's connector makes it."""
    head_bytes = 2 * 2 * LAYERS * HEADS * CHUNK_TOKENS  # K and V, two bytes a number
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, chunk_bytes // head_bytes),
        role="worker",
    )
    return StorageManager(config, metadata, EventManager())


def key_of(number: int) -> CacheEngineKey:
    """The key of one chunk; some have the highest bit set, whose name begins with another digit."""
    return CacheEngineKey(MODEL, 1, 0, (number * 0x9E3779B97F4A7C15) % (1 << 64), torch.bfloat16)


def name_of_backend(manager: StorageManager) -> str:
    """The one backend that keeps chunks on disk."""
    (name,) = (name for name in manager.storage_backends if name != "LocalCPUBackend")
    return name


def fill(memory: Any, number: int) -> None:
    """Give a chunk bytes that only it has."""
    generator = torch.Generator().manual_seed(number)
    view = memory.tensor.view(torch.uint8)
    view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator))


def is_right(memory: Any, number: int) -> bool:
    """Say whether a loaded chunk has exactly the bytes that `fill` gave it."""
    generator = torch.Generator().manual_seed(number)
    view = memory.tensor.view(torch.uint8)
    expected = torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator)
    return bool(torch.equal(view, expected))


def store(manager: StorageManager, chunks: int) -> None:
    """Store all chunks and wait until the backend has written them."""
    shapes, dtypes = manager.metadata.get_shapes(), manager.metadata.get_dtypes()
    keys = [key_of(number) for number in range(chunks)]
    memories = manager.batched_allocate(shapes, dtypes, chunks)
    assert memories is not None, "LMCache's staging pool is too small"
    for number, memory in enumerate(memories):
        fill(memory, number)
    manager.batched_put(keys, memories)
    backend = manager.storage_backends[name_of_backend(manager)]
    wait_until(lambda: not any(backend.exists_in_put_tasks(key) for key in keys), "storing")


def load(manager: StorageManager, chunks: int) -> list[int]:
    """Load all chunks, half in a batch and half one by one; the numbers that came back right."""
    half = chunks // 2
    keys = [key_of(number) for number in range(chunks)]
    # Without its name a batch asks the memory tier only, which holds nothing.
    batch = manager.batched_get(keys[:half], location=name_of_backend(manager))
    memories = [*batch, *(manager.get(key) for key in keys[half:])]
    return [n for n, memory in enumerate(memories) if memory is not None and is_right(memory, n)]


def main() -> int:
    """Store, load, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["local_disk", "fs"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--odirect", action="store_true")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--mib", type=int, default=8)
    arguments = parser.parse_args()
    chunk_bytes = arguments.mib << 20
    pool_gib = 3 * arguments.chunks * chunk_bytes / (1 << 30) + 0.1
    config = configure(arguments.backend, arguments.directory, arguments.odirect, pool_gib)
    manager = open_manager(config, chunk_bytes)
    store(manager, arguments.chunks)
    if arguments.backend == "fs":
        manager.close()
        manager = open_manager(config, chunk_bytes)
    right = load(manager, arguments.chunks)
    missing = manager.get(key_of(arguments.chunks)) is None
    manager.close()
    files = {
        name: os.stat(arguments.directory / name).st_size
        for name in os.listdir(arguments.directory)
    }
    print(json.dumps({"right": right, "unknown_is_miss": missing, "files": files}), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    # LMCache leaves threads behind that keep its process alive.
    sys.stdout.flush()
    os._exit(code)
