#!/usr/bin/env python3
"""A mount against ext4 (or whatever its store lies on), in turns, in one run.

usage: bench_mount.py [--rounds 7] [--files 16] [--directory DIR] [--rival COMMAND] [--quick]
                      [--json]

Two mounts are measured, each against a plain directory on the store's own disk: one as it is, with
FUSE passthrough where the kernel and pyfuse3 can, and one served from Python only. Compared are

- 16 MiB files, read whole (buffered, O_DIRECT, mapped and copied out), the page cache warm and (as
  root) cold, and written whole to a temporary name that is then renamed (and until the mount, which
  publishes large files a little later, has done so), by 1 and by 4 threads;
- open, read and close of small files, in microseconds;
- stat, create, rename, unlink and listing, per second;
- the processor time of the mount's process for each GiB read and written.

A ratio is mount / plain of two measurements that followed each other, the first by turns; shown are
the median of all pairs, the smallest and the largest.
"""

import argparse
import json
import mmap
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import GIB, KIB, MIB, UNCHANGED_S  # noqa: E402  (path first)
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.file_rates import (  # noqa: E402
    FILE_BYTES,
    OPENED,
    READS,
    Place,
    make_buffer,
    measure_names,
    measure_small,
    read_gib_s,
    write_gib_s,
)
from scripts.memory_rig import drop_page_cache  # noqa: E402
from scripts.mount_rig import SERVING_DEADLINE_S, STOP_DEADLINE_S, mounted  # noqa: E402

THREADS = (1, 4)
_WRITE_ROUNDS = 3
SMALL = {"64 KiB": 64 * KIB, "1 MiB": MIB}


@dataclass(slots=True)
class Series:
    """Pairs of one thing, measured in a mount and on the plain disk. What grows is better."""

    mount: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        ratios = [one / two for one, two in zip(self.mount, self.plain, strict=True)]
        return {
            "mount": statistics.median(self.mount),
            "plain": statistics.median(self.plain),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }


def measure_pairs(
    mount: Place,
    plain: Place,
    measure: Callable[[Place], float],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Measure both in turns; `before` runs before each measurement, untimed."""
    series = Series()
    for number in range(rounds):
        for place in (mount, plain) if number % 2 else (plain, mount):
            before()
            (series.plain if place is plain else series.mount).append(measure(place))
    return series.figures()


def compare_names(mount: Place, plain: Place, count: int, rounds: int) -> dict[str, object]:
    found: dict[str, Series] = {}
    for number in range(rounds):
        for place in (mount, plain) if number % 2 else (plain, mount):
            for kind, value in measure_names(place, count).items():
                series = found.setdefault(kind, Series())
                (series.plain if place is plain else series.mount).append(value)
    return {kind: series.figures() for kind, series in found.items()}


# All of it ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    rounds: int
    files: int
    passes: int  # over all files, in one warm measurement
    small_files: int
    names: int


def fill(place: Place, plan: Plan) -> None:
    """The files that are read."""
    kinds = {"large": (plan.files, FILE_BYTES)}
    kinds |= {kind: (plan.small_files, size) for kind, size in SMALL.items()}
    for kind, (count, size) in kinds.items():
        (place.folder / kind).mkdir(parents=True)
        for number in range(count):
            (place.folder / kind / f"{number:05}").write_bytes(os.urandom(size))


def measure_reading_cpu(
    mount: Place, passes: int, buffers: Sequence[mmap.mmap]
) -> dict[str, float]:
    """Milliseconds of the mount's processor time for each GiB that is read."""
    assert mount.rig is not None
    files = mount.files("large")
    gib = passes * len(files) * FILE_BYTES / GIB
    spent = {}
    for way in READS:
        used_s = mount.rig.cpu_s()
        read_gib_s(mount, way, 1, passes, buffers)
        spent[f"{way} read, opened each time"] = (mount.rig.cpu_s() - used_s) * 1000 / gib
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    used_s = mount.rig.cpu_s()
    for _ in range(passes):
        for fd in descriptors:
            os.preadv(fd, [buffers[0]], 0)
    spent["buffered read, opened once"] = (mount.rig.cpu_s() - used_s) * 1000 / gib
    for fd in descriptors:
        os.close(fd)
    return spent


def measure_bytes(mount: Place, plain: Place, plan: Plan) -> dict[str, object]:
    """16 MiB files in a mount against the plain directory."""
    buffers = [make_buffer(FILE_BYTES) for _ in range(max(THREADS))]
    for buffer in buffers:
        buffer[:] = os.urandom(FILE_BYTES)  # written, too
    for place in (mount, plain):  # digests are checked at the first open
        read_gib_s(place, "buffered", 1, 1, buffers)
    warm, cold, cpu = {}, {}, {}
    for way in (*READS, *OPENED):
        for threads in THREADS:
            name = f"{way} read, {threads} thread{'s' * (threads > 1)}"

            def read(place: Place, way: str = way, threads: int = threads) -> float:
                return read_gib_s(place, way, threads, plan.passes, buffers)

            def read_once(place: Place, way: str = way, threads: int = threads) -> float:
                return read_gib_s(place, way, threads, 1, buffers)

            warm[name] = measure_pairs(mount, plain, read, plan.rounds)
            if os.geteuid() == 0 and way in READS:
                rounds = max(1, plan.rounds // 2)
                cold[name] = measure_pairs(mount, plain, read_once, rounds, drop_page_cache)
                read_once(mount), read_once(plain)
    for threads in THREADS:
        for until_published in (False, True) if mount.rig else (False,):
            kind = "until published" if until_published else "renamed"
            name = f"written, {kind}, {threads} thread{'s' * (threads > 1)}"

            def write(
                place: Place, threads: int = threads, until_published: bool = until_published
            ) -> float:
                files = max(plan.files // 2, 4)
                return write_gib_s(place, threads, files, buffers, until_published=until_published)

            used_s = mount.rig.cpu_s() if mount.rig is not None else 0.0
            rounds = _WRITE_ROUNDS * plan.rounds  # a journal's turns make single ones differ widely
            warm[name] = measure_pairs(mount, plain, write, rounds)
            if mount.rig is not None:
                gib = rounds * max(plan.files // 2, 4) * FILE_BYTES / GIB
                cpu[name] = (mount.rig.cpu_s() - used_s) * 1000 / gib
    if mount.rig is not None:
        cpu |= measure_reading_cpu(mount, 4 * plan.passes, buffers)
    return {"warm_gib_s": warm, "cold_gib_s": cold, "server_cpu_ms_per_gib": cpu}


def measure_names_and_small(mount: Place, plain: Place, plan: Plan) -> dict[str, object]:
    """Calls on names, and small files, in a mount against the plain directory."""
    small = {}
    for kind, size in SMALL.items():
        with make_buffer(size) as buffer:

            def open_read_close(
                place: Place, kind: str = kind, buffer: mmap.mmap = buffer
            ) -> float:
                return measure_small(place, kind, buffer)

            open_read_close(mount), open_read_close(plain)
            small[kind] = measure_pairs(mount, plain, open_read_close, plan.rounds)
    names = compare_names(mount, plain, plan.names, max(3, plan.rounds // 2))
    return {"small_per_s": small, "names_per_s": names}


def run(base: Path | None, plan: Plan, rival: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=base, prefix="kvfs-bench-") as name:
        scratch = Path(name)
        plain = Place("plain", scratch / "plain")
        fill(plain, plan)
        for mode, passthrough in (("passthrough", True), ("python", False)):
            with mounted(scratch, mode, passthrough=passthrough) as rig:
                mount = Place(mode, rig.mountpoint / "bench", rig)
                fill(mount, plan)
                time.sleep(2 * UNCHANGED_S)  # what just changed is not served by the kernel
                found[mode] = {
                    **measure_bytes(mount, plain, plan),
                    **measure_names_and_small(mount, plain, plan),
                    "mode": json.loads((rig.mountpoint / ".kvfs" / "status.json").read_text())[
                        "mount"
                    ],
                }
        if rival:
            with _rival_mounted(rival, scratch) as mountpoint:
                other = Place("rival", mountpoint / "bench")
                fill(other, plan)
                found["rival"] = {
                    **measure_bytes(other, plain, plan),
                    **measure_names_and_small(other, plain, plan),
                    "mode": shlex.join(rival),
                }
    return found


@contextmanager
def _rival_mounted(command: Sequence[str], scratch: Path) -> Iterator[Path]:
    """Another file system, which shows a directory of the same disk at its mount point."""
    source, mountpoint = scratch / "rival", scratch / "rival.mnt"
    source.mkdir()
    mountpoint.mkdir()
    process = subprocess.Popen([*command, source, mountpoint], stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + SERVING_DEADLINE_S
        while not os.path.ismount(mountpoint):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{shlex.join(command)}: nothing is mounted")
            time.sleep(0.01)
        yield mountpoint
    finally:
        subprocess.run(["umount", mountpoint], check=False, timeout=STOP_DEADLINE_S)
        process.terminate()
        process.wait(STOP_DEADLINE_S)


def show(mode: str, found: dict[str, object]) -> None:
    def line(name: str, row: dict[str, float], digits: int, unit: float = 1.0) -> str:
        mount, plain = row["mount"] * unit, row["plain"] * unit
        spread = f"{row['ratio']:5.2f}  ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        return f"  {name:32} {mount:12.{digits}f} {plain:12.{digits}f}   {spread}"

    print(f"\n{mode}: {json.dumps(found['mode'])}")
    for title, key, digits in (
        ("16 MiB files, warm, GiB/s", "warm_gib_s", 2),
        ("16 MiB files, cold, GiB/s", "cold_gib_s", 2),
        ("names, calls per second", "names_per_s", 0),
    ):
        table: dict[str, dict[str, float]] = found[key]  # type: ignore[assignment]  # as put there
        if table:
            print(f"  {title:32} {'mount':>12} {'plain':>12}   ratio of pairs")
            for name, row in table.items():
                print(line(name, row, digits))
    print(f"  {'open, read, close: microseconds':32} {'mount':>12} {'plain':>12}")
    small: dict[str, dict[str, float]] = found["small_per_s"]  # type: ignore[assignment]
    for name, row in small.items():
        times = {"mount": 1e6 / row["mount"], "plain": 1e6 / row["plain"]}
        print(line(name, {**row, **times}, 1))
    if not found["server_cpu_ms_per_gib"]:
        return
    print("  processor time of the mount's process, ms per GiB")
    for name, value in found["server_cpu_ms_per_gib"].items():  # type: ignore[attr-defined]
        print(f"  {name:32} {value:12.1f}")


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=16, help="of 16 MiB")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: /tmp's")
    parser.add_argument(
        "--rival",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="also another FUSE file system, which COMMAND SOURCE MOUNTPOINT mounts and serves,"
        ' such as libfuse\'s example "passthrough_hp --foreground"',
    )
    parser.add_argument("--quick", action="store_true", help="few of everything, to see it run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    plan = Plan(arguments.rounds, arguments.files, passes=4, small_files=200, names=2000)
    if arguments.quick:
        plan = Plan(rounds=2, files=4, passes=1, small_files=20, names=100)
    found = run(arguments.directory, plan, arguments.rival)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for mode, figures in found.items():
            show(mode, figures)  # type: ignore[arg-type]  # a table of tables
    return 0


if __name__ == "__main__":
    sys.exit(main())
