#!/usr/bin/env python3
"""Random calls on files of a mount against a model in memory.

usage: exercise_mount.py [--operations 100000] [--processes 2] [--files 3] [--seed N]
                         [--size-max BYTES] [--directory DIR]

The method is fsx's: one random call after the other (read, write, append, truncate, map for
reading and writing, allocate, punch, sync, close and open again) on files whose right content is
known; each byte that is read is compared. On a mount of kvfs, readers that opened an older version
must keep it. With several processes and files they run at once, each process on files of its own.
The first mismatch ends a process, with its seed and the last calls, and the exit code is 1.

Without --directory a fresh store is made and mounted, and removed afterwards.
"""

import argparse
import ctypes
import errno
import mmap
import os
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.mount_rig import fresh_place  # noqa: E402  (path first)

SIZE_MAX = 700_000
_READERS_MAX = 3  # of older versions, of each file
_HISTORY = 24
_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)


class Mismatch(Exception):
    """A file does not hold what it must."""


def find_difference(found: bytes, expected: bytes) -> str:
    """Where two runs of bytes differ first, in words."""
    if len(found) != len(expected):
        return f"{len(found)} bytes instead of {len(expected)}"
    for offset, (one, two) in enumerate(zip(found, expected, strict=True)):
        if one != two:
            many = sum(a != b for a, b in zip(found, expected, strict=True))
            return f"byte {offset} is {one:#04x} instead of {two:#04x}, {many} differ"
    return "nothing differs"


@dataclass
class Exercised:
    """One file, what it must hold, and who has it open."""

    path: Path
    chance: random.Random
    size_max: int
    keeps_versions: bool
    content: bytearray = field(default_factory=bytearray)
    fd: int = -1
    readers: list[tuple[int, bytes]] = field(default_factory=list)
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)

    # Helpers --------------------------------------------------------------------------------------
    def span(self, limit: int) -> tuple[int, int]:
        """An offset below `limit` and a length, often at a page's or a request's edge."""
        if limit <= 0:
            return 0, 0
        offset = self.chance.randrange(limit)
        if self.chance.random() < 0.3:
            offset -= offset % self.chance.choice((512, 4096, 131_072))
        length = self.chance.choice((1, 7, 512, 4096, 4097, 30_000, 131_072, 250_000))
        return offset, min(self.chance.randint(1, length), limit - offset)

    def check(self, found: bytes, offset: int, expected: bytes) -> None:
        if found != expected:
            raise Mismatch(f"at offset {offset}: {find_difference(found, expected)}")

    def put(self, offset: int, data: bytes) -> None:
        """Note in the model what was written."""
        if offset > len(self.content):
            self.content.extend(bytes(offset - len(self.content)))
        self.content[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))

    def note(self, words: str) -> None:
        self.history.append(words)

    # Calls ----------------------------------------------------------------------------------------
    def do_read(self) -> None:
        offset, length = self.span(len(self.content) + 5000)
        self.note(f"read {offset} {length}")
        found = os.pread(self.fd, length, offset)
        self.check(found, offset, bytes(self.content[offset : offset + length]))

    def do_read_anew(self) -> None:
        self.note("read all, by another open")
        flags = os.O_RDONLY | (os.O_DIRECT if self.chance.random() < 0.2 else 0)
        fd = os.open(self.path, flags)
        try:
            room = mmap.mmap(-1, max(4096, -(-len(self.content) // 4096) * 4096 + 4096))
            count = done = 0
            while done < len(room) and (count := os.preadv(fd, [memoryview(room)[done:]], done)):
                done += count
                if count % 4096:
                    break
            self.check(room[:done], 0, bytes(self.content))
        finally:
            os.close(fd)

    def do_write(self) -> None:
        offset, length = self.span(self.size_max)
        data = self.chance.randbytes(length)
        only = self.chance.random() < 0.3  # by a descriptor that cannot read
        self.note(f"write {offset} {length}{', only' * only}")
        fd = os.open(self.path, os.O_WRONLY) if only else self.fd
        try:
            if os.pwrite(fd, data, offset) != length:
                raise Mismatch("a short write")
        finally:
            if only:
                os.close(fd)
        self.put(offset, data)

    def do_append(self) -> None:
        room = self.size_max - len(self.content)
        data = self.chance.randbytes(max(0, min(room, self.chance.choice((1, 100, 9000)))))
        self.note(f"append {len(data)} at {len(self.content)}")
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        self.put(len(self.content), data)

    def do_truncate(self) -> None:
        size = self.chance.choice((0, len(self.content), self.chance.randrange(self.size_max)))
        by_name = self.chance.random() < 0.4
        self.note(f"{'truncate' if by_name else 'ftruncate'} {len(self.content)} to {size}")
        os.truncate(self.path if by_name else self.fd, size)
        self.resize(size)

    def do_map_read(self) -> None:
        if not self.content:
            return
        offset, length = self.span(len(self.content))
        length = min(length, len(self.content) - offset)
        self.note(f"map and read {offset} {length}")
        flags = self.chance.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE))
        with mmap.mmap(self.fd, len(self.content), flags=flags, prot=mmap.PROT_READ) as mapped:
            found = mapped[offset : offset + length]
        self.check(found, offset, bytes(self.content[offset : offset + length]))

    def do_map_write(self) -> None:
        offset, length = self.span(self.size_max)
        if offset + length > len(self.content):
            os.ftruncate(self.fd, offset + length)
            self.resize(offset + length)
        syncs, closes = self.chance.random() < 0.3, self.chance.random() < 0.3
        data = self.chance.randbytes(length)
        self.note(f"map and write {offset} {length}{', sync' * syncs}{', close first' * closes}")
        with mmap.mmap(self.fd, len(self.content)) as mapped:
            if closes:
                os.close(self.fd)
                self.fd = -1
            mapped[offset : offset + length] = data
            if syncs:
                mapped.flush()
        self.put(offset, data)
        if closes:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def do_allocate(self) -> None:
        offset, length = self.span(self.size_max)
        self.note(f"allocate {offset} {length}")
        os.posix_fallocate(self.fd, offset, length)
        self.resize(max(len(self.content), offset + length))

    def do_punch(self) -> None:
        offset, length = self.span(len(self.content))
        self.note(f"punch {offset} {length}")
        if length == 0:
            return
        span = ctypes.c_long(offset), ctypes.c_long(length)
        if _libc.fallocate(self.fd, _PUNCH, *span):
            if ctypes.get_errno() != errno.EOPNOTSUPP:
                raise OSError(ctypes.get_errno(), "fallocate")
            self.counts["punch refused"] += 1
            return
        end = min(offset + length, len(self.content))
        self.content[offset:end] = bytes(end - offset)

    def do_sync(self) -> None:
        self.note("fsync")
        os.fsync(self.fd)

    def do_reopen(self) -> None:
        self.note("close and open")
        os.close(self.fd)
        self.fd = -1
        if os.stat(self.path).st_size != len(self.content):
            raise Mismatch(f"closed: stat shows {os.stat(self.path).st_size} bytes")
        if self.keeps_versions and self.chance.random() < 0.5:
            self.readers.append((os.open(self.path, os.O_RDONLY), bytes(self.content)))
            self.check_reader(len(self.readers) - 1)
        if len(self.readers) > _READERS_MAX:
            self.do_check_readers()
            os.close(self.readers.pop(0)[0])
        self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def do_rewrite(self) -> None:
        """Empty the file by an open that can only write, and write by that: the kernel may serve
        it past the mount's process."""
        os.close(self.fd)
        self.fd = -1
        fd = os.open(self.path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        self.resize(0)
        self.note("empty, to write only")
        for _ in range(self.chance.randrange(6)):
            offset, length = self.span(self.size_max)
            data = self.chance.randbytes(length)
            self.note(f"write {offset} {length}, only")
            os.pwrite(fd, data, offset)
            self.put(offset, data)
            match self.chance.randrange(6):
                case 0:
                    self.note("close a duplicate")
                    os.close(os.dup(fd))
                case 1:
                    self.note("truncate")
                    size = self.chance.randrange(self.size_max)
                    os.ftruncate(fd, size)
                    self.resize(size)
                case 2:
                    self.do_read_anew()
        if os.stat(self.path).st_size != len(self.content):
            raise Mismatch(f"stat shows {os.stat(self.path).st_size} bytes")
        if not self.keeps_versions and self.chance.random() < 0.3:
            # What may be mapped ends a moment after its close: the next open may join it.
            self.note("open before the close")
            self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.close(fd)
        else:
            os.close(fd)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def do_rename(self) -> None:
        other = self.path.with_suffix(".moved")
        self.note("rename there and back" if self.chance.random() < 0.5 else "write, rename over")
        if self.history[-1].startswith("rename"):
            os.rename(self.path, other)
            os.rename(other, self.path)
            return
        os.close(self.fd)
        data = self.chance.randbytes(self.chance.choice((0, 10, 5000, 300_000)))
        other.write_bytes(data)
        os.rename(other, self.path)
        self.content = bytearray(data)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def do_check_readers(self) -> None:
        for index in range(len(self.readers)):
            self.check_reader(index)

    def check_reader(self, index: int) -> None:
        fd, content = self.readers[index]
        self.note(f"read all of version {index} of those open")
        self.check(os.pread(fd, len(content) + 1, 0), 0, content)

    def do_stat(self) -> None:
        self.note("stat")
        sizes = os.fstat(self.fd).st_size, os.stat(self.path).st_size
        if sizes != (len(self.content),) * 2:
            raise Mismatch(f"sizes {sizes} instead of {len(self.content)}")

    # ----------------------------------------------------------------------------------------------
    def step(self) -> None:
        name = self.chance.choices(NAMES, WEIGHTS)[0]
        self.counts[name] += 1
        getattr(self, f"do_{name}")()

    def finish(self) -> None:
        self.do_check_readers()
        self.do_reopen()
        self.do_read_anew()
        for fd in (self.fd, *(fd for fd, _ in self.readers)):
            os.close(fd)


CALLS = {
    "read": 10, "read_anew": 2, "write": 12, "append": 2, "truncate": 4, "map_read": 4,
    "map_write": 4, "allocate": 1, "punch": 1, "sync": 1, "reopen": 4, "rename": 1,
    "check_readers": 1, "stat": 2, "rewrite": 3,
}  # fmt: skip
NAMES, WEIGHTS = list(CALLS), list(CALLS.values())


def exercise(
    directory: Path, seed: int, operations: int, files: int = 1, size_max: int = SIZE_MAX
) -> Counter[str]:
    """Random calls on files of a directory; how many of each. Raises `Mismatch`, which tells all
    that is needed to run it again."""
    chance = random.Random(seed)
    keeps_versions = any((above / ".kvfs").is_dir() for above in directory.resolve().parents)
    found = [
        Exercised(
            directory / f"file-{seed}-{number}",
            chance,
            size_max,
            keeps_versions and chance.random() < 0.7,
        )
        for number in range(files)
    ]
    counts: Counter[str] = Counter()
    file = found[0]
    try:
        for _ in range(operations):
            file = chance.choice(found)
            file.step()
        for file in found:
            file.finish()
    except (Mismatch, OSError) as error:
        calls = sum(one.counts.total() for one in found)
        last = "\n  ".join(file.history)
        raise Mismatch(
            f"{file.path}: {error}\nseed {seed}, {files} files, call {calls}; the last:\n  {last}"
        ) from error
    for file in found:
        counts.update(file.counts)
        os.unlink(file.path)
    return counts


# The command --------------------------------------------------------------------------------------
def _exercise_process(words: tuple[Path, int, int, int, int]) -> Counter[str] | str:
    try:
        return exercise(*words)
    except Mismatch as error:
        return str(error)


def _run_files(place: Path, arguments: argparse.Namespace) -> list[str]:
    """Exercise files in several processes; what went wrong."""
    seeds = [arguments.seed + number for number in range(arguments.processes)]
    words = [(place, s, arguments.operations, arguments.files, arguments.size_max) for s in seeds]
    begin_s = time.monotonic()
    with get_context("spawn").Pool(arguments.processes) as pool:
        results = pool.map(_exercise_process, words, chunksize=1)
    counts: Counter[str] = Counter()
    problems = []
    for result in results:
        if isinstance(result, str):
            problems.append(result)
        else:
            counts.update(result)
    made = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    seconds = time.monotonic() - begin_s
    print(f"{sum(counts.values()) - counts['punch refused']} calls in {seconds:.0f} s: {made}")
    return problems


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--operations", type=int, default=100_000, help="of each process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--files", type=int, default=3, help="of each process")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--size-max", type=int, default=SIZE_MAX)
    parser.add_argument("--directory", type=Path, help="in a mount, or on any disk")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with fresh_place(arguments.directory) as place:
        problems = _run_files(place, arguments)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
