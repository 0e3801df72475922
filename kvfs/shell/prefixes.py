"""The tree of cached prefixes of a model: which starts of prompts are there, and how they go on.

Positions that follow each other without a branch are one *run*, which is what a person sees as one
line. Children are asked for in batches and runs yielded depth first, so a tree of any size needs
memory for one path, a block of siblings and what is read ahead, and a bit a file.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvfs.names import chunk_path
from kvfs.shell.namespaces import Namespace, Part, list_chunks
from kvfs.shell.positions import ChunkSource, Position, ReadAhead, keys_of, parse_stem

SIBLINGS_BLOCK = 256  # runs that are followed together


class InodeSet:
    """Inode numbers in a bit each, in blocks that exist where one was added."""

    _BLOCK_BITS = 15

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}

    def add(self, ino: int) -> None:
        block = self._blocks.get(ino >> self._BLOCK_BITS)
        if block is None:
            block = self._blocks[ino >> self._BLOCK_BITS] = bytearray(1 << self._BLOCK_BITS - 3)
        low = ino & (1 << self._BLOCK_BITS) - 1
        block[low >> 3] |= 1 << (low & 7)

    def __contains__(self, ino: int) -> bool:
        block = self._blocks.get(ino >> self._BLOCK_BITS)
        low = ino & (1 << self._BLOCK_BITS) - 1
        return block is not None and bool(block[low >> 3] >> (low & 7) & 1)


# Runs ---------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Run:
    """Positions that follow each other without a branch: one line of the tree."""

    head: Position
    tail: Position
    positions: int = 0
    incomplete: int = 0  # positions that miss a group or shard
    files: int = 0
    size_bytes: int = 0
    created_ns: int = 0  # of the newest
    used_ns: int = 0
    pinned: int = 0
    branches: int = 0  # positions that continue the last one; 0 at the end of a prompt
    below_positions: int = 0  # in the branches, where they are not shown themselves
    below_files: int = 0
    below_bytes: int = 0
    number: int = 0  # from 1, as they are yielded
    parent: int = 0  # number of the run that this one continues, 0 at a root
    level: int = 0
    is_last: bool = False  # among its siblings
    is_orphan: bool = False  # what it continues is gone

    def append(self, position: Position, parts: frozenset[Part]) -> None:
        self.tail = position
        self.positions += 1
        self.incomplete += position.parts != parts
        self.files += len(position.entries)
        self.size_bytes += position.size_bytes
        self.created_ns = max(self.created_ns, position.created_ns)
        self.used_ns = max(self.used_ns, position.used_ns)
        self.pinned += position.is_pinned


@dataclass(slots=True)
class _Siblings:
    waiting: deque[Position]
    level: int
    parent: int
    ready: deque[Run] = field(default_factory=deque)


class TreeWalk:
    """Walks one namespace's tree, each file at most once, whatever its header claims."""

    def __init__(self, source: ChunkSource, space: Namespace, parts: frozenset[Part]) -> None:
        self.reached = InodeSet()
        self.listed_files = 0  # by `orphans`
        self._source = source
        self._space = space
        self._parts = parts
        self._ahead = ReadAhead(source, space, parts)
        self._serial = 0

    def runs(self, depth: int | None = None) -> Iterator[Run]:
        """The runs from the start of every prompt, depth first, the last used first. At `depth`
        levels of branches the rest is summed up in the run that it continues."""
        return self._walk(self._ahead.roots(), depth)

    def orphans(self, depth: int | None = None) -> Iterator[Run]:
        """The runs whose start is gone, once `runs` has reached what there is: what eviction or
        corruption cut off. They are of no use to any prompt until the gap is stored again."""
        for path, _, entry in list_chunks(self._source, self._space):
            self.listed_files += 1
            if entry.inode.ino in self.reached:
                continue
            stem = self._missing_parent(path)
            if stem:
                (cut,) = self._ahead.after([stem])
                for run in self._walk(cut, depth):
                    run.is_orphan = True
                    yield run
            self.reached.add(entry.inode.ino)

    def _missing_parent(self, path: bytes) -> bytes:
        """Follow parents upwards to the one that is not there. b"" when all are: a chunk that came
        while we looked, or one whose header contradicts its parent's."""
        info = self._source.chunk(path)
        while info is not None and (parent := parse_stem(info.parent)) is not None:
            above = self._find_file(parent[0])
            if above is None:
                return parent[0]
            before = self._source.chunk(above)
            if before is None or before.token_start >= info.token_start:
                break
            info = before
        return b""

    def _find_file(self, stem: bytes) -> bytes | None:
        paths = [
            chunk_path(self._space.path, key.decode()) for key in keys_of(stem, sorted(self._parts))
        ]
        for path in paths:
            inode = self._source.stat(path)
            if inode is not None and inode.is_published:
                return path
        return None

    def _walk(self, roots: Sequence[Position], depth: int | None) -> Iterator[Run]:
        stack = [_Siblings(deque(roots), 0, 0)]
        while stack:
            siblings = stack[-1]
            while not siblings.ready and siblings.waiting:
                count = min(SIBLINGS_BLOCK, len(siblings.waiting))
                siblings.ready.extend(
                    self._grow([siblings.waiting.popleft() for _ in range(count)])
                )
            if not siblings.ready:
                stack.pop()
                continue
            run = siblings.ready.popleft()
            run.is_last = not siblings.ready and not siblings.waiting
            run.level, run.parent = siblings.level, siblings.parent
            is_cut = depth is not None and run.level + 1 >= depth
            if run.branches and is_cut:
                self._sum_below(run)
            self._serial += 1
            run.number = self._serial
            yield run
            if run.branches and not is_cut:
                stack.append(_Siblings(deque(self._continue(run)), run.level + 1, run.number))

    def _sum_below(self, run: Run) -> None:
        serial = self._serial
        for below in self._walk(self._continue(run), None):
            run.below_positions += below.positions
            run.below_files += below.files
            run.below_bytes += below.size_bytes
            run.used_ns = max(run.used_ns, below.used_ns)
        self._serial = serial

    def _continue(self, run: Run) -> list[Position]:
        (found,) = self._positions_after([run.tail])
        return found

    def _positions_after(self, tails: Sequence[Position]) -> list[list[Position]]:
        """What continues each position, without what was reached already and what claims to end
        before it begins: so that no header can send the walk in circles."""
        found = self._ahead.after([position.stem for position in tails])
        return [
            [
                position
                for position in positions
                if position.token_end > tail.token_end and not self._is_reached(position)
            ]
            for tail, positions in zip(tails, found, strict=True)
        ]

    def _is_reached(self, position: Position) -> bool:
        return any(entry.inode.ino in self.reached for entry in position.entries)

    def _grow(self, heads: Sequence[Position]) -> list[Run]:
        """Follow several heads at once, each until it branches or ends."""
        runs = []
        for head in heads:
            if not self._is_reached(head):
                runs.append(Run(head, head))
                self._append(runs[-1], head)
        growing = list(runs)
        while growing:
            still = []
            for run, found in zip(
                growing, self._positions_after([run.tail for run in growing]), strict=True
            ):
                if len(found) == 1 and not self._is_reached(found[0]):
                    self._append(run, found[0])
                    still.append(run)
                else:
                    run.branches = len(found)
                    if found:  # which the walk asks for when it goes on there
                        self._ahead.keep(run.tail.stem, found)
            growing = still
        return runs

    def _append(self, run: Run, position: Position) -> None:
        run.append(position, self._parts)
        for entry in position.entries:
            self.reached.add(entry.inode.ino)
