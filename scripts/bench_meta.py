#!/usr/bin/env python3
"""Look-ups and start-up with many files: a batch through the node's socket against os.stat on disk.

usage: bench_meta.py [--files 100000] [--dir DIR] [--json]

Makes a store with that many chunk-named files and measures, in turns, a batch look-up of 1,000
random keys, as the bridge asks and as paths, and 1,000 os.stat calls on files of the same number on
the same disk; then the time from
the start of a new `kvfs serve` to a client's first hit, and (as root, with /dev/fuse) of a new
`kvfs mount` to the first file seen in it. Prints medians; everything it makes is removed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client  # noqa: E402  (path first)
from kvfs.client_files import StagedFile  # noqa: E402  (path first)
from kvfs.errors import Unavailable  # noqa: E402
from kvfs.names import ChunkKeys, chunk_key, chunk_path  # noqa: E402  (path first)
from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.node_rig import node_of  # noqa: E402

BATCH = 1000
STARTS = 5
NAMESPACE = b"kv/bench@0123456789abcdef0123456789abcdef"


def block_hash(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little")) * 2


def key_path(number: int) -> bytes:
    return chunk_path(NAMESPACE, chunk_key(block_hash(number), 0, 0))


def fill(client: Client, files: int) -> None:
    for start in range(0, files, 100):
        numbers = range(start, min(start + 100, files))
        staged = client.stage([8] * len(numbers))
        items = []
        for number, item in zip(numbers, staged, strict=True):
            data = number.to_bytes(8, "little")
            os.pwrite(item.fd, data, 0)
            os.close(item.fd)
            items.append(
                StagedFile(item.token, key_path(number), xxhash.xxh3_128(data).digest(), 8)
            )
        client.publish(items)


def time_start(arguments: list[str], is_hit: Callable[[], bool]) -> float:
    """Median seconds from the start of a node's process to its first hit."""
    spent = []
    for _ in range(STARTS):
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "kvfs", *arguments])
        try:
            while not is_hit():
                if process.poll() is not None or time.perf_counter() - began > 60:
                    raise SystemExit("the node did not start; see the lines above")
                time.sleep(0.002)
            spent.append(time.perf_counter() - began)
        finally:
            process.terminate()
            process.wait(30)
    return statistics.median(spent)


def has_hit(store: Path, path: bytes) -> bool:
    """Whether a new client finds a file."""
    try:
        with Client(store) as client:
            return client.lookup([path])[0] is not None
    except Unavailable:
        return False


def measure_lookups(client: Client, files: int, paths: list[str], rounds: int) -> dict[str, float]:
    """Median milliseconds of a batch look-up by keys, one by paths, and as many os.stat calls."""
    rng = random.Random(1)
    spent_ms: dict[str, list[float]] = {"lookup_1000_ms": [], "by_path_ms": [], "stat_1000_ms": []}
    for _ in range(rounds):
        hashes = b"".join(block_hash(rng.randrange(files)) for _ in range(BATCH))
        keys = [key_path(rng.randrange(files)) for _ in range(BATCH)]
        chosen = rng.choices(paths, k=BATCH)
        began = time.perf_counter()
        found = client.lookup_chunks(NAMESPACE, ChunkKeys(hashes, 32, ((0, 0),)))
        after_keys = time.perf_counter()
        found += client.lookup(keys)
        after_paths = time.perf_counter()
        for path in chosen:
            os.stat(path)
        ended = time.perf_counter()
        assert None not in found
        spent_ms["lookup_1000_ms"].append((after_keys - began) * 1e3)
        spent_ms["by_path_ms"].append((after_paths - after_keys) * 1e3)
        spent_ms["stat_1000_ms"].append((ended - after_paths) * 1e3)
    return {name: statistics.median(values) for name, values in spent_ms.items()}


def run(files: int, base: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=base) as name:
        scratch = Path(name)
        store = scratch / "store"
        with node_of(store), Client(store) as client:
            fill(client, files)
            paths = [os.fspath(path) for path in (store / "blobs").glob("*/*/*")]
            spent_ms = measure_lookups(client, files, paths, 200)
        serve = ["serve", "--store", os.fspath(store)]
        wanted = key_path(files // 2)
        result = {
            "files": files,
            **spent_ms,
            "serve_first_hit_s": time_start(serve, partial(has_hit, store, wanted)),
        }
        if os.geteuid() == 0 and os.path.exists("/dev/fuse"):
            mountpoint = scratch / "mnt"
            mountpoint.mkdir()
            command = ["mount", os.fspath(mountpoint), *serve[1:], "--foreground"]
            wanted_file = mountpoint / os.fsdecode(wanted)
            result["mount_first_hit_s"] = time_start(command, wanted_file.exists)
        return result


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, help="where to make the scratch store")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = run(options.files, options.dir)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:20} {value:10.3f}")


if __name__ == "__main__":
    main()
