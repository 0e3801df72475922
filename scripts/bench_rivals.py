"""kvfs, LMCache and vLLM's tiering read the same chunks from three slow directories: who is sooner.

    .venv/bin/python scripts/bench_rivals.py [--rounds 3] [--requests 64] [--chunks 8] [--mib 2]
        [--mb-per-s 80 40 24] [--bursts 16 64] [--odirect] [--kind nvme] [--directory DIR] [--json]

The three directories are FUSE file systems (scripts/slow_files.py) that give so many MB/s each and
keep nothing in the page cache, so that every read is cold; the same three for all systems, each of
which has its own folder in them. Every system stores all requests in all three beforehand, in its
own format, past the limit (payloads have the same size). Then, in each round and for the systems in
turns:

- offline: all requests at once; compared is payload over the time until the last is there;
- bursts: so many requests that come by chance (Poisson), 1.2 times as many bytes a second as
  LMCache gave from all three when asked for all at once (which is what its first tier sustains);
  compared is the mean time from arrival until the last byte is in the engine's blocks. Without
  LMCache there are none.

scripts/rival_driver.py says what each system is here; everything but the tiers' order is as it
comes. What is loaded is compared with what was stored: one wrong byte ends the run, and so does a
load that took less time than the tiers need for its bytes, which then came from elsewhere. Needs
.envs/lmcache, .envs/vllm, FUSE, and memory for 6 times the payload. Choose speeds at which the
processors are not what is measured: the summary says what the three file systems gave in all.
"""

import argparse
import filecmp
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import MIB  # noqa: E402  (path first)
from scripts.bench_tiers_on_mount import Driver  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.engine_rig import OFFLINE, remove_offload_region  # noqa: E402
from scripts.rival_systems import offload_region  # noqa: E402
from scripts.slow_files import SAVED_BYTES_MAX, SlowDirectory  # noqa: E402

ENVIRONMENTS = {"kvfs": ".venv", "lmcache": ".envs/lmcache", "vllm": ".envs/vllm"}
NAMES = {"kvfs": "kvfs", "lmcache": "LMCache", "vllm": "vLLM tiering"}
STOP_DEADLINE_S = 120.0  # a driver gives its server 70 s
BURST_LOAD = 1.2
WANTED_THROUGHPUT = 1.49
WANTED_BURST = 6.1


@dataclass(slots=True)
class Measured:
    """Of one system: MB/s of each round, and times of each burst of each round."""

    offline_mb_per_s: list[float] = field(default_factory=list)
    burst_s: dict[int, list[list[float]]] = field(default_factory=dict)

    def burst_mean_s(self, count: int) -> list[float]:
        return [statistics.fmean(took_s) for took_s in self.burst_s[count]]


@contextmanager
def driver_of(
    system: str, arguments: argparse.Namespace, folders: list[Path], log: Path
) -> Iterator[Driver]:
    """A process that obeys, for the length of the `with`."""
    command: list[Any] = [ROOT / ENVIRONMENTS[system] / "bin" / "python"]
    command += [ROOT / "scripts" / "rival_driver.py", system, *folders, "--log", log]
    command += ["--requests", arguments.requests, "--chunks", arguments.chunks]
    command += ["--mib", arguments.mib, "--kind", arguments.kind]
    command += ["--odirect"] if arguments.odirect else []
    with (
        open(log, "ab") as said,
        subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)},
        ) as process,
    ):
        assert process.stdin is not None
        is_well = False
        try:
            yield Driver(process, log)
            is_well = True
        finally:
            with suppress(BrokenPipeError):  # it has ended before it read all
                process.stdin.close()
            if not is_well:
                process.terminate()  # in the middle of a load it does not see the end of its input
            try:  # what its server made in shared memory goes only when it ends by itself
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait(STOP_DEADLINE_S)
            remove_offload_region(offload_region(process.pid))


def run_load(
    driver: Driver, system: str, times_s: list[float], arguments: argparse.Namespace
) -> Any:
    """One measurement. RuntimeError as `check` says."""
    answer = driver.ask("load", times_s)
    check(answer, system, len(times_s), arguments)
    return answer


def check(answer: Any, system: str, requests: int, arguments: argparse.Namespace) -> None:
    """RuntimeError when bytes came back other than they were stored, or sooner than the tiers can
    have given them."""
    if answer["right"] != requests:
        raise RuntimeError(f"{system}: {answer['right']} of {requests} requests came back")
    payload_bytes = requests * request_bytes(arguments)
    if answer["whole_s"] < (least_s := shortest_s(payload_bytes, arguments.mb_per_s)):
        raise RuntimeError(
            f"{system}: {payload_bytes / MIB:.0f} MiB came in {answer['whole_s']:.3f} s, and the"
            f" tiers need {least_s:.3f} s: not all of it was read there"
        )


def request_bytes(arguments: argparse.Namespace) -> int:
    return int(arguments.chunks * arguments.mib * MIB)


def shortest_s(payload_bytes: int, mb_per_s: list[float]) -> float:
    """How long the tiers take when each gives all that its server may catch up, and its rate."""
    saved_bytes = len(mb_per_s) * SAVED_BYTES_MAX
    return max(0, payload_bytes - saved_bytes) / (sum(mb_per_s) * 1e6)


def measure(
    arguments: argparse.Namespace, drivers: dict[str, Driver]
) -> tuple[dict[str, Measured], float]:
    """All rounds, and the bytes a second of the bursts; 0 without bursts."""
    measured = {system: Measured() for system in drivers}
    for number in range(arguments.rounds):
        for system in turns(drivers, number):
            times_s = [0.0] * arguments.requests
            answer = run_load(drivers[system], system, times_s, arguments)
            speed = arguments.requests * request_bytes(arguments) / answer["whole_s"] / 1e6
            measured[system].offline_mb_per_s.append(speed)
            note(f"round {number + 1}: offline {NAMES[system]}: {speed:.1f} MB/s")
    if not arguments.bursts:
        return measured, 0.0
    lmcache_bytes_per_s = statistics.median(measured["lmcache"].offline_mb_per_s) * 1e6
    burst_bytes_per_s = BURST_LOAD * lmcache_bytes_per_s
    for number in range(arguments.rounds):
        for count in arguments.bursts:
            times_s = arrivals(count, burst_bytes_per_s / request_bytes(arguments), seed=number)
            for system in turns(drivers, number):
                took_s = run_load(drivers[system], system, times_s, arguments)["took_s"]
                measured[system].burst_s.setdefault(count, []).append(took_s)
                mean_s = statistics.fmean(took_s)
                note(f"round {number + 1}: burst of {count} {NAMES[system]}: mean {mean_s:.3f} s")
    return measured, burst_bytes_per_s


def turns(drivers: dict[str, Driver], number: int) -> list[str]:
    """The systems, another one first in each round."""
    systems = list(drivers)
    first = number % len(systems)
    return systems[first:] + systems[:first]


def arrivals(count: int, per_s: float, seed: int) -> list[float]:
    """When the requests of a burst come; the first at once."""
    rng = random.Random(seed)
    times_s = [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + rng.expovariate(per_s))
    return times_s


def report(
    measured: dict[str, Measured], burst_bytes_per_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures, ready for JSON. Ratios are of two systems in the same round."""
    figures: dict[str, Any] = {
        "mb_per_s": arguments.mb_per_s,
        "burst_mb_per_s": burst_bytes_per_s / 1e6,
        "systems": {
            system: {
                "offline_mb_per_s": found.offline_mb_per_s,
                "offline_of_all_tiers": statistics.median(found.offline_mb_per_s)
                / sum(arguments.mb_per_s),
                "bursts": {str(count): summary(found, count) for count in arguments.bursts},
            }
            for system, found in measured.items()
        },
    }
    rivals = [system for system in measured if system != "kvfs"]
    if "kvfs" not in measured or not rivals:
        return figures
    mine = measured["kvfs"]
    better = max(rivals, key=lambda name: statistics.median(measured[name].offline_mb_per_s))
    figures["offline_ratios"] = [
        own / other
        for own, other in zip(mine.offline_mb_per_s, measured[better].offline_mb_per_s, strict=True)
    ]
    figures["burst_ratios"] = {
        rival: {
            str(count): [
                other / own
                for own, other in zip(
                    mine.burst_mean_s(count), measured[rival].burst_mean_s(count), strict=True
                )
            ]
            for count in arguments.bursts
        }
        for rival in rivals
    }
    return figures


def summary(found: Measured, count: int) -> dict[str, float]:
    """Of all requests of all bursts of a length."""
    took_s = sorted(second for burst in found.burst_s[count] for second in burst)
    return {
        "mean_s": statistics.median(found.burst_mean_s(count)),
        "p50_s": statistics.median(took_s),
        "slowest_s": took_s[-1],
    }


def show(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    speeds = " : ".join(f"{speed:g}" for speed in arguments.mb_per_s)
    print(
        f"{arguments.requests} requests of {arguments.chunks} chunks of {arguments.mib} MiB from"
        f" tiers of {speeds} MB/s; medians of {arguments.rounds} rounds"
    )
    for system, row in figures["systems"].items():
        speed = statistics.median(row["offline_mb_per_s"])
        print(
            f"{NAMES[system]:<14} offline {speed:>6.1f} MB/s,"
            f" {row['offline_of_all_tiers']:.2f} of what the tiers give together"
        )
        for count, burst in row["bursts"].items():
            print(
                f"{'':<14} burst of {count}: mean {burst['mean_s']:.3f} s,"
                f" p50 {burst['p50_s']:.3f} s, slowest {burst['slowest_s']:.3f} s"
            )
    if arguments.bursts:
        print(f"bursts bring {figures['burst_mb_per_s']:.1f} MB/s")
    if "offline_ratios" in figures:
        ratios = figures["offline_ratios"]
        bound = sum(arguments.mb_per_s) / arguments.mb_per_s[0]
        print(
            f"offline, kvfs / the better rival: {spread(ratios)}; wanted"
            f" {WANTED_THROUGHPUT}; all tiers / the first: {bound:.2f}"
        )
        for rival, by_count in figures["burst_ratios"].items():
            for count, ratios in by_count.items():
                wanted = f"; wanted {WANTED_BURST}" if rival == "lmcache" else ""
                print(f"burst of {count}, {NAMES[rival]} / kvfs: {spread(ratios)}{wanted}")


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def link_equal(folders: list[Path]) -> None:
    """Let files that all tiers have, under the same name with the same bytes, lie once on the disk
    below, so that three tiers need the room of one."""
    first, *others = folders
    for file in [path for path in first.rglob("*") if path.is_file()]:
        for other in others:
            twin = other / file.relative_to(first)
            if twin.is_file() and filecmp.cmp(file, twin, shallow=False):
                twin.unlink()
                twin.hardlink_to(file)


def note(text: str) -> None:
    print(f"bench_rivals: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8, help="of a request")
    parser.add_argument("--mib", type=int, default=2, help="of a chunk")
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[80.0, 40.0, 24.0])
    parser.add_argument("--bursts", type=int, nargs="+", help="lengths; default: 16 64")
    parser.add_argument("--systems", choices=list(NAMES), nargs="+", default=list(NAMES))
    parser.add_argument("--odirect", action="store_true", help="of LMCache; the others look")
    parser.add_argument(
        "--kind", choices=["nvme", "shared"], default="nvme", help="of kvfs's tiers"
    )
    parser.add_argument("--directory", type=Path, help="of the files; default: /tmp's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "lmcache" not in arguments.systems and arguments.bursts:
        parser.error("--bursts come at 1.2 times LMCache's rate: have lmcache among --systems")
    if arguments.bursts is None:
        arguments.bursts = [16, 64] if "lmcache" in arguments.systems else []
    if max(arguments.bursts, default=0) > arguments.requests:
        parser.error("a burst cannot have more requests than there are")
    for system in arguments.systems:
        if not (ROOT / ENVIRONMENTS[system] / "bin" / "python").exists():
            sys.exit(f"bench_rivals: run scripts/setup main {system} first")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-bench-") as scratch:
        folder = Path(scratch)
        places = [
            (folder / f"files{n}", folder / f"tier{n}") for n in range(len(arguments.mb_per_s))
        ]
        for system in arguments.systems:
            folders = [files / system for files, _ in places]
            with driver_of(system, arguments, folders, folder / f"{system}.log") as driver:
                driver.ask("store")
            link_equal(folders)
            note(f"{NAMES[system]} has stored")
        with ExitStack() as stack:
            for (files, tier), speed in zip(places, arguments.mb_per_s, strict=True):
                stack.enter_context(SlowDirectory(files, tier, speed * 1e6))
            drivers = {
                system: stack.enter_context(
                    driver_of(
                        system,
                        arguments,
                        [tier / system for _, tier in places],
                        folder / f"{system}.log",
                    )
                )
                for system in arguments.systems
            }
            measured, burst_bytes_per_s = measure(arguments, drivers)
    figures = report(measured, burst_bytes_per_s, arguments)
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(figures, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
