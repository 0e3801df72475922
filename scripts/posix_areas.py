#!/usr/bin/env python3
"""How many POSIX cases the tests have in each area, as pjdfstest names its areas.

usage: posix_areas.py

A case's area is the first word of its id that names one, else of its test's name.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
AREAS = {  # and the words of ids that name them
    "chmod": "chmod setuid setgid",
    "chown": "chown",
    "directories": "directories directory listing listings dot tree",
    "fcntl": "fcntl locks",
    "flock": "flock",
    "fsync": "fsync",
    "ftruncate": "ftruncate",
    "link": "link",
    "lseek": "lseek sparse",
    "mkdir": "mkdir",
    "mkfifo": "mkfifo",
    "mknod": "mknod",
    "mmap": "mmap",
    "open": "open append names file files program",
    "posix_fallocate": "posix_fallocate fallocate",
    "random": "random exercise wrong",
    "read": "read",
    "rename": "rename",
    "rewrite": "rewrite",
    "rmdir": "rmdir",
    "stat": "stat",
    "statfs": "statfs df du",
    "symlink": "symlink",
    "truncate": "truncate",
    "umask": "umask",
    "unlink": "unlink",
    "utimensat": "utimensat time times",
    "write": "write",
}
AREA_OF = {word: area for area, words in AREAS.items() for word in words.split()}


def area_of(test: str) -> str:
    """The area of a test's id, "other" when nothing names one."""
    name, _, parameters = test.partition("[")
    words = re.split(r"[^a-z_]+", parameters) + re.split(r"[^a-z]+", name.rpartition("::")[2])
    return next((AREA_OF[word] for word in words if word in AREA_OF), "other")


def main() -> int:
    tests = sorted((ROOT / "tests" / "e2e").glob("test_posix_*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *map(str, tests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    cases = [line for line in done.stdout.splitlines() if "::" in line and "plain" not in line]
    counts = Counter(area_of(case) for case in cases)
    for area, count in sorted(counts.items(), key=lambda item: (item[0] == "other", item[0])):
        print(f"{area:16} {count:5}")
    print(f"{'all':16} {len(cases):5}  in the mount; most run on a plain disk, too")
    return 0


if __name__ == "__main__":
    sys.exit(main())
