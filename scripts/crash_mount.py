#!/usr/bin/env python3
"""kill -9 of the mount's process, again and again, while files are written and read.

usage: crash_mount.py [--rounds 200] [--seed N] [--writers 3] [--directory DIR] [--json]

Each round mounts the same store at the same place, checks what is there, lets writers and readers
work for a random while, and kills the process; some rounds kill it while it starts. A file tells by
itself whether it is whole: its first bytes say which file, version and length it is, its last are
the digest of the rest. What must hold:

- A version whose close() (or rename, or unlink) returned is there, whole, unless a later one is.
- No name ever shows part of a version: not after a restart, not to readers of files that are
  renamed into place, not to clients of the node's socket, at any time.
- There is one mount entry while it is mounted and after a kill, at most one while it starts.
- Soon after a restart no file of the run before lies in staging.

Exit code 1 when one of these did not hold.
"""

import argparse
import errno
import json
import mmap
import os
import random
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.client import Client  # noqa: E402  (path first)
from kvfs.errors import KvfsError  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.mount_rig import MountRig  # noqa: E402

NAMES_PER_WRITER = 24
# Above a megabyte the mount publishes what it wrote to, a little after its close, else a copy.
SIZE_MAX = 3_000_000
LARGE_MIN = 1_100_000
LARGE_SHARE = 0.5  # of the rounds: all files are that large, and stages have their blocks before
ASKING_SHARE = 0.5  # of the rounds: readers ask the node as well, which then publishes at once
STARTING_SHARE = 0.1  # of the rounds: killed while it starts
REMOVED_S = 5.0  # in it a start has removed what it replaced
_HEAD = struct.Struct("<8s16sQQ")  # mark, name, version, bytes of the whole file
_MARK = b"kvfscrsh"
_DIGEST_BYTES = 8
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV, errno.EFAULT)


# Files that tell whether they are whole -----------------------------------------------------------
def build(name: str, version: int, size: int) -> bytes:
    """A file of about `size` bytes."""
    body = os.urandom(size)
    head = _HEAD.pack(_MARK, name.encode(), version, _HEAD.size + size + _DIGEST_BYTES)
    return head + body + xxhash.xxh3_64_digest(head + body)


def version_of(name: str, data: bytes) -> int:
    """The version of a file that is whole; ValueError, with what is wrong, for any other."""
    if len(data) < _HEAD.size + _DIGEST_BYTES:
        raise ValueError(f"{name}: {len(data)} bytes are no file")
    mark, named, version, length = _HEAD.unpack_from(data)
    if mark != _MARK or named.rstrip(b"\0") != name.encode() or length != len(data):
        raise ValueError(f"{name}: {len(data)} bytes of a file of {length}, named {named!r}")
    if xxhash.xxh3_64_digest(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
        raise ValueError(f"{name}: version {version} has wrong bytes")
    return int(version)


# The load -----------------------------------------------------------------------------------------
class Writer(threading.Thread):
    """Writes, replaces and removes its own files in every way until the mount dies.

    `possible`: which versions each name may show; 0 is none. Before a call that is two of them,
    after it has returned one.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        seed: int,
        known: dict[str, set[int]],
        *,
        all_large: bool,
    ) -> None:
        super().__init__()
        self.possible = known
        self.counts: Counter[str] = Counter()
        self.problem: str | None = None
        self.is_killed = threading.Event()
        self._directory = directory
        self._number = number
        self._chance = random.Random(seed)
        self._all_large = all_large
        self._last = max((max(versions) for versions in known.values()), default=0)

    def run(self) -> None:
        try:
            while not self.is_killed.is_set():
                self._step()
        except OSError as error:
            if not self.is_killed.is_set() or error.errno not in _DEAD:
                self.problem = f"writer {self._number}: {error}"

    def _step(self) -> None:
        slot = self._chance.randrange(NAMES_PER_WRITER)
        is_renamed = slot % 2 == 0  # so that readers know which names are always whole
        name = f"{'r' if is_renamed else 'w'}-{self._number}-{slot}"
        before = self.possible.get(name, {0})
        if self._chance.random() < 0.15 and before != {0}:
            self._change(name, 0, "unlinked", lambda: os.unlink(self._directory / name))
            return
        self._last += 1
        any_size = self._chance.randrange(LARGE_MIN if self._all_large else 0, SIZE_MAX)
        others = () if self._all_large else (0, 1000, 70_000, any_size)
        size = self._chance.choice((any_size, *others))
        data = build(name, self._last, size)
        if is_renamed:
            self._change(name, self._last, "renamed", lambda: self._rename(name, data))
        elif self._chance.random() < 0.2:
            self._change(name, self._last, "mapped", lambda: self._map(name, data))
        else:
            self._change(name, self._last, "overwritten", lambda: self._write(name, data))

    def _change(self, name, version, kind, call) -> None:  # type: ignore[no-untyped-def]  # a lambda
        self.possible[name] = self.possible.get(name, {0}) | {version}
        call()
        self.possible[name] = {version}
        self.counts[kind] += 1

    def _write(self, name: str, data: bytes) -> None:
        fd = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            step = self._chance.choice((4096, 65_536, 131_072, len(data)))
            for start in range(0, len(data), step):
                os.write(fd, data[start : start + step])
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # outside: what it says is what counts

    def _rename(self, name: str, data: bytes) -> None:
        self._write(f"{name}.tmp", data)
        os.rename(self._directory / f"{name}.tmp", self._directory / name)

    def _map(self, name: str, data: bytes) -> None:
        fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(fd, len(data))
            with mmap.mmap(fd, len(data)) as mapped:
                _fill(mapped, data)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _fill(mapped: mmap.mmap, data: bytes) -> None:
    """Store through a mapping by a system call: without its file, that is EFAULT, not SIGBUS."""
    source = os.memfd_create("data")
    try:
        os.write(source, data)
        with memoryview(mapped) as room:
            done = 0
            while done < len(data):
                done += os.preadv(source, [room[done:]], done)
    finally:
        os.close(source)


class Reader(threading.Thread):
    """Reads files that must always be whole: those renamed into place through the mount, and, if
    it `asks`, all of them through the node's socket."""

    def __init__(
        self, rig: MountRig, directory: Path, seed: int, writers: int, *, asks: bool
    ) -> None:
        super().__init__()
        self.reads = 0
        self.problem: str | None = None
        self.is_killed = threading.Event()
        self._rig = rig
        self._directory = directory
        self._chance = random.Random(seed)
        self._writers = writers
        self._asks = asks

    def run(self) -> None:
        try:
            with Client(self._rig.store) as client:
                while not self.is_killed.is_set():
                    slot = self._chance.randrange(NAMES_PER_WRITER)
                    number = self._chance.randrange(self._writers)
                    if slot % 2 == 0 and self._chance.random() < 0.6:
                        self._read(f"r-{number}-{slot}")
                    elif self._asks:
                        self._ask(client, f"{'w' if slot % 2 else 'r'}-{number}-{slot}")
        except ValueError as error:
            self.problem = f"partial while it ran: {error}"
        except (OSError, KvfsError) as error:
            if not self.is_killed.is_set():
                self.problem = f"reader: {error}"

    def _read(self, name: str) -> None:
        try:
            data = (self._directory / name).read_bytes()
        except FileNotFoundError:
            return
        version_of(name, data)
        self.reads += 1

    def _ask(self, client: Client, name: str) -> None:
        (found,) = client.open([f"{self._directory.name}/{name}".encode()])
        if found is not None:
            with found:
                version_of(name, os.pread(found.fd, found.size_bytes + 1, 0))
            self.reads += 1


# The rounds ---------------------------------------------------------------------------------------
@dataclass
class Report:
    """What happened in all rounds."""

    seed: int
    rounds: int = 0
    killed_at_start: int = 0
    checked_files: int = 0
    reads_meanwhile: int = 0
    written: Counter[str] = field(default_factory=Counter)
    start_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "kills": self.rounds,
            "killed_while_it_started": self.killed_at_start,
            "changes_that_returned": dict(self.written),
            "files_checked_after_restarts": self.checked_files,
            "reads_meanwhile": self.reads_meanwhile,
            "restart_s_median": round(statistics.median(self.start_s), 3),
            "restart_s_max": round(max(self.start_s), 3),
            "problems": self.problems,
        }


class Crashes:
    """One store, one mount point, and what its files may hold."""

    def __init__(self, scratch: Path, seed: int, writers: int) -> None:
        self.rig = MountRig(scratch / "store", scratch / "mnt")
        self.rig.mountpoint.mkdir()
        self.report = Report(seed)
        self._chance = random.Random(seed)
        self._directory = self.rig.mountpoint / "load"
        self._known: list[dict[str, set[int]]] = [{} for _ in range(writers)]

    def run_round(self) -> None:
        """Mount, check, work, kill."""
        self.report.rounds += 1
        if self.report.rounds > 1 and self._chance.random() < STARTING_SHARE:
            self.rig.launch()
            time.sleep(self._chance.uniform(0.0, 0.8))
            self.report.killed_at_start += 1
            self.rig.kill()
            if self.rig.count_entries() > 1:
                self._complain(f"{self.rig.count_entries()} mount entries")
            return
        self.start()
        self._load(self._chance.uniform(0.02, 1.0))
        if self.rig.count_entries() != 1:
            self._complain(f"{self.rig.count_entries()} mount entries after the kill")

    def start(self) -> None:
        """Mount again, and check all that must hold then."""
        begin_s = time.monotonic()
        self.rig.start()
        self.report.start_s.append(time.monotonic() - begin_s)
        if self.rig.count_entries() != 1:
            self._complain(f"{self.rig.count_entries()} mount entries")
        end_s = time.monotonic() + REMOVED_S
        while (stale := os.listdir(self.rig.store / "staging")) and time.monotonic() < end_s:
            time.sleep(0.05)
        if stale:
            self._complain(f"left in staging: {stale[:3]}")
        self._directory.mkdir(exist_ok=True)
        names = set(os.listdir(self._directory))
        for known in self._known:
            for name, possible in known.items():
                found = self._check(name) if name in names else 0
                if found not in possible:
                    self._complain(f"{name} is version {found}, not of {sorted(possible)}")
                known[name] = {found}
                names.discard(name)
        for name in names:  # on their way to be renamed; closed, so they are whole
            if not name.endswith(".tmp"):
                self._complain(f"{name} was never made")
            self._check(name)
            os.unlink(self._directory / name)

    def _check(self, name: str) -> int:
        self.report.checked_files += 1
        try:
            data = (self._directory / name).read_bytes()
            return version_of(name.removesuffix(".tmp"), data)
        except (ValueError, OSError) as error:
            self._complain(f"partial after a restart: {error}")
            return -1

    def _load(self, seconds: float) -> None:
        seed = self._chance.randrange(2**32)
        all_large = self._chance.random() < LARGE_SHARE
        writers = [
            Writer(self._directory, number, seed + number, known, all_large=all_large)
            for number, known in enumerate(self._known)
        ]
        asks = self._chance.random() < ASKING_SHARE
        readers = [
            Reader(self.rig, self._directory, seed - n, len(writers), asks=asks) for n in (1, 2)
        ]
        threads: list[Writer | Reader] = [*writers, *readers]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        for thread in threads:
            thread.is_killed.set()
        self.rig.kill()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                self._complain("a call hangs after the kill")
            if thread.problem:
                self._complain(thread.problem)
        self.report.reads_meanwhile += sum(reader.reads for reader in readers)
        for writer in writers:
            self.report.written.update(writer.counts)

    def _complain(self, words: str) -> None:
        self.report.problems.append(f"round {self.report.rounds}: {words}")


def crash(scratch: Path, *, rounds: int, seed: int, writers: int = 3) -> Report:
    """Kill a mount below `scratch` so many times, then mount, check and unmount it once more."""
    crashes = Crashes(scratch, seed, writers)
    report = crashes.report
    try:
        for _ in range(rounds):
            crashes.run_round()
        crashes.start()
    finally:
        if crashes.rig.stop() != 0:
            report.problems.append("the last mount did not end cleanly")
    if crashes.rig.count_entries():
        report.problems.append("still mounted at the end")
    for line in crashes.rig.log.read_text(errors="replace").splitlines():
        if any(word in line for word in ("ERROR", "CRITICAL", "Traceback", "quarantined")):
            report.problems.append(f"in the log: {line}")
    return report


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to make store and mount point")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-crash-") as scratch:
        report = crash(
            Path(scratch), rounds=arguments.rounds, seed=arguments.seed, writers=arguments.writers
        )
    summary = report.summary()
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        for name, value in summary.items():
            if name != "problems":
                print(f"{name:30} {value}")
        for problem in report.problems:
            print(f"PROBLEM: {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
