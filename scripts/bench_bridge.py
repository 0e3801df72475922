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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (path first)

from gpu_bridge.complaints import Complaints  # noqa: E402
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
from kvfs.config import BRIDGE_STAGING_BYTES, MIB  # noqa: E402
from kvfs.names import fingerprint_of, namespace_path  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.node_rig import node_of  # noqa: E402

FINGERPRINT = fingerprint_of({"bench": 1})
PLACE = Place(namespace_path("bench", FINGERPRINT), "bench", FINGERPRINT)
LAYERS, BLOCK_TOKENS, CHUNK_TOKENS = 16, 16, 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
GEOMETRY = Geometry(CHUNK_TOKENS, BLOCK_TOKENS, (Group(0, BLOCK_TOKENS),), shards=1)
DEADLINE_S = 120.0
SETTLE_S = 0.5


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
        counters, copier = Counters(), CpuCopier()
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
            layer[1 + self.blocks :] = 0
        self.hashes = [os.urandom(32) for _ in range(self.blocks)]

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
        targets = list(range(1 + self.blocks, 1 + 2 * self.blocks))
        chunks = plan_load(GEOMETRY, self.hashes, {0: targets}, 0, self.blocks * BLOCK_TOKENS)
        drop_caches()
        began = time.perf_counter()
        self.loader.submit(PLACE, RequestLoad("bench", chunks), None)
        while not (outcomes := self.loader.take_outcomes()):
            self.loader.wait(DEADLINE_S)
        spent = time.perf_counter() - began
        assert outcomes[0].is_whole, "chunks were not loaded"
        return spent

    def check(self) -> None:
        for name, layer in self.layers.items():
            same = torch.equal(layer[1 : 1 + self.blocks], layer[1 + self.blocks :])
            assert same, f"{name}: other bytes came back"

    def evict(self) -> None:
        """Take the chunks away, and wait until their room is free."""
        chunks = [
            chunk_of(GEOMETRY, self.hashes, index, GEOMETRY.groups[0])
            for index in range(self.count)
        ]
        client = self.links[0].client
        client.evict([self.shard.path(PLACE, chunk) for chunk in chunks])
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


def fio(directory: Path, kind: str, threads: int, count: int, size_bytes: int) -> float:
    """Seconds fio takes for `count` files of a size on so many threads."""
    per_thread = count // threads
    directory.mkdir(exist_ok=True)
    if kind == "read":
        drop_caches()
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


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


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
