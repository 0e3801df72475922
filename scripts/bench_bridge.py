#!/usr/bin/env python3
"""The bridge against the disk: its Saver and Loader on a real node, beside fio.

usage: bench_bridge.py [--dir DIR] [--mib 512] [--rounds 5] [--threads 1,2,4] [--json]

For chunks of 8 and 16 MiB (16 layers, 16 blocks of 16 tokens), in turns, with the page cache
dropped (root):
  store  from the blocks to published files with both digests (Saver), against fio psync direct
         writes of as many files of the same size on as many threads
  load   from cold files into other blocks, digest and header checked (Loader), against fio psync
         direct reads
The blocks are compared afterwards. Prints MiB/s (medians) and the ratio (median of the pairs), with
the smallest and the largest. Everything that it makes is removed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import MIB  # noqa: E402  (path first)
from scripts.bridge_rig import Engine, engine_of  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.memory_rig import drop_page_cache  # noqa: E402
from scripts.node_rig import node_of  # noqa: E402

SETTLE_S = 0.5


def fio(directory: Path, kind: str, threads: int, count: int, size_bytes: int) -> float:
    """Seconds fio takes for `count` files of a size on so many threads."""
    per_thread = count // threads
    directory.mkdir(exist_ok=True)
    if kind == "read":
        drop_page_cache()
    command = [
        "fio", "--output-format=json", "--thread", "--ioengine=psync", "--direct=1",
        f"--directory={directory}", f"--rw={kind}", f"--bs={size_bytes}",
        f"--filesize={size_bytes}", f"--nrfiles={per_thread}", f"--size={per_thread * size_bytes}",
        "--file_service_type=sequential", "--openfiles=1", f"--numjobs={threads}",
        "--group_reporting", "--name=job", "--fallocate=none", "--create_on_open=1",
    ]  # fmt: skip
    if kind == "read":
        command.remove("--create_on_open=1")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job[kind]["runtime"]) / 1e3


def settle() -> None:
    """Let the disk finish what was written and freed, so that the next one does not pay for it."""
    os.sync()
    time.sleep(SETTLE_S)


def measure(base: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for chunk_mib in (8, 16):
        count = options.mib // chunk_mib
        for threads in options.threads:
            spent: dict[str, list[float]] = {"store": [], "load": [], "write": [], "read": []}
            with engine_of(base / "store", count, chunk_mib * MIB, threads) as engine:
                for turn in range(options.rounds):
                    measure_round(engine, base / "fio", spent, turn, threads, chunk_mib * MIB)
            rows += [
                row(name, chunk_mib, threads, options.mib, spent[name], spent[rival])
                for name, rival in (("load", "read"), ("store", "write"))
            ]
            print(*map(line, rows[-2:]), sep="\n", file=sys.stderr, flush=True)
    return rows


def measure_round(
    engine: Engine,
    scratch: Path,
    spent: dict[str, list[float]],
    turn: int,
    threads: int,
    chunk_bytes: int,
) -> None:
    """Each of the four once; who begins changes with the turn."""
    engine.change()
    rival = partial(fio, scratch, threads=threads, count=engine.count, size_bytes=chunk_bytes)
    pairs: list[list[tuple[str, Callable[[], float]]]] = [
        [("store", engine.store), ("write", partial(rival, "write"))],
        [("load", engine.load), ("read", partial(rival, "read"))],
    ]
    for pair in pairs:
        for name, call in pair if turn % 2 == 0 else reversed(pair):
            settle()
            if name == "load":
                drop_page_cache()
            spent[name].append(call())
    engine.check()
    engine.evict()
    shutil.rmtree(scratch)


def row(
    name: str, chunk_mib: int, threads: int, mib: int, ours: list[float], fio_s: list[float]
) -> dict[str, object]:
    ratios = [f / o for f, o in zip(fio_s, ours, strict=True)]
    return {
        "what": name,
        "chunk_mib": chunk_mib,
        "threads": threads,
        "kvfs_mib_s": round(mib / statistics.median(ours)),
        "fio_mib_s": round(mib / statistics.median(fio_s)),
        "ratio": round(statistics.median(ratios), 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
    }


def line(r: dict[str, object]) -> str:
    return (
        f"{r['what']:6} {r['chunk_mib']:3} MiB {r['threads']:5} {r['kvfs_mib_s']:11}"
        f" {r['fio_mib_s']:10}  {r['ratio']} ({r['smallest']} to {r['largest']})"
    )


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, help="where to make the scratch files")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4]
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("fio") is None:
        raise SystemExit("bench_bridge.py needs root (to drop the page cache) and fio")
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=options.dir) as scratch:
        base = Path(scratch)
        with node_of(base / "store"):
            rows = measure(base, options)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("what   chunk threads  kvfs MiB/s  fio MiB/s  ratio (smallest to largest)")
    print(*map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
