#!/usr/bin/env python3
"""Writes, renames and removals on one node of a cluster, read at once on all others.

usage: exercise_cluster.py [--nodes 3] [--steps 10000] [--seed 1] [--directory DIR]

Each step changes one name on one node, chosen by chance: a new file, new content in place, by a
temporary name and rename, a rename over another name, a removal. As soon as the call has returned
every other node opens the name and must have the right bytes, or none. How long a mere stat may
show what was there before is measured besides. Prints one line each; exit code 1 on a wrong byte.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.cluster_rig import Node, cluster  # noqa: E402  (path first)
from scripts.ending import clean_up_on_sigterm  # noqa: E402

NAMES = 64
SIZE_BYTES_MAX = 1024 * 1024
SEEN_DEADLINE_S = 5.0


class Exercise:
    """What the names must show, and what was found."""

    def __init__(self, nodes: tuple[Node, ...], rng: random.Random) -> None:
        self._nodes = nodes
        self._rng = rng
        self._content: dict[str, bytes] = {}
        self.steps: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.change_s: list[float] = []
        self.read_s: list[float] = []
        self.seen_s: list[float] = []

    def step(self, number: int) -> None:
        rng = self._rng
        writer = rng.choice(self._nodes)
        name = f"d{rng.randrange(8)}/f{rng.randrange(NAMES)}"
        path = writer.mountpoint / name
        began = time.perf_counter()
        kind = self._change(path, name)
        self.change_s.append(time.perf_counter() - began)
        self.steps[kind] += 1
        readers = [node for node in self._nodes if node is not writer]
        if number % 10 == 0:
            self.seen_s.append(max(self._wait_seen(node, name) for node in readers))
        for node in readers:
            began = time.perf_counter()
            found = _read(node.mountpoint / name)
            self.read_s.append(time.perf_counter() - began)
            if found != self._content.get(name):
                said = "nothing" if found is None else f"{len(found)} bytes"
                self.wrong.append(f"step {number}: {kind} of {name}: {node.directory.name}: {said}")

    def _change(self, path: Path, name: str) -> str:
        rng = self._rng
        path.parent.mkdir(exist_ok=True)
        others = [other for other in self._content if other != name]
        if name in self._content and rng.random() < 0.15:
            path.unlink()
            del self._content[name]
            return "unlink"
        if others and rng.random() < 0.2:
            other = rng.choice(others)
            os.rename(path.parent.parent / other, path)
            self._content[name] = self._content.pop(other)
            return "rename"
        content = rng.randbytes(int(SIZE_BYTES_MAX ** rng.random()) - 1)
        if rng.random() < 0.5:
            path.write_bytes(content)
            kind = "write"
        else:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(content)
            temporary.rename(path)
            kind = "write and rename"
        self._content[name] = content
        return kind

    def _wait_seen(self, node: Node, name: str) -> float:
        """How long a stat goes on showing what was there before."""
        wanted = len(self._content[name]) if name in self._content else None
        began = time.perf_counter()
        while time.perf_counter() - began < SEEN_DEADLINE_S:
            if _size(node.mountpoint / name) == wanted:
                return time.perf_counter() - began
            time.sleep(0.001)
        self.wrong.append(f"{name}: {node.directory.name} does not see its size")
        return SEEN_DEADLINE_S


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _show(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    print(
        f"{what:24} median {statistics.median(ordered) * 1e3:7.1f} ms"
        f"  99% {ordered[len(ordered) * 99 // 100] * 1e3:7.1f}  most {ordered[-1] * 1e3:7.1f}"
    )


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where the stores lie; default: in /tmp")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-cluster-", dir=options.directory) as base,
        cluster(options.nodes, Path(base)) as rig,
    ):
        exercise = Exercise(rig.nodes, random.Random(options.seed))
        for number in range(options.steps):
            exercise.step(number)
    for line in exercise.wrong[:20]:
        print(f"WRONG {line}")
    print(", ".join(f"{count} x {kind}" for kind, count in exercise.steps.items()))
    _show("change", exercise.change_s)
    _show("open and read elsewhere", exercise.read_s)
    _show("stat shows it", exercise.seen_s)
    print(f"{len(exercise.wrong)} wrong of {len(exercise.read_s)} reads")
    return 1 if exercise.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
