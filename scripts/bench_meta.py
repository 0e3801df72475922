#!/usr/bin/env python3
"""Look-ups and start-up with many files: a batch through the node's socket against os.stat on disk.

usage: bench_meta.py [--files 100000] [--dir DIR] [--json]

Makes a store with that many chunk-named files, restarts its node, and measures the time from the
start of `kvfs serve` (and, as root with /dev/fuse, of `kvfs mount`) to the first hit, and, in
turns, a batch look-up of 1,000 random keys and 1,000 os.stat calls on files of the same number on
the same disk. Prints medians; everything it makes is removed.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client, StagedFile  # noqa: E402  (path first)
from kvfs.errors import Unavailable  # noqa: E402
from scripts.node_rig import node_of  # noqa: E402

BATCH = 1000
NAMESPACE = b"kv/bench@0123456789abcdef0123456789abcdef"


def key_path(number: int) -> bytes:
    key = xxhash.xxh3_128_hexdigest(number.to_bytes(8, "little")) * 2
    return b"%s/%s/%s-g0-s0.safetensors" % (NAMESPACE, key[:2].encode(), key.encode())


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


def start(arguments: list[str], store: Path, files: int) -> tuple[subprocess.Popen[bytes], float]:
    """Start a node; seconds until a client had its first hit."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "kvfs", *arguments])
    while True:
        try:
            with Client(store) as client:
                if client.lookup([key_path(files // 2)])[0] == 8:
                    return process, time.perf_counter() - began
        except Unavailable:
            pass
        if process.poll() is not None or time.perf_counter() - began > 60:
            raise SystemExit("the node did not start; see the lines above")
        time.sleep(0.002)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


def measure_lookups(
    client: Client, files: int, paths: list[str], rounds: int
) -> tuple[float, float]:
    """Median seconds of a batch look-up and of as many os.stat calls, in turns."""
    rng = random.Random(1)
    batch_s, stat_s = [], []
    for _ in range(rounds):
        keys = [key_path(rng.randrange(files)) for _ in range(BATCH)]
        began = time.perf_counter()
        sizes = client.lookup(keys)
        batch_s.append(time.perf_counter() - began)
        assert None not in sizes
        chosen = rng.choices(paths, k=BATCH)
        began = time.perf_counter()
        for path in chosen:
            os.stat(path)
        stat_s.append(time.perf_counter() - began)
    return statistics.median(batch_s), statistics.median(stat_s)


def run(files: int, base: Path | None) -> dict[str, float]:
    scratch = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=base))
    store = scratch / "store"
    serve = ["serve", "--store", os.fspath(store)]
    process: subprocess.Popen[bytes] | None = None
    try:
        with node_of(store), Client(store) as client:
            fill(client, files)
        process, serve_s = start(serve, store, files)
        found = (store / "blobs").glob("*/*/*")
        paths = [os.fspath(path) for path in found]
        with Client(store) as client:
            batch_s, stat_s = measure_lookups(client, files, paths, 200)
        stop(process)
        result = {
            "files": files,
            "serve_first_hit_s": serve_s,
            "lookup_1000_ms": batch_s * 1e3,
            "stat_1000_ms": stat_s * 1e3,
        }
        if os.geteuid() == 0 and os.path.exists("/dev/fuse"):
            mountpoint = scratch / "mnt"
            mountpoint.mkdir()
            command = ["mount", os.fspath(mountpoint), *serve[1:], "--foreground"]
            process, mount_s = start(command, store, files)
            result["mount_first_hit_s"] = mount_s
            stop(process)
        return result
    finally:
        if process is not None and process.poll() is None:
            stop(process)
        shutil.rmtree(scratch)


def main() -> None:
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
