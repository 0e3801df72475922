#!/usr/bin/env python3
"""How long a client of a node waits for a look-up while others write to the node's mount.

usage: bench_client_under_writes.py [--writers 3] [--seconds 8] [--directory DIR] [--json]

Each writer is a process that writes files of 16 MiB under a temporary name and renames them,
through the page cache or with O_DIRECT, whose writes pass through the mount's own thread. The
client asks for a name that nobody has, every 3 ms at most.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client  # noqa: E402  (path first)
from kvfs.config import MIB  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.file_rates import make_buffer  # noqa: E402
from scripts.mount_rig import MountRig, mounted  # noqa: E402

FILE_BYTES = 16 * MIB
FILES = 4  # of each writer, one over the other
PAUSE_S = 0.003
BEGIN_S = 0.5
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def write_files(folder: Path, number: int, flags: int, end_s: float) -> None:
    """Write files until a moment of the monotonic clock."""
    with make_buffer(FILE_BYTES) as buffer:
        buffer[:] = os.urandom(FILE_BYTES)
        written = 0
        while time.monotonic() < end_s:
            buffer[:8] = written.to_bytes(8, "little")
            name = folder / f"{number}-{written % FILES}"
            fd = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
            try:
                if os.write(fd, buffer) != FILE_BYTES:
                    raise RuntimeError("a short write")
            finally:
                os.close(fd)
            os.rename(f"{name}.tmp", name)
            written += 1


def measure(rig: MountRig, flags: int, writers: int, seconds: float) -> dict[str, float]:
    """Milliseconds that look-ups waited, and the GiB/s that were written meanwhile."""
    end_s = time.monotonic() + seconds
    processes = [
        multiprocessing.Process(target=write_files, args=(rig.mountpoint, number, flags, end_s))
        for number in range(writers)
    ]
    for process in processes:
        process.start()
    waited: list[float] = []
    time.sleep(BEGIN_S)
    with Client(rig.store) as client:
        before = client.status()["counters"]["published_bytes"]
        begin_s = time.monotonic()
        while time.monotonic() < end_s - BEGIN_S:
            asked_s = time.perf_counter()
            client.lookup([b"nobody has this"])
            waited.append((time.perf_counter() - asked_s) * 1000)
            time.sleep(PAUSE_S)
        published = client.status()["counters"]["published_bytes"] - before
        spent_s = time.monotonic() - begin_s
    for process in processes:
        process.join(seconds)
        if process.exitcode != 0:
            raise RuntimeError(f"a writer ended with {process.exitcode}")
    waited.sort()
    found = {name: waited[int(len(waited) * share)] for name, share in SHARES.items()}
    return {
        "look_ups": len(waited),
        **{f"{name}_ms": value for name, value in found.items()},
        "max_ms": waited[-1],
        "written_gib_s": published / 1024 / MIB / spent_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: /tmp's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-bench-") as scratch,
        mounted(Path(scratch)) as rig,
    ):
        found = {
            way: measure(rig, flags, arguments.writers, arguments.seconds)
            for way, flags in (("O_DIRECT", os.O_DIRECT), ("buffered", 0))
        }
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for way, figures in found.items():
        print(f"{way:10}", *(f"{name} {value:.4g}" for name, value in figures.items()), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
