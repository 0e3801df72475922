"""The load under which a cluster suffers faults: files that tell whether they are whole, written on
every node and read on all others, and a ledger of what each name may show.

Every name has one writer. Its versions are numbered; a read must find none older than the last that
was closed before it began, and none that was never begun. A plain create that failed in the middle
leaves what it leaves, as on any file system; only names that are renamed into place are always
whole.
"""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from scripts.crash_mount import build, version_of

DIRECTORY = "load"
SLOTS = 6  # names of each writer
SIZE_BYTES_MAX = 1024 * 1024
WRITES_PER_S = 2.0  # of each node
READS_PER_S = 6.0  # of each node
JOIN_S = 60.0


@dataclass(slots=True)
class Entry:
    """One name."""

    writer: int  # its node
    is_renamed: bool  # into place; else made where it is
    closed: int = 0  # the last version whose writing returned
    begun: int = 0
    is_torn: bool = False  # a plain create of it failed
    digests: dict[int, bytes] = field(default_factory=dict)  # of the versions that may be there


@dataclass(slots=True)
class Tally:
    """What readers and writers met while something lasted."""

    reads: int = 0
    writes: int = 0
    reopened: int = 0  # files overwritten in place, after ESTALE
    stale: int = 0  # reads on nodes that were cut off, of what was there before
    read_s_max: dict[int, float] = field(default_factory=dict)  # by node
    write_s_max: dict[int, float] = field(default_factory=dict)
    read_errors: dict[int, Counter[str]] = field(default_factory=dict)
    write_errors: dict[int, Counter[str]] = field(default_factory=dict)


class Ledger:
    """What every name may show, and what was found. Safe in several threads."""

    def __init__(self, mountpoints: Sequence[Path], stores: Sequence[Path]) -> None:
        self.mountpoints = mountpoints
        self.wrong: list[str] = []
        self.tally = Tally()
        self.cut_off: frozenset[int] = frozenset()  # nodes that may show what was there before
        self._stores = stores
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}

    def path(self, node: int, name: str) -> Path:
        return self.mountpoints[node] / DIRECTORY / name

    def names(self) -> list[str]:
        with self._lock:
            return [name for name, entry in self._entries.items() if entry.begun]

    def next_tally(self) -> Tally:
        """Begin to count anew; what was counted until now."""
        with self._lock:
            past, self.tally = self.tally, Tally()
            return past

    # Writing --------------------------------------------------------------------------------------
    def begin(self, name: str, writer: int, size: int, *, is_renamed: bool) -> bytes:
        """The content of a name's next version, which is about to be written."""
        with self._lock:
            entry = self._entries.setdefault(name, Entry(writer, is_renamed))
            version = entry.begun + 1
        data = build(name, version, size)
        with self._lock:
            entry.digests[version] = xxhash.xxh3_128_digest(data)
            entry.begun = version
        return data

    def note_closed(self, name: str, took_s: float) -> None:
        """Writing the version that was begun has returned."""
        with self._lock:
            entry = self._entries[name]
            entry.closed, entry.is_torn = entry.begun, False
            entry.digests = {entry.closed: entry.digests[entry.closed]}
            self.tally.writes += 1
            _note_longest(self.tally.write_s_max, entry.writer, took_s)

    def note_failed(self, name: str, error: OSError, took_s: float) -> None:
        """It has failed: the version may be there or not."""
        with self._lock:
            entry = self._entries[name]
            entry.is_torn |= not entry.is_renamed
            _count(self.tally.write_errors, entry.writer, error)
            _note_longest(self.tally.write_s_max, entry.writer, took_s)

    # Reading --------------------------------------------------------------------------------------
    def read(self, node: int, name: str) -> bool:
        """Read a name on a node and look at each byte; whether it showed what it should."""
        with self._lock:
            before = self._entries[name]
            oldest, was_torn = before.closed, before.is_torn
        began_s = time.monotonic()
        try:
            data = self._read_bytes(node, name)
        except OSError as error:
            return self._note_error(node, name, error, oldest)
        finally:
            took_s = time.monotonic() - began_s
            with self._lock:
                self.tally.reads += 1
                _note_longest(self.tally.read_s_max, node, took_s)
        with self._lock:
            entry = self._entries[name]
            may_be_torn = was_torn or entry.is_torn
            is_own = entry.writer == node and not entry.is_renamed and entry.begun > oldest
            if not data and not entry.is_renamed and (oldest == 0 or may_be_torn or is_own):
                return oldest == 0 or may_be_torn  # made, and not closed yet
            try:
                version = version_of(name, data)
            except ValueError as error:
                if not (may_be_torn or is_own):
                    self.wrong.append(f"node {node}: {error}")
                return may_be_torn
            if oldest <= version <= entry.begun:
                return True
            if version < oldest and node in self.cut_off:
                self.tally.stale += 1
            else:
                said = f"{name} is version {version}, not {oldest} to {entry.begun}"
                self.wrong.append(f"node {node}: {said}")
            return False

    def _read_bytes(self, node: int, name: str) -> bytes:
        """As a program does that knows what docs/cluster.md says of files overwritten in place."""
        try:
            return self.path(node, name).read_bytes()
        except OSError as error:
            with self._lock:
                if error.errno != errno.ESTALE or self._entries[name].is_renamed:
                    raise
                self.tally.reopened += 1
        return self.path(node, name).read_bytes()

    def _note_error(self, node: int, name: str, error: OSError, oldest: int) -> bool:
        """Whether it was right that a name could not be read."""
        if error.errno == errno.ENOENT and oldest == 0:
            return True
        with self._lock:
            _count(self.tally.read_errors, node, error)
        return False

    def held(self, nodes: Sequence[int]) -> list[str]:
        """The names that were closed, of which one of these nodes has the bytes in its store."""
        with self._lock:
            wanted = {n: list(e.digests.values()) for n, e in self._entries.items() if e.closed}
        return [n for n, digests in wanted.items() if self._lies_in(digests, nodes)]

    def _lies_in(self, digests: Sequence[bytes], nodes: Sequence[int]) -> bool:
        places = [f"blobs/{d.hex()[:2]}/{d.hex()[2:4]}/{d.hex()}" for d in digests]
        return any((self._stores[node] / place).exists() for place in places for node in nodes)


def _count(errors: dict[int, Counter[str]], node: int, error: OSError) -> None:
    word = errno.errorcode.get(error.errno or 0, str(error.errno))
    errors.setdefault(node, Counter())[word] += 1


def _note_longest(longest_s: dict[int, float], node: int, took_s: float) -> None:
    longest_s[node] = max(longest_s.get(node, 0.0), took_s)


def write(path: Path, data: bytes, *, is_renamed: bool) -> None:
    """Make a file, where it is to be or by a temporary name."""
    if is_renamed:
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(data)
        temporary.rename(path)
    else:
        path.write_bytes(data)


class _Worker(threading.Thread):
    """Does something so many times a second until the load ends."""

    def __init__(self, ledger: Ledger, node: int, seed: int, per_s: float) -> None:
        super().__init__(daemon=True)
        self.ledger = ledger
        self.node = node
        self.chance = random.Random(seed)
        self.ended = threading.Event()
        self._pause_s = 1 / per_s

    def run(self) -> None:
        while not self.ended.wait(self._pause_s * self.chance.uniform(0.5, 1.5)):
            self.step()

    def step(self) -> None:
        raise NotImplementedError


class Writer(_Worker):
    """Writes its own names, again and again."""

    def step(self) -> None:
        slot = self.chance.randrange(SLOTS)
        is_renamed = slot % 2 == 0
        name = f"{'r' if is_renamed else 'p'}-{self.node}-{slot}"
        size = int(SIZE_BYTES_MAX ** self.chance.random())
        data = self.ledger.begin(name, self.node, size, is_renamed=is_renamed)
        began_s = time.monotonic()
        try:
            write(self.ledger.path(self.node, name), data, is_renamed=is_renamed)
        except OSError as error:
            self.ledger.note_failed(name, error, time.monotonic() - began_s)
        else:
            self.ledger.note_closed(name, time.monotonic() - began_s)


class Reader(_Worker):
    """Reads the names of all other nodes."""

    def step(self) -> None:
        prefixes = tuple(f"-{self.node}-{slot}" for slot in range(SLOTS))
        names = [name for name in self.ledger.names() if not name.endswith(prefixes)]
        if names:
            self.ledger.read(self.node, self.chance.choice(names))


class Load:
    """Writers and readers on all nodes, for the length of a `with` block."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        nodes = range(len(ledger.mountpoints))
        os.makedirs(ledger.path(0, ""), exist_ok=True)
        self._workers: list[_Worker] = [
            *(Writer(ledger, node, seed * 1000 + node, WRITES_PER_S) for node in nodes),
            *(Reader(ledger, node, seed * 1000 + 500 + node, READS_PER_S) for node in nodes),
        ]

    def __enter__(self) -> "Load":
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.ended.set()

    def join(self) -> int:
        """Wait for the calls that are under way; how many hang."""
        end_s = time.monotonic() + JOIN_S
        for worker in self._workers:
            worker.join(max(0.0, end_s - time.monotonic()))
        return sum(worker.is_alive() for worker in self._workers)
