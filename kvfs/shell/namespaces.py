"""Which models have chunks in a store, and how many."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfs.errors import InvalidInput, NamespaceError
from kvfs.inspect import Directories, list_directory
from kvfs.meta.contract import Entry
from kvfs.names import CHUNK_SUFFIX, KV_DIRECTORY, escape, parse_key, split_namespace

ESTIMATE_FILES = 20_000  # counted exactly before `estimate_chunks` extrapolates

Part = tuple[int, int]  # KV group, shard


@dataclass(frozen=True, slots=True)
class Namespace:
    """The chunks of one model under one fingerprint."""

    path: bytes  # kv/<model>@<fingerprint>
    model: str
    fingerprint: str

    @property
    def name(self) -> str:
        return f"{self.model}@{self.fingerprint}"


def shown_name(space: Namespace) -> str:
    """`<model>@<fingerprint>` for a terminal."""
    return escape(os.fsencode(space.name))


@dataclass(frozen=True, slots=True)
class Census:
    """What a namespace holds, from the names of its files alone."""

    files: int
    size_bytes: int
    parts: frozenset[Part]
    is_estimate: bool = False


def find_namespaces(source: Directories) -> list[Namespace]:
    """All namespaces of a store; none when no chunk was ever stored."""
    try:
        entries = list(list_directory(source, KV_DIRECTORY))
    except NamespaceError:
        return []
    found = []
    for entry in entries:
        path = KV_DIRECTORY + b"/" + entry.name
        parsed = split_namespace(path) if entry.inode.is_directory else None
        if parsed is not None:
            found.append(Namespace(path, *parsed))
    return found


def choose_namespaces(namespaces: Sequence[Namespace], word: str) -> list[Namespace]:
    """The namespaces that a person means: a model, a directory's name, or a unique start of either.

    None fits: an empty list. Raises `InvalidInput` when a start fits several models.
    """
    word = word.strip("/").removeprefix("kv/")
    for chosen in (
        [space for space in namespaces if word in (space.model, space.name, _directory(space))],
        [space for space in namespaces if _starts(space, word)],
    ):
        models = sorted({space.model for space in chosen})
        if len(models) == 1:
            return chosen
        if models:
            raise InvalidInput(word, f"fits several models: {', '.join(models)}; say more of one")
    return []


def _directory(space: Namespace) -> str:
    return space.path.rpartition(b"/")[2].decode("utf-8", "surrogateescape")


def _starts(space: Namespace, word: str) -> bool:
    base = space.model.rpartition("/")[2]
    return any(name.startswith(word) for name in (space.name, _directory(space), base))


def list_chunks(source: Directories, space: Namespace) -> Iterator[tuple[bytes, Part, Entry]]:
    """Every published file of a namespace whose name is a chunk's: its path, part and entry."""
    for directory in _fan_out(source, space):
        yield from _list_fan_out(source, directory)


def _fan_out(source: Directories, space: Namespace) -> list[bytes]:
    return [
        space.path + b"/" + entry.name
        for entry in list_directory(source, space.path)
        if entry.inode.is_directory
    ]


def _list_fan_out(source: Directories, directory: bytes) -> Iterator[tuple[bytes, Part, Entry]]:
    try:
        for entry in list_directory(source, directory):
            name = entry.name
            if not (name.endswith(CHUNK_SUFFIX) and directory.endswith(b"/" + name[:2])):
                continue
            parsed = parse_key(name.removesuffix(CHUNK_SUFFIX).decode("ascii", "replace"))
            if parsed is not None and entry.inode.is_published:
                yield directory + b"/" + name, parsed[1:], entry
    except NamespaceError:  # removed since it was listed
        return


def estimate_chunks(source: Directories, space: Namespace) -> Census:
    """Count a namespace's files, a large one's from some of its directories: keys are hashes, so
    all are about equally full."""
    files = size_bytes = 0
    parts = set()
    directories = _fan_out(source, space)
    for seen, directory in enumerate(directories, start=1):
        for _, part, entry in _list_fan_out(source, directory):
            files += 1
            size_bytes += entry.inode.size_bytes
            parts.add(part)
        if files >= ESTIMATE_FILES and seen < len(directories):
            scale = len(directories) / seen
            return Census(int(files * scale), int(size_bytes * scale), frozenset(parts), True)
    return Census(files, size_bytes, frozenset(parts))
