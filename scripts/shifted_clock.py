#!/usr/bin/env python3
"""The `kvfs` command on a machine whose clock is wrong.

usage: shifted_clock.py SECONDS COMMAND...

All that the process asks of the time of day is so many seconds ahead, or behind when they are
negative; what it asks of the time that has passed is right, as it is on such a machine.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def shift(seconds: int) -> None:
    """Set this process's clock ahead. Before anything of kvfs is imported."""
    right_s, right_ns = time.time, time.time_ns
    time.time = lambda: right_s() + seconds
    time.time_ns = lambda: right_ns() + seconds * 1_000_000_000


def main() -> int:
    shift(int(sys.argv[1]))
    from kvfs.cli import main as kvfs_main

    return kvfs_main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
