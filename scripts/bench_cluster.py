#!/usr/bin/env python3
"""Reading across two nodes: a client's files from the other node, and look-ups in its names.

usage: bench_cluster.py [--rounds 5] [--files 20000] [--mbit N] [--directory DIR] [--json]

Two mounts in network namespaces of their own. In turns: 256 MiB in files of 16 MiB, as a client of
one node opens and reads what only the other has; the same from one node to the other by raw TCP,
sendfile to recv_into; the same files again, which are copies here by then. Then look-ups of 1,000
chunk keys that the other node stored, at first and again, and of one that is missing. Prints
medians, and the ratio of pairs to raw TCP.
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
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client, StagedFile  # noqa: E402  (path first)
from kvfs.config import MIB  # noqa: E402
from kvfs.names import ChunkKeys, chunk_key, chunk_path  # noqa: E402
from scripts.cluster_rig import Rig, cluster, command_in  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.engine_rig import drop_page_cache  # noqa: E402

FILE_BYTES = 16 * MIB
FILES = 16  # a little more than the KV of a prompt of 1,900 tokens, of a model of 8B
NAMESPACE = b"kv/bench@0123456789abcdef0123456789abcdef"
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
buffer = memoryview(bytearray({size}))
began = time.perf_counter()
with socket.create_connection((sys.argv[1], {port})) as connection:
    for _ in range(int(sys.argv[2])):
        done = 0
        while done < len(buffer):
            done += connection.recv_into(buffer[done:])
print(time.perf_counter() - began)
""".replace("{port}", str(PORT)).replace("{size}", str(FILE_BYTES))


def store_files(client: Client, seed: int) -> list[bytes]:
    """So many files that no node has yet."""
    paths = []
    for index in range(FILES):
        [staged] = client.stage([FILE_BYTES])
        data = os.urandom(MIB) * (FILE_BYTES // MIB)
        data = seed.to_bytes(8, "little") + index.to_bytes(8, "little") + data[16:]
        os.pwrite(staged.fd, data, 0)
        os.close(staged.fd)
        path = b"bench/%d/%d" % (seed, index)
        digest = xxhash.xxh3_128_digest(data)
        client.publish([StagedFile(staged.token, path, digest, FILE_BYTES)])
        paths.append(path)
    return paths


def read_files(client: Client, paths: Sequence[bytes], buffer: memoryview) -> float:
    """Seconds to open and read them all, each checked, as an engine does."""
    began = time.perf_counter()
    for file in client.open(paths):
        if file is None:
            raise SystemExit("a file is missing")
        os.preadv(file.fd, [buffer], 0)
        if xxhash.xxh3_128_digest(buffer) != file.digest:
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
                str(len(files)),
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    return float(done.stdout)


def measure_reads(rig: Rig, rounds: int) -> dict[str, list[float]]:
    sender, receiver = rig.nodes
    spent: dict[str, list[float]] = {"remote_s": [], "raw_s": [], "again_s": []}
    buffer = memoryview(bytearray(FILE_BYTES))
    with Client(sender.store) as there, Client(receiver.store, deadline_s=60) as here:
        for number in range(rounds):
            paths = store_files(there, number)
            blobs = [
                sender.mountpoint.parent / "store" / "blobs" / d[:2] / d[2:4] / d
                for d in (digest_of(there, path) for path in paths)
            ]
            for name in ("remote_s", "raw_s") if number % 2 else ("raw_s", "remote_s"):
                if name == "raw_s":
                    spent[name].append(raw_transfer(rig, blobs))
                else:
                    spent[name].append(read_files(here, paths, buffer))
            spent["again_s"].append(read_files(here, paths, buffer))
    return spent


def digest_of(client: Client, path: bytes) -> str:
    inode = client.stat(path)
    assert inode is not None
    return inode.digest.hex()


def block_hash(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little")) * 2


def measure_lookups(rig: Rig, files: int, rounds: int) -> dict[str, float]:
    """Median milliseconds for 1,000 keys that this node never asked for, the same again, and one
    that nobody has."""
    sender, receiver = rig.nodes
    spent: dict[str, list[float]] = {"lookup_1000_ms": [], "again_ms": [], "one_miss_ms": []}
    with Client(sender.store) as there, Client(receiver.store) as here:
        for start in range(0, files, 100):
            staged = there.stage([8] * 100)
            items = []
            for number, item in enumerate(staged, start):
                data = number.to_bytes(8, "little")
                os.pwrite(item.fd, data, 0)
                os.close(item.fd)
                path = chunk_path(NAMESPACE, chunk_key(block_hash(number), 0, 0))
                items.append(StagedFile(item.token, path, xxhash.xxh3_128_digest(data), 8))
            there.publish(items)
        for number in range(min(rounds * 4, files // 1000)):
            keys = ChunkKeys(
                b"".join(block_hash(number * 1000 + n) for n in range(1000)), 32, ((0, 0),)
            )
            for name, asked in (
                ("lookup_1000_ms", keys),
                ("again_ms", keys),
                ("one_miss_ms", ChunkKeys(block_hash(files + number), 32, ((0, 0),))),
            ):
                began = time.perf_counter()
                found = here.lookup_chunks(NAMESPACE, asked)
                spent[name].append((time.perf_counter() - began) * 1e3)
                assert (None in found) == (name == "one_miss_ms")
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=20_000, help="names to look up among")
    parser.add_argument("--mbit", type=int, help="bound each cable")
    parser.add_argument("--directory", type=Path, help="where the stores lie; default: in /tmp")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-cluster-", dir=options.directory) as base,
        cluster(2, Path(base)) as rig,
    ):
        for node in rig.nodes:
            node.host.limit(options.mbit)
        spent = measure_reads(rig, options.rounds)
        lookups = measure_lookups(rig, options.files, options.rounds)
        drop_page_cache()
    ratios = [raw / ours for raw, ours in zip(spent["raw_s"], spent["remote_s"], strict=True)]
    total_mib = FILES * FILE_BYTES / MIB
    result = {
        "mbit": options.mbit,
        **{
            name.replace("_s", "_mib_s"): total_mib / statistics.median(values)
            for name, values in spent.items()
        },
        "remote_of_raw": statistics.median(ratios),
        "remote_of_raw_least": min(ratios),
        "remote_of_raw_most": max(ratios),
        **lookups,
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:20} {value if value is None else round(value, 3)}")


if __name__ == "__main__":
    main()
