#!/usr/bin/env python3
"""Reading from three tiers at once: production's transfer against what others do.

usage: bench_tiers.py [--only NAMES] [--rounds 5] [--seconds 4] [--dir DIR] [--json] [--plot DIR]

Three tiers of real files, each behind a token bucket, 1 : 0.5 : 0.3, slow enough that neither disk
nor processor decides. All of them hold all chunks. In each round all sides have their turn:
  steady    all tiers together, against the sum of what each gives alone
  changing  each tier's speed is between 0.2 and 1 of its full one, another every 0.5 s by chance,
            for all sides the same; against what the tiers could give until the job ended
  frozen    the fastest tier freezes in the middle of a job; against a job without it. And how
            long after it thaws it is read from again, by itself
  corrupt   one byte is wrong in 1% of the fastest tier's reads; against the same without
  single    one chunk after the other, 2% of the fastest tier's reads 20 times slower; with hedges
            and without
  cost      processor time of a chunk of 4 KiB at full speed; against read and digest alone
Beside it, where that says something: each chunk from the first tier in the list, as vLLM and
LMCache do, and a static split by the mean speeds. Prints medians of the rounds, smallest and
largest; a job's bytes are compared with their digests by who gets them, once more. With --plot
pictures are drawn, for which matplotlib is needed (scripts/setup plots).
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import MIB  # noqa: E402  (path first)
from kvfs.digest import digest_of  # noqa: E402
from kvfs.settings.words import TierConfig, TierKind  # noqa: E402  (path first)
from kvfs.tiers.contract import WritableTier  # noqa: E402
from kvfs.tiers.directory import DirectoryTier  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.tier_rig import RigTier  # noqa: E402
from scripts.tier_scenarios import LIMITS, SCENARIOS, SMALL_BYTES, Ground, Table  # noqa: E402

SHARES = (1.0, 0.5, 0.3)  # of the fastest tier's speed
BURST_BYTES = 4 * MIB  # what a thread that wakes late on a busy machine does not lose
STORED = 32  # chunks; a job reads them again and again


@contextmanager
def ground_of(arguments: argparse.Namespace) -> Iterator[Ground]:
    """Three tiers with all chunks, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=arguments.dir))
    try:
        size_bytes = int(arguments.chunk_mib * MIB)
        chunks = {digest_of(data): data for data in (os.urandom(size_bytes) for _ in range(STORED))}
        small = {digest_of(data): data for data in (os.urandom(SMALL_BYTES) for _ in range(STORED))}
        inner: list[WritableTier] = []
        for number in range(len(SHARES)):
            path = directory / str(number)
            config = TierConfig(f"tier-{number}", TierKind.NVME, LIMITS, path, min_free=0)
            inner.append(DirectoryTier(config, "bench"))
            for digest, data in (chunks | small).items():
                inner[-1].put(digest, memoryview(data), len(data))
        speeds = [share * arguments.mib_s * MIB for share in SHARES]
        rigs = [
            RigTier(tier, bytes_per_s=speed, burst_bytes=BURST_BYTES, seed=arguments.seed)
            for tier, speed in zip(inner, speeds, strict=True)
        ]
        yield Ground(
            inner,
            rigs,
            list(chunks),
            size_bytes,
            list(small),
            speeds,
            arguments.seconds,
            arguments.seed,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def shown(row: dict[str, object]) -> str:
    bad = f"  WRONG {row['wrong']}" if row["wrong"] else ""
    bad += f"  lost {row['lost']}" if row["lost"] else ""
    return (
        f"{row['scenario']:<10}{row['side']:<24}{row['median']:>10} {row['unit']}"
        f" ({row['smallest']} to {row['largest']}){bad}"
    )


def main() -> int:
    """Exit code 1 when a wrong byte was handed over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one job at full speed")
    parser.add_argument("--mib-s", type=float, default=120.0, help="of the fastest tier")
    parser.add_argument("--chunk-mib", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="a directory for pictures")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}; known are: {', '.join(SCENARIOS)}")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; run scripts/setup plots first")
    clean_up_on_sigterm()
    table = Table()
    with ground_of(arguments) as ground:
        for number in range(arguments.rounds):
            for name in names:
                SCENARIOS[name](ground, number, table)
    rows = [row.as_dict() for row in table.rows.values()]
    for row in rows:
        print(json.dumps(row) if arguments.json else shown(row))
    if arguments.plot:
        from scripts.tier_plots import draw

        for path in draw(table, ground.speeds, arguments.plot):
            print(f"drawn: {path}", file=sys.stderr)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
