"""The mount against a plain directory: the same random operations on both must show the same bytes.

Each seed is one sequence of writes, reads, truncations, mappings, reopens, renames and links on a
few files with several descriptors each. A reader keeps a version that a plain directory would
change under it, so a descriptor that only reads is closed before its file is overwritten, except
where a writer was there first.
"""

import mmap
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

OPERATIONS = 1200
SIZE_MAX = 300_000
NAMES = ("a", "b", "c")


@dataclass
class Pair:
    """One descriptor on each side, opened in the same way."""

    ours: int
    plain: int
    is_writer: bool


@dataclass
class Twins:
    """The two directories and what is open in them."""

    ours: Path
    plain: Path
    chance: random.Random
    open: dict[str, list[Pair]] = field(default_factory=dict)

    def both(self, name: str) -> tuple[Path, Path]:
        return self.ours / name, self.plain / name

    def choose(self, is_writer: bool) -> tuple[str, Pair] | None:
        pairs = [
            (n, p) for n in NAMES for p in self.open.get(n, []) if p.is_writer or not is_writer
        ]
        return self.chance.choice(pairs) if pairs else None

    def close(self, name: str, pair: Pair) -> None:
        self.open[name].remove(pair)
        os.close(pair.ours)
        os.close(pair.plain)

    def close_all(self, name: str) -> None:
        for pair in list(self.open.get(name, [])):
            self.close(name, pair)

    # Operations ---------------------------------------------------------------------------------
    def do_open(self) -> None:
        name = self.chance.choice(NAMES)
        pairs = self.open.setdefault(name, [])
        flags = self.chance.choice([os.O_RDONLY, os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_TRUNC])
        is_writer = flags != os.O_RDONLY
        if is_writer and not any(pair.is_writer for pair in pairs):
            self.close_all(name)  # readers that would keep their version
        if len(pairs) >= 3:
            self.close(name, self.chance.choice(pairs))
            if not any(pair.is_writer for pair in pairs):
                self.close_all(name)
        if not is_writer and not (self.plain / name).exists():
            return
        ours, plain = self.both(name)
        flags |= os.O_CREAT if is_writer else 0
        pairs.append(Pair(os.open(ours, flags), os.open(plain, flags), is_writer))

    def do_close(self) -> None:
        chosen = self.choose(is_writer=False)
        if chosen:
            name, pair = chosen
            self.close(name, pair)

    def do_write(self) -> None:
        chosen = self.choose(is_writer=True)
        if chosen:
            offset = self.chance.randrange(SIZE_MAX)
            data = self.chance.randbytes(self.chance.choice([1, 100, 4096, 30_000, 140_000]))
            assert os.pwrite(chosen[1].ours, data, offset) == len(data)
            assert os.pwrite(chosen[1].plain, data, offset) == len(data)

    def do_read(self) -> None:
        chosen = self.choose(is_writer=False)
        if chosen:
            offset = self.chance.randrange(SIZE_MAX * 2)
            count = self.chance.choice([1, 4096, 50_000, 500_000])
            ours = os.pread(chosen[1].ours, count, offset)
            assert ours == os.pread(chosen[1].plain, count, offset)

    def do_truncate(self) -> None:
        chosen = self.choose(is_writer=True)
        if chosen:
            size = self.chance.randrange(SIZE_MAX)
            os.ftruncate(chosen[1].ours, size)
            os.ftruncate(chosen[1].plain, size)

    def do_map(self) -> None:
        chosen = self.choose(is_writer=True)
        size = os.fstat(chosen[1].plain).st_size if chosen else 0
        if not chosen or not size:
            return
        start = self.chance.randrange(size)
        data = self.chance.randbytes(min(self.chance.choice([1, 5000, 70_000]), size - start))
        for fd in (chosen[1].ours, chosen[1].plain):
            with mmap.mmap(fd, size) as mapped:
                mapped[start : start + len(data)] = data
                if start % 2:
                    mapped.flush()

    def do_truncate_by_name(self) -> None:
        name = self.chance.choice(NAMES)
        if (self.plain / name).exists():
            if not any(pair.is_writer for pair in self.open.get(name, [])):
                self.close_all(name)
            size = self.chance.choice([0, self.chance.randrange(SIZE_MAX)])
            for path in self.both(name):
                os.truncate(path, size)

    def do_rename(self) -> None:
        old, new = self.chance.sample(NAMES, 2)
        if (self.plain / old).exists():
            for path in (self.ours, self.plain):
                os.rename(path / old, path / new)
            self.close_all(new)
            self.open[new] = self.open.pop(old, [])

    def do_unlink(self) -> None:
        name = self.chance.choice(NAMES)
        if (self.plain / name).exists() and self.chance.random() < 0.3:
            for path in self.both(name):
                os.unlink(path)
            self.close_all(name)

    def do_compare(self) -> None:
        assert sorted(os.listdir(self.ours)) == sorted(os.listdir(self.plain))
        for name in os.listdir(self.plain):
            ours, plain = self.both(name)
            assert os.stat(ours).st_size == os.stat(plain).st_size
            assert ours.read_bytes() == plain.read_bytes()


WEIGHTS = {
    "open": 4, "close": 2, "write": 8, "read": 8, "truncate": 2, "map": 2,
    "truncate_by_name": 1, "rename": 1, "unlink": 1, "compare": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_mount_shows_what_a_plain_directory_shows(
    place: Path, tmp_path: Path, seed: int
) -> None:
    twins = Twins(place, tmp_path, random.Random(seed))
    history = []
    try:
        for _ in range(OPERATIONS):
            operation = twins.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            history.append(operation)
            getattr(twins, f"do_{operation}")()
        for name in NAMES:
            twins.close_all(name)
        twins.do_compare()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {len(history)}: {history[-12:]}") from error
    finally:
        for name in NAMES:
            twins.close_all(name)
