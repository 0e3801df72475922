#!/usr/bin/env python3
"""List a large directory again and again while names in it come, go and are renamed.

usage: exercise_directory.py [--entries 100000] [--seconds 60] [--seed N] [--directory DIR]

Every name that was there all the time must be listed exactly once by each listing; names that
change may be or not, as POSIX says. Exit code 1 when one was lost or doubled. Without --directory a
fresh store is made and mounted, and removed afterwards.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.mount_rig import fresh_place  # noqa: E402  (path first)


@dataclass(frozen=True, slots=True)
class Listed:
    """What listing a changing directory showed."""

    listings: int
    changes: int
    problems: list[str]


def list_while_changing(directory: Path, entries: int, *, seconds: float, seed: int) -> Listed:
    """List names that stay, again and again, while a process changes others beside them."""
    stable = [f"stable-{number:07}" for number in range(entries)]
    for number, name in enumerate(stable):
        if number % 10:
            os.symlink("target", directory / name)
        else:
            os.mknod(directory / name)
    context = get_context("fork")
    stopping, changes = context.Event(), context.Value("q", 0)
    changer = context.Process(
        target=_change_names, args=(directory, entries, seed, stopping, changes)
    )
    changer.start()
    problems: list[str] = []
    listings, end_s = 0, time.monotonic() + seconds
    try:
        while not problems and (time.monotonic() < end_s or not listings or not changes.value):
            problems += _compare(Counter(_names(directory)), stable)
            listings += 1
    finally:
        stopping.set()
        changer.join(60)
    if changer.exitcode:
        problems.append(f"who changed names ended with {changer.exitcode}")
    return Listed(listings, changes.value, problems)


def _names(directory: Path) -> Iterator[str]:
    with os.scandir(directory) as found:
        for entry in found:
            yield entry.name


def _compare(seen: Counter[str], stable: list[str]) -> list[str]:
    lost = [name for name in stable if not seen[name]]
    doubled = [name for name in stable if seen[name] > 1]
    return [
        f"{len(names)} entries {what}, such as {names[0]}"
        for what, names in (("lost", lost), ("doubled", doubled))
        if names
    ]


def _change_names(  # type: ignore[no-untyped-def]  # multiprocessing's own objects
    directory: Path, entries: int, seed: int, stopping, changes
) -> None:
    """Make, rename and remove names all over the order, until told to stop."""
    chance = random.Random(seed)
    there: list[Path] = []
    while not stopping.is_set():
        # A prefix of a stable name, so that changes fall between those.
        path = directory / f"stable-{chance.randrange(entries):07}{chance.randbytes(3).hex()}"
        choice = chance.random()
        if choice < 0.5 or not there:
            try:
                os.symlink("changing", path)
                there.append(path)
            except FileExistsError:
                continue
        elif choice < 0.75:
            index = chance.randrange(len(there))
            os.rename(there[index], path)
            there[index] = path
        else:
            os.unlink(there.pop(chance.randrange(len(there))))
        changes.value += 1


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--directory", type=Path, help="in a mount, or on any disk")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with fresh_place(arguments.directory) as place:
        begin_s = time.monotonic()
        found = list_while_changing(
            place, arguments.entries, seconds=arguments.seconds, seed=arguments.seed
        )
        seconds = time.monotonic() - begin_s
    print(
        f"{found.listings} listings of {arguments.entries} names in {seconds:.0f} s (filling"
        f" included), {found.changes} changes meanwhile"
    )
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
