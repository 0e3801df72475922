#!/usr/bin/env python3
"""What a mount's process has in memory while files are opened, read and closed a million times.

usage: soak_opens.py [--opens 1000000] [--files 1000] [--limit-mib 8] [--no-passthrough]
                     [--drop-caches] [--directory DIR] [--json]

Each of the opens is of one of `--files` files. Every 20th turn also does something that makes and
forgets state: it writes a file anew while somebody reads the old one, makes and removes a file,
asks for a name that is not there, lists a directory, or reads `.kvfs/status.json`. With
`--drop-caches`, every 2,000th lets the kernel forget names and inodes, so that they are looked up
again; that slows the whole machine down, and needs root. The first tenth fills what is bounded
(caches, buffers). After that the process's own memory (RssAnon; pages of the mapped database are
no leak) may grow by `--limit-mib` at most, else the exit code is 1.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.mount_rig import MountRig, mounted  # noqa: E402  (path first)

MIB = 1024 * 1024
FILE_BYTES = 4096
OTHER_EVERY = 20
FORGET_EVERY = 2_000
SAMPLES = 20  # of the memory, over all opens


@dataclass(frozen=True, slots=True)
class Sample:
    """The process after so many opens."""

    opens: int
    anonymous_bytes: int
    file_bytes: int
    descriptors: int
    opens_per_s: float


class Soak:
    """Opens files of a mount, and looks at its process now and then."""

    def __init__(self, rig: MountRig, files: int, *, drops_caches: bool) -> None:
        self._rig = rig
        self._drops_caches = drops_caches
        self._chance = random.Random(11)
        self._directory = rig.mountpoint / "soak"
        self._directory.mkdir()
        self._names = [os.fspath(self._directory / f"{number:06d}") for number in range(files)]
        for number, name in enumerate(self._names):
            self._write(name, number)
        self._versions = files
        self._others = (
            self._rewrite_under_a_reader, self._make_and_remove, self._miss, self._list,
            self._look_into_the_view,
        )  # fmt: skip

    def run(self, opens: int) -> list[Sample]:
        """All opens; what the process had from time to time, the first sample after a tenth."""
        samples = []
        step = max(1, opens // SAMPLES)
        begin_s = time.monotonic()
        for turn in range(1, opens + 1):
            name = self._names[turn % len(self._names)]
            fd = os.open(name, os.O_RDONLY)
            if os.pread(fd, 16, 0)[:4] != b"kvfs":
                raise RuntimeError(f"{name} has other bytes")
            os.close(fd)
            if turn % OTHER_EVERY == 0:
                self._others[turn // OTHER_EVERY % len(self._others)](turn)
            if self._drops_caches and turn % FORGET_EVERY == 0:
                Path("/proc/sys/vm/drop_caches").write_text("2\n")
            if turn % step == 0:
                elapsed_s, begin_s = time.monotonic() - begin_s, time.monotonic()
                samples.append(self._sample(turn, step / elapsed_s))
                _show(samples[-1])
        return samples[SAMPLES // 10 - 1 :]

    def _sample(self, opens: int, opens_per_s: float) -> Sample:
        status = {}
        for line in Path(f"/proc/{self._rig.pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            status[key] = value.strip()
        descriptors = len(os.listdir(f"/proc/{self._rig.pid}/fd"))
        anonymous, file = (int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
        return Sample(opens, anonymous, file, descriptors, opens_per_s)

    def _write(self, name: str, version: int) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, (b"kvfs %d " % version).ljust(FILE_BYTES, b"."))
        os.close(fd)

    # What makes and forgets state -----------------------------------------------------------------
    def _rewrite_under_a_reader(self, turn: int) -> None:
        name = self._chance.choice(self._names)
        reader = os.open(name, os.O_RDONLY)
        self._versions += 1
        self._write(name, self._versions)
        os.close(reader)

    def _make_and_remove(self, turn: int) -> None:
        name = os.fspath(self._directory / f"new-{turn}")
        self._write(name, -turn)
        os.rename(name, name + ".2")
        os.unlink(name + ".2")

    def _miss(self, turn: int) -> None:
        if os.path.exists(self._directory / f"missing-{turn}"):
            raise RuntimeError("a name that was never made is there")

    def _list(self, turn: int) -> None:
        with os.scandir(self._directory) as entries:
            next(entries)

    def _look_into_the_view(self, turn: int) -> None:
        (self._rig.mountpoint / ".kvfs" / "status.json").read_bytes()


def _show(sample: Sample) -> None:
    print(
        f"{sample.opens:>10,} opens  {sample.anonymous_bytes / MIB:7.2f} MiB own"
        f"  {sample.file_bytes / MIB:7.2f} MiB of files  {sample.descriptors:>4} descriptors"
        f"  {sample.opens_per_s:>8,.0f}/s",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--opens", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--limit-mib", type=float, default=8.0)
    parser.add_argument("--no-passthrough", action="store_true")
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--directory", type=Path, help="where the store is made")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-soak-") as scratch,
        mounted(Path(scratch), passthrough=not arguments.no_passthrough) as rig,
    ):
        soak = Soak(rig, arguments.files, drops_caches=arguments.drop_caches)
        samples = soak.run(arguments.opens)
    first, last = samples[0].anonymous_bytes, samples[-1].anonymous_bytes
    grown_bytes = last - first
    is_fine = grown_bytes <= arguments.limit_mib * MIB
    opens = samples[-1].opens - samples[0].opens
    if arguments.json:
        table = {
            "opens": opens,
            "first_bytes": first,
            "last_bytes": last,
            "grown_bytes": grown_bytes,
            "ok": is_fine,
        }
        print(json.dumps(table))
    else:
        print(
            f"{first / MIB:.2f} MiB before, {last / MIB:.2f} MiB after {opens:,} more opens:"
            f" {grown_bytes / MIB:+.2f} MiB, {grown_bytes / opens:+.2f} bytes an open;"
            f" {'ok' if is_fine else 'it grows'}"
        )
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
