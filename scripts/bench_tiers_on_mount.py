"""Engines' own disk tiers on a kvfs mount against the same tiers on a plain directory of that disk.

    .venv/bin/python scripts/bench_tiers_on_mount.py [--rounds 5] [--chunks 16] [--mib 32]
        [--jobs 4] [--tiers fs fs_native vllm] [--directory DIR] [--json]

The tiers are LMCache's L2 adapters `fs` and `fs_native` and vLLM's `fs` tier, real ones in their
own environments, each with O_DIRECT off and on; no engine and no model. A round, for the mount and
the plain directory in turns: write chunks that nobody has, as so many requests at once, read them
when the page cache was dropped (as root), and read them again. What is read is compared with what
was written, and one wrong byte ends the run without a ratio. A ratio is the throughput of the mount
over that of the plain directory, of two measurements that followed each other; shown are the median
of all pairs, the smallest and the largest. The mount is fresh and stays for the whole run.

Needs .envs/lmcache and .envs/vllm, and room for the chunks in memory and on the disk.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client  # noqa: E402  (path first)
from kvfs.config import GIB, MIB, UNCHANGED_S  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.engine_rig import OFFLINE  # noqa: E402
from scripts.memory_rig import drop_page_cache, warm_memory  # noqa: E402
from scripts.mount_rig import MountRig, mounted  # noqa: E402

ENVIRONMENTS = {"fs": "lmcache", "fs_native": "lmcache", "vllm": "vllm"}
NAMES = {"fs": "LMCache fs", "fs_native": "LMCache fs_native", "vllm": "vLLM fs"}
KINDS = ("write", "read", "read again")
ANSWER_DEADLINE_S = 600.0
STOP_DEADLINE_S = 30.0
FREED_DEADLINE_S = 60.0


@dataclass(slots=True)
class Cell:
    """A tier with O_DIRECT off or on, and what was measured: GiB/s of every round."""

    tier: str
    is_direct: bool
    mount: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    plain: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def name(self) -> str:
        return f"{NAMES[self.tier]}{', O_DIRECT' if self.is_direct else ''}"

    def ratios(self, kind: str) -> list[float]:
        return [m / p for m, p in zip(self.mount[kind], self.plain[kind], strict=True)]


class Driver:
    """A `scripts/tier_driver.py` that obeys."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._in: IO[bytes] = process.stdin
        self._out: IO[bytes] = process.stdout
        self._log = log
        self.wait_answer()  # that it is ready

    def ask(self, command: str, *words: object) -> Any:
        self._in.write(json.dumps([command, *words], default=str).encode() + b"\n")
        self._in.flush()
        return self.wait_answer()

    def wait_answer(self) -> Any:
        """RuntimeError with the end of its log when it says nothing."""
        is_there = select.select([self._out], [], [], ANSWER_DEADLINE_S)[0]
        line = self._out.readline() if is_there else b""
        if not line:
            raise RuntimeError("the tier failed:\n" + self._log.read_text(errors="replace")[-4000:])
        return json.loads(line)


@contextmanager
def driver_of(cell: Cell, arguments: argparse.Namespace, places: list[Path]) -> Iterator[Driver]:
    """Its process, for the length of the `with`."""
    log = places[0].parent / "driver.log"
    command = [ROOT / ".envs" / ENVIRONMENTS[cell.tier] / "bin" / "python"]
    command += [ROOT / "scripts" / "tier_driver.py", cell.tier, *places]
    options = ["--chunks", arguments.chunks, "--mib", arguments.mib, "--jobs", arguments.jobs]
    words = [*command, *options, *(["--odirect"] if cell.is_direct else [])]
    with (
        open(log, "wb") as said,
        subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, **OFFLINE},
        ) as process,
    ):
        try:
            yield Driver(process, log)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(STOP_DEADLINE_S)
        finally:
            process.kill()


def measure(cell: Cell, arguments: argparse.Namespace, plain: Path, rig: MountRig) -> None:
    """All rounds of one cell. RuntimeError when bytes came back other than they were written."""
    name = f"{cell.tier}-{'direct' if cell.is_direct else 'buffered'}"
    on_mount, on_disk = rig.mountpoint / name, plain / name
    on_mount.mkdir()
    on_disk.mkdir()
    gib = arguments.chunks * arguments.mib * MIB / GIB
    log_folder = [on_disk, on_mount]
    with driver_of(cell, arguments, log_folder) as driver:
        for number in range(arguments.rounds):
            turns = [(on_mount, cell.mount), (on_disk, cell.plain)]
            for place, figures in turns if number % 2 == 0 else turns[::-1]:
                drop_page_cache()  # which writes out what others have left
                warm_memory(arguments.chunks * arguments.mib * MIB)
                for kind, seconds in measure_once(driver, place, arguments.chunks):
                    figures[kind].append(gib / seconds)
                remove_chunks(place)
                wait_freed(rig.store)
            shown = "  ".join(f"{kind} {cell.ratios(kind)[-1]:.2f}" for kind in KINDS)
            print(f"{cell.name}: round {number + 1}: {shown}", file=sys.stderr)


def measure_once(driver: Driver, place: Path, chunks: int) -> Iterator[tuple[str, float]]:
    """Each kind and its seconds."""
    yield "write", driver.ask("write", place)["seconds"]
    time.sleep(UNCHANGED_S)  # a cache is read later than it is written
    drop_page_cache()
    for kind in KINDS[1:]:
        answer = driver.ask("read", place)
        if answer["right"] != chunks:
            raise RuntimeError(
                f"{place}: {answer['right']} of {chunks} chunks came back as they were written"
            )
        yield kind, answer["seconds"]


def remove_chunks(place: Path) -> None:
    """Remove what was stored; what the tier keeps of itself stays."""
    for folder, _, names in os.walk(place):
        for name in names:
            if not name.endswith(".json"):
                os.unlink(os.path.join(folder, name))


def wait_freed(store: Path) -> None:
    """Return when the store has given back what was removed, so that the next turn has the disk."""
    end_s = time.monotonic() + FREED_DEADLINE_S
    with Client(store) as client:
        while any(directory["trash_bytes"] for directory in client.status()["directories"]):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{store} does not give back what was removed")
            time.sleep(0.05)


def report(cells: list[Cell]) -> list[dict[str, Any]]:
    """The figures, ready for JSON."""
    return [
        {
            "tier": cell.name,
            "kind": kind,
            "mount_gib_per_s": statistics.median(cell.mount[kind]),
            "plain_gib_per_s": statistics.median(cell.plain[kind]),
            "ratio": statistics.median(cell.ratios(kind)),
            "ratios": cell.ratios(kind),
        }
        for cell in cells
        for kind in KINDS
    ]


def show(figures: list[dict[str, Any]], arguments: argparse.Namespace, is_cold: bool) -> None:
    print(
        f"{arguments.chunks} chunks of {arguments.mib} MiB, {arguments.jobs} jobs at once, medians"
        f" of {arguments.rounds} rounds; read: page cache {'dropped' if is_cold else 'NOT dropped'}"
    )
    print(f"{'':<28}{'':<12}{'mount':>9}{'plain':>9}   ratio (least, most)")
    for row in figures:
        speeds = f"{row['mount_gib_per_s']:>9.2f}{row['plain_gib_per_s']:>9.2f}"
        spread = f"({min(row['ratios']):.2f}, {max(row['ratios']):.2f})"
        print(f"{row['tier']:<28}{row['kind']:<12}{speeds}   {row['ratio']:.2f} {spread}")
    print("GiB/s; ratio: mount / plain directory")


def main() -> int:
    """Measure and print."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--tiers", choices=list(NAMES), nargs="+", default=list(NAMES))
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: /tmp's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for tier in arguments.tiers:
        if not (ROOT / ".envs" / ENVIRONMENTS[tier] / "bin" / "python").exists():
            sys.exit(f"bench_tiers_on_mount: run scripts/setup main {ENVIRONMENTS[tier]} first")
    cells = [Cell(tier, is_direct) for tier in arguments.tiers for is_direct in (False, True)]
    is_cold = drop_page_cache()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-bench-") as scratch:
        plain = Path(scratch) / "plain"
        plain.mkdir()
        with mounted(Path(scratch)) as rig:
            for cell in cells:
                measure(cell, arguments, plain, rig)
    figures = report(cells)
    if arguments.json:
        print(json.dumps({"is_cold": is_cold, "figures": figures}))
    else:
        show(figures, arguments, is_cold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
