#!/usr/bin/env python3
"""fio's own check of a mount: what it writes it reads again, each block with a crc32c.

usage: fio_mount.py [--mib 32] [--jobs 4] [--no-passthrough] [--directory DIR]

Sequential, random and mixed writes, O_DIRECT, mapped and with fsync, in blocks of 4 KiB to 1 MiB,
each by so many jobs at once with a file of its own. Prints what was verified; exit code 1 if fio
found a wrong block.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.mount_rig import mounted  # noqa: E402

DEADLINE_S = 1800
BLOCKS = "4k-1m"
WORKLOADS = {
    "write": ["--rw=write"],
    "write, fsync": ["--rw=write", "--fsync=16"],
    "write, O_DIRECT": ["--rw=write", "--direct=1"],
    "write, mapped": ["--rw=write", "--ioengine=mmap"],
    "randwrite": ["--rw=randwrite"],
    "randwrite, O_DIRECT": ["--rw=randwrite", "--direct=1"],
    "randwrite, mapped": ["--rw=randwrite", "--ioengine=mmap"],
    "randrw": ["--rw=randrw"],
}


def verify(directory: Path, words: list[str], mib: int, jobs: int) -> tuple[int, str]:
    """Run one workload: MiB that were read and checked, and what fio said of errors."""
    directory.mkdir(parents=True)
    done = subprocess.run(
        [
            "fio", "--output-format=json", "--name=job", f"--directory={directory}",
            f"--numjobs={jobs}", f"--size={mib}m", f"--bsrange={BLOCKS}", "--bs_unaligned=0",
            "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--group_reporting",
            "--ioengine=psync", "--verify_state_save=0", *words,
        ],
        check=False, capture_output=True, text=True, timeout=DEADLINE_S, cwd=directory.parent,
    )  # fmt: skip
    shutil.rmtree(directory)
    if done.returncode != 0:
        return 0, (done.stderr + done.stdout)[-2000:]
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job["read"]["io_bytes"] >> 20, "" if job["error"] == 0 else f"error {job['error']}"


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=32, help="of each job")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--no-passthrough", action="store_true")
    parser.add_argument("--directory", type=Path, help="where the store is made")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio_mount.py needs fio")
    failed = total_mib = 0
    with (
        tempfile.TemporaryDirectory(dir=options.directory, prefix="kvfs-fio-") as scratch,
        mounted(Path(scratch), passthrough=not options.no_passthrough) as rig,
    ):
        for number, (name, words) in enumerate(WORKLOADS.items()):
            place = rig.mountpoint / str(number)
            verified_mib, error = verify(place, words, options.mib, options.jobs)
            print(f"{name:22} {verified_mib:6} MiB verified  {error}", flush=True)
            failed += bool(error) or not verified_mib
            total_mib += verified_mib
    print(f"{total_mib} MiB in blocks of {BLOCKS} by {options.jobs} jobs: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
