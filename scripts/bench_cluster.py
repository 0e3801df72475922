#!/usr/bin/env python3
"""Reading across two nodes: a client's files from the other node, and look-ups in its names.

usage: bench_cluster.py [--rounds 5] [--files 20000] [--mbit N] [--directory DIR] [--json]
                        [--only reads|stream|lookups]

Two mounts in network namespaces of their own. In turns, 256 MiB in files of 16 MiB that only the
other node has, in its memory:
  raw     from one namespace to the other by TCP alone, sendfile to recv_into
  bridge  as chunks, by the bridge's Loader into an engine's blocks, all digests checked
  copied  as a client opens and reads them, which has its node bring copies
  again   the same, of the copies
Then one file of 256 MiB through the mount: how long until its first byte is there, and until all
are. Then look-ups of 1,000 chunk keys that the other node stored:
  told    never asked for, stored while this node was there, which the feed told of them
  lookup  never asked for nor told of, since this node has been started anew
  again   the same, of those
  one_miss  of one key that nobody has
Prints medians, and the ratio of pairs to raw TCP.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client  # noqa: E402  (path first)
from kvfs.client_files import StagedFile  # noqa: E402  (path first)
from kvfs.config import MIB, PAGE_BYTES  # noqa: E402
from kvfs.names import ChunkKeys, chunk_key, chunk_path  # noqa: E402
from scripts.bridge_rig import Reader, engine_of  # noqa: E402
from scripts.cluster_rig import Node, Rig, cluster, command_in  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.memory_rig import drop_page_cache  # noqa: E402

FILE_BYTES = 16 * MIB
FILES = 16  # a little more than the KV of a prompt of 1,900 tokens, of a model of 8B
NAMESPACE = b"kv/bench@0123456789abcdef0123456789abcdef"
STREAM_BYTES = 256 * MIB
PORT = 7500

SEND = """
import os, socket, sys
paths = sys.argv[2:]
with socket.create_server((sys.argv[1], {port})) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    with connection:
        for path in paths:
            with open(path, "rb") as file:
                left, offset = os.fstat(file.fileno()).st_size, 0
                while left:
                    sent = os.sendfile(connection.fileno(), file.fileno(), offset, left)
                    left, offset = left - sent, offset + sent
""".replace("{port}", str(PORT))
RECEIVE = """
import socket, sys, time
buffer = memoryview(bytearray(int(sys.argv[3])))
began = time.perf_counter()
with socket.create_connection((sys.argv[1], {port})) as connection:
    for _ in range(int(sys.argv[2])):
        done = 0
        while done < len(buffer):
            done += connection.recv_into(buffer[done:])
print(time.perf_counter() - began)
""".replace("{port}", str(PORT))


def read_files(client: Client, paths: Sequence[bytes], buffer: memoryview) -> float:
    """Seconds to open and read them all, each checked, as an engine does."""
    began = time.perf_counter()
    for file in client.open(paths):
        if file is None:
            raise SystemExit("a file is missing")
        os.preadv(file.fd, [buffer[: file.size_bytes]], 0)
        if xxhash.xxh3_128_digest(buffer[: file.size_bytes]) != file.digest:
            raise SystemExit("wrong bytes")
        file.close()
    return time.perf_counter() - began


def raw_transfer(rig: Rig, files: Sequence[Path]) -> float:
    """Seconds for the same bytes by TCP alone."""
    sender, receiver = rig.nodes
    with subprocess.Popen(
        [
            *command_in(sender.host), sys.executable, "-c", SEND, sender.host.address,
            *map(os.fspath, files),
        ],
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        done = subprocess.run(
            [
                *command_in(receiver.host), sys.executable, "-c", RECEIVE, sender.host.address,
                str(len(files)), str(files[0].stat().st_size),
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    return float(done.stdout)


def measure_reads(rig: Rig, rounds: int) -> dict[str, list[float]]:
    sender, receiver = rig.nodes
    spent: dict[str, list[float]] = {name: [] for name in ("raw", "bridge", "copied", "again")}
    buffer = memoryview(bytearray(2 * FILE_BYTES))
    with (
        engine_of(sender.store, FILES, FILE_BYTES, 1) as there,
        Client(receiver.store, deadline_s=60) as here,
        closing(Reader(receiver.store, FILES, FILE_BYTES, command_in(receiver.host))) as reader,
    ):
        for number in range(rounds):
            there.change()
            there.store()
            paths = there.paths()
            blobs = [blob_of(sender, here, path) for path in paths]
            for blob in blobs:
                blob.read_bytes()  # so that memory has them
            ways = {
                "raw": partial(raw_transfer, rig, blobs),
                "bridge": partial(bridge_load, reader, there.hashes),
            }
            for name in sorted(ways, reverse=number % 2 == 0):
                spent[name].append(ways[name]())
            for name in ("copied", "again"):
                spent[name].append(read_files(here, paths, buffer))
    return spent


def bridge_load(reader: Reader, hashes: Sequence[bytes]) -> float:
    """Seconds until all chunks are in an engine's blocks."""
    load = reader.load(hashes)
    if not load.is_whole or load.remote_bytes < FILES * FILE_BYTES:
        raise SystemExit("not all chunks came straight from the other node")
    return load.seconds


def rates_of(spent: dict[str, list[float]]) -> dict[str, float]:
    """What they say in MiB/s, and as a part of raw TCP in the same round."""
    total_mib = FILES * FILE_BYTES / MIB
    result = {f"{n}_mib_s": total_mib / statistics.median(v) for n, v in spent.items()}
    for name in ("bridge", "copied"):
        ratios = [raw / ours for raw, ours in zip(spent["raw"], spent[name], strict=True)]
        result[f"{name}_of_raw"] = statistics.median(ratios)
        result[f"{name}_of_raw_least"], result[f"{name}_of_raw_most"] = min(ratios), max(ratios)
    return result


def measure_stream(rig: Rig, rounds: int) -> dict[str, float]:
    """Median milliseconds until a program has the first byte of a file that only the other node
    has, and until it has all, through the mount."""
    sender, receiver = rig.nodes
    spent: dict[str, list[float]] = {"first_byte_ms": [], "whole_file_ms": []}
    buffer = memoryview(bytearray(4 * MIB))
    for number in range(rounds):
        (sender.mountpoint / f"stream{number}").write_bytes(os.urandom(STREAM_BYTES))
        began = time.perf_counter()
        with open(receiver.mountpoint / f"stream{number}", "rb", buffering=0) as file:
            done = file.readinto(buffer[:PAGE_BYTES])
            spent["first_byte_ms"].append((time.perf_counter() - began) * 1e3)
            while count := file.readinto(buffer):
                done += count
        spent["whole_file_ms"].append((time.perf_counter() - began) * 1e3)
        assert done == STREAM_BYTES
    return {name: statistics.median(values) for name, values in spent.items()}


def blob_of(node: Node, client: Client, path: bytes) -> Path:
    """Where a node keeps the bytes of a file."""
    inode = client.stat(path)
    assert inode is not None
    name = inode.digest.hex()
    return node.store / "blobs" / name[:2] / name[2:4] / name


def block_hash(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little")) * 2


def store_names(store: Path, numbers: range) -> None:
    """A file of 8 bytes under each."""
    with Client(store) as client:
        for start in range(numbers.start, numbers.stop, 100):
            staged = client.stage([8] * 100)
            items = []
            for number, item in enumerate(staged, start):
                data = number.to_bytes(8, "little")
                os.pwrite(item.fd, data, 0)
                os.close(item.fd)
                path = chunk_path(NAMESPACE, chunk_key(block_hash(number), 0, 0))
                items.append(StagedFile(item.token, path, xxhash.xxh3_128_digest(data), 8))
            client.publish(items)


def measure_lookups(rig: Rig, files: int, rounds: int) -> dict[str, float]:
    """Median milliseconds for 1,000 keys; see the module's docstring."""
    sender, receiver = rig.nodes
    count = min(rounds * 4, files // 1000)
    batches = [
        ChunkKeys(b"".join(block_hash(number * 1000 + n) for n in range(1000)), 32, ((0, 0),))
        for number in range(count)
    ]
    spent: dict[str, list[float]] = {}

    def look_up(name: str, client: Client, keys: ChunkKeys) -> None:
        began = time.perf_counter()
        found = client.lookup_chunks(NAMESPACE, keys)
        spent.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        assert (None in found) == (name == "one_miss_ms")

    store_names(sender.store, range(files))
    with Client(receiver.store) as here:
        for keys in batches:
            look_up("told_1000_ms", here, keys)
    receiver.stop()
    receiver.start()
    with Client(receiver.store) as here:
        for number, keys in enumerate(batches):
            look_up("lookup_1000_ms", here, keys)
            look_up("again_ms", here, keys)
            look_up("one_miss_ms", here, ChunkKeys(block_hash(files + number), 32, ((0, 0),)))
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=20_000, help="names to look up among")
    parser.add_argument("--mbit", type=int, help="bound each cable")
    parser.add_argument("--directory", type=Path, help="where the stores lie; default: in /tmp")
    parser.add_argument("--only", choices=("reads", "stream", "lookups"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-cluster-", dir=options.directory) as base,
        cluster(2, Path(base)) as rig,
    ):
        for node in rig.nodes:
            node.host.limit(options.mbit)
        result: dict[str, float | None] = {"mbit": options.mbit}
        if options.only in (None, "reads"):
            result |= rates_of(measure_reads(rig, options.rounds))
        if options.only in (None, "stream"):
            result |= measure_stream(rig, options.rounds)
        if options.only in (None, "lookups"):
            result |= measure_lookups(rig, options.files, options.rounds)
        drop_page_cache()
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:20} {value if value is None else round(value, 3)}")


if __name__ == "__main__":
    main()
