"""How fast a directory is, in a mount or on a plain disk: bytes and calls on names per second."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvfs.client import Client
from kvfs.config import GIB, MIB
from scripts.memory_rig import warm_memory
from scripts.mount_rig import MountRig

FILE_BYTES = 16 * MIB
_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Place:
    """A directory to measure in; `rig` is None for the plain one."""

    name: str
    folder: Path
    rig: MountRig | None = None

    def files(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).iterdir())


# Bytes --------------------------------------------------------------------------------------------
def make_buffer(size: int) -> mmap.mmap:
    """Page-aligned memory that is there."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def read_buffered(path: Path, buffer: mmap.mmap) -> None:
    _read(path, buffer, os.O_RDONLY)


def read_direct(path: Path, buffer: mmap.mmap) -> None:
    _read(path, buffer, os.O_RDONLY | os.O_DIRECT)


def _read(path: Path, buffer: mmap.mmap, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        if os.preadv(fd, [buffer], 0) != len(buffer):
            raise RuntimeError(f"{path}: a short read")
    finally:
        os.close(fd)


def read_mapped(path: Path, buffer: mmap.mmap) -> None:
    """Map a file and copy it out, as a loader does; without the interpreter's lock."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # Private and writable, since ctypes wants that; nothing is written.
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE) as mapped:
            source, target = ctypes.c_char.from_buffer(mapped), ctypes.c_char.from_buffer(buffer)
            _libc.memcpy(ctypes.addressof(target), ctypes.addressof(source), len(mapped))
            del source, target
    finally:
        os.close(fd)


READS = {"buffered": read_buffered, "O_DIRECT": read_direct, "mapped": read_mapped}
# As the first two, from descriptors that are open already: what a read costs without its open.
OPENED = {"buffered, opened before": os.O_RDONLY, "O_DIRECT, opened before": os.O_DIRECT}


def in_threads(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until `work(0)` to `work(threads - 1)` are done, each in a thread."""
    problems: list[BaseException] = []
    gate = threading.Barrier(threads + 1)

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except (OSError, RuntimeError) as error:
            problems.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    begin_s = time.perf_counter()
    for worker in workers:
        worker.join()
    spent_s = time.perf_counter() - begin_s
    if problems:
        raise problems[0]
    return spent_s


def read_gib_s(
    place: Place, way: str, threads: int, passes: int, buffers: Sequence[mmap.mmap]
) -> float:
    """Whole files, each thread its own share, so many times over."""
    files = place.files("large")
    opened = {path: os.open(path, OPENED[way]) for path in files} if way in OPENED else {}

    def work(number: int) -> None:
        for _ in range(passes):
            for path in files[number::threads]:
                if opened:
                    os.preadv(opened[path], [buffers[number]], 0)
                else:
                    READS[way](path, buffers[number])

    try:
        return len(files) * passes * FILE_BYTES / GIB / in_threads(threads, work)
    finally:
        for fd in opened.values():
            os.close(fd)


_written = 0  # of all files, so that no two are equal and stored once


def write_gib_s(
    place: Place,
    threads: int,
    files: int,
    buffers: Sequence[mmap.mmap],
    *,
    until_published: bool = False,
) -> float:
    """New files under a temporary name, then renamed; or until a client of the node sees them all,
    for which it must have their digests. The disk is quiet and memory is there before; the disk
    is quiet again after, and they are removed."""
    global _written
    folder = place.folder / "written"
    folder.mkdir()
    os.sync()
    warm_memory(files * FILE_BYTES)
    start = _written
    _written += files

    def work(number: int) -> None:
        buffer = buffers[number]
        for index in range(number, files, threads):
            buffer[:8] = (start + index).to_bytes(8, "little")
            fd = os.open(folder / f"{index}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                if os.write(fd, buffer) != len(buffer):
                    raise RuntimeError("a short write")
            finally:
                os.close(fd)
            os.rename(folder / f"{index}.tmp", folder / f"{index}.data")

    spent_s = in_threads(threads, work)
    if until_published and place.rig is not None:
        spent_s += _publish(place.rig, folder, files)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    os.sync()
    return files * FILE_BYTES / GIB / spent_s


def _publish(rig: MountRig, folder: Path, files: int) -> float:
    """Seconds until a client, which is connected already, sees the files that were written."""
    paths = [
        os.fsencode((folder / f"{index}.data").relative_to(rig.mountpoint))
        for index in range(files)
    ]
    with Client(rig.store) as client:
        begin_s = time.perf_counter()
        if None in client.lookup(paths):
            raise RuntimeError("a file was closed and is not published")
        return time.perf_counter() - begin_s


def measure_small(place: Place, kind: str, buffer: mmap.mmap) -> float:
    """Opens, reads and closes per second."""
    files = place.files(kind)
    begin_s = time.perf_counter()
    for path in files:
        _read(path, buffer, os.O_RDONLY)
    return len(files) / (time.perf_counter() - begin_s)


# Names --------------------------------------------------------------------------------------------
def measure_names(place: Place, count: int) -> dict[str, float]:
    """Calls on names per second; the listing counts names."""
    folder = place.folder / "names"
    folder.mkdir()
    names = [folder / f"name-{number:06}" for number in range(count)]
    moved = [folder / f"moved-{number:06}" for number in range(count)]
    spent_s: dict[str, float] = {}

    @contextmanager
    def timed(kind: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        spent_s[kind] = time.perf_counter() - begin_s

    with timed("create"):
        for path in names:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    for path in names:
        os.stat(path)
    with timed("stat"):
        for path in names:
            os.stat(path)
    with timed("readdir"):
        found = os.listdir(folder)
    assert len(found) == count
    with timed("rename"):
        for old, new in zip(names, moved, strict=True):
            os.rename(old, new)
    with timed("unlink"):
        for path in moved:
            os.unlink(path)
    folder.rmdir()
    return {kind: count / seconds for kind, seconds in spent_s.items()}
