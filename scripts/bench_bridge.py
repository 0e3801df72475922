#!/usr/bin/env python3
"""The bridge's data path against the disk: chunk files through a real node, beside fio.

usage: bench_bridge.py [--dir DIR] [--mib 512] [--rounds 5] [--threads 1,2,4] [--json]

For chunks of 8 and 16 MiB, in turns within each round, with the page cache dropped (root):
  load   Client.open in a batch, then on each thread read_verified (whole-file digest) and the
         chunk header's check, against fio psync direct reads of as many files of the same size
  store  Client.stage in a batch, then on each thread the payload's digest, the header, the file's
         digest and write_from, then Client.publish, against fio psync direct writes
Prints MiB/s (medians) and the ratio of each pair (median). Everything it makes is removed.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.chunk import ChunkHeader, TensorSpec, chunk_info, decode_header, encode_header  # noqa: E402  (path first)
from kvfs.client import Client, StagedFile  # noqa: E402
from kvfs.config import MIB  # noqa: E402
from kvfs.digest import digest_of  # noqa: E402
from kvfs.names import chunk_key, chunk_path, fingerprint_of, namespace_path  # noqa: E402
from kvfs.transfer import allocate, read_verified, write_from  # noqa: E402
from scripts.node_rig import node_of  # noqa: E402

MODEL = "bench"
FINGERPRINT = fingerprint_of({"bench": 1})
NAMESPACE = namespace_path(MODEL, FINGERPRINT)
HEADER_ROOM = 64 * 1024


def header_of(number: int, payload: memoryview) -> ChunkHeader:
    return ChunkHeader(
        model=MODEL,
        fingerprint=FINGERPRINT,
        key=chunk_key(number.to_bytes(32, "big"), 0, 0),
        parent="",
        token_start=0,
        token_end=256,
        group=0,
        shard=0,
        engine="bench",
        digest=digest_of(payload),
        token_ids=tuple(range(256)),
        tensors=(TensorSpec("kv", "U8", (len(payload),)),),
    )


class Slots:
    """One buffer a thread: the header ends where the payload begins, so that both are one write."""

    def __init__(self, threads: int, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.free = [allocate(HEADER_ROOM + payload_bytes) for _ in range(threads)]
        noise = os.urandom(payload_bytes)
        for slot in self.free:
            slot[HEADER_ROOM:] = noise


def in_threads(threads: int, count: int, job: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(job, number) for number in range(count)]:
            done.result()


def store(client: Client, slots: Slots, threads: int, count: int, first: int) -> float:
    """Seconds to store `count` chunks, all different."""
    began = time.perf_counter()
    staged = client.stage([HEADER_ROOM + slots.payload_bytes] * count)
    files: list[StagedFile] = []

    def job(index: int) -> None:
        slot = slots.free.pop()
        payload = slot[HEADER_ROOM:]
        payload[:8] = (first + index).to_bytes(8, "little")
        header = header_of(first + index, payload)
        encoded = encode_header(header)
        begin = HEADER_ROOM - len(encoded)
        slot[begin:HEADER_ROOM] = encoded
        file = slot[begin:]
        digest = digest_of(file)
        write_from(staged[index].fd, file)
        os.close(staged[index].fd)
        path = chunk_path(NAMESPACE, header.key)
        files.append(StagedFile(staged[index].token, path, digest, len(file), chunk_info(header)))
        slots.free.append(slot)

    in_threads(threads, count, job)
    client.publish(files)
    return time.perf_counter() - began


def load(client: Client, slots: Slots, threads: int, count: int, first: int) -> float:
    """Seconds to load `count` chunks with all checks."""
    keys = [chunk_key((first + n).to_bytes(32, "big"), 0, 0) for n in range(count)]
    drop_caches()
    began = time.perf_counter()
    opened = client.open([chunk_path(NAMESPACE, key) for key in keys])

    def job(index: int) -> None:
        file = opened[index]
        assert file is not None
        slot = slots.free.pop()
        with file:
            content = read_verified(file.fd, slot, file.size_bytes, file.digest)
        header, _ = decode_header(content, len(content))
        assert header.key == keys[index]
        slots.free.append(slot)

    in_threads(threads, count, job)
    return time.perf_counter() - began


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


def measure(client: Client, base: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    first = 1
    for chunk_mib in (8, 16):
        count = options.mib // chunk_mib
        for threads in options.threads:
            spent: dict[str, list[float]] = {"store": [], "load": [], "write": [], "read": []}
            for turn in range(options.rounds):
                measure_round(client, base, spent, turn, threads, count, chunk_mib * MIB, first)
                first += count
            rows += [
                row(name, chunk_mib, threads, options.mib, spent[name], spent[rival])
                for name, rival in (("load", "read"), ("store", "write"))
            ]
    return rows


def measure_round(
    client: Client,
    base: Path,
    spent: dict[str, list[float]],
    turn: int,
    threads: int,
    count: int,
    chunk_bytes: int,
    first: int,
) -> None:
    """Each of the four once; who begins changes with the turn."""
    slots = Slots(threads, chunk_bytes)
    rival = partial(fio, base / "fio", threads=threads, count=count, size_bytes=chunk_bytes)
    calls = [
        [
            ("store", partial(store, client, slots, threads, count, first)),
            ("write", partial(rival, "write")),
        ],
        [
            ("load", partial(load, client, slots, threads, count, first)),
            ("read", partial(rival, "read")),
        ],
    ]
    for pair in calls:
        for name, call in pair if turn % 2 == 0 else reversed(pair):
            os.sync()
            spent[name].append(call())
    client.evict(
        [
            chunk_path(NAMESPACE, chunk_key((first + n).to_bytes(32, "big"), 0, 0))
            for n in range(count)
        ]
    )
    shutil.rmtree(base / "fio")
    while client.status()["directories"][0]["trash_bytes"]:
        time.sleep(0.01)


def row(
    name: str, chunk_mib: int, threads: int, mib: int, ours: Sequence[float], fio_s: Sequence[float]
) -> dict[str, object]:
    return {
        "what": name,
        "chunk_mib": chunk_mib,
        "threads": threads,
        "kvfs_mib_s": round(mib / statistics.median(ours)),
        "fio_mib_s": round(mib / statistics.median(fio_s)),
        "ratio": round(statistics.median(f / o for f, o in zip(fio_s, ours, strict=True)), 3),
    }


def main() -> None:
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
    base = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=options.dir))
    try:
        with node_of(base / "store"), Client(base / "store") as client:
            rows = measure(client, base, options)
    finally:
        shutil.rmtree(base)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("what   chunk threads  kvfs MiB/s  fio MiB/s  ratio")
    for r in rows:
        print(
            f"{r['what']:6} {r['chunk_mib']:3} MiB {r['threads']:5}"
            f" {r['kvfs_mib_s']:11} {r['fio_mib_s']:10} {r['ratio']:6}"
        )


if __name__ == "__main__":
    main()
