"""What is put into a tier: an open file from its start, or memory; and whether it is right."""

import os
from collections.abc import Callable, Iterator

from kvfs.config import TIER_PIECE_BYTES
from kvfs.errors import Corrupt, InvalidInput
from kvfs.file_io import allocate, read_into

Draw = Callable[[int, memoryview], None]  # fills a piece from a place in the source


def reopen(fd: int) -> int:
    """A descriptor with a state of its own: O_DIRECT is set on it, and the caller may close its
    file meanwhile. Raises `InvalidInput` for one that cannot be read."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput("source", f"descriptor {fd} is none to read: {error}") from error


def drawing(fd: int, digest: bytes) -> Draw:
    """From a descriptor that nobody else uses. Raises `Corrupt` for what is too short or cannot be
    read: that is no fault of the tier."""

    def draw(at: int, piece: memoryview) -> None:
        try:
            count = read_into(fd, piece, len(piece), at=at)
        except OSError as error:
            raise Corrupt(digest.hex(), f"its source cannot be read: {error}") from error
        if count < len(piece):
            raise Corrupt(digest.hex(), f"its source ends after {at + count} bytes")

    return draw


def read_whole(fd: int, memory: memoryview, digest: bytes) -> None:
    """Fill memory from the start of a caller's file. Raises as `drawing`."""
    own_fd = reopen(fd)
    try:
        drawing(own_fd, digest)(0, memory)
    finally:
        os.close(own_fd)


def slices(memory: memoryview) -> Iterator[memoryview]:
    """Pieces of memory, in place."""
    for begin in range(0, len(memory), TIER_PIECE_BYTES):
        yield memory[begin : begin + TIER_PIECE_BYTES]


def filled(
    size_bytes: int, draw: Draw, make: Callable[[], memoryview] | None = None
) -> Iterator[memoryview]:
    """Pieces of so many bytes in all, each valid until the next one is asked for; in memory that
    `make` gives, where there is some already."""
    memory = make() if make else allocate(min(size_bytes, TIER_PIECE_BYTES))
    for done in range(0, size_bytes, TIER_PIECE_BYTES):
        piece = memory[: min(TIER_PIECE_BYTES, size_bytes - done)]
        draw(done, piece)
        yield piece


def check_source(found: bytes, digest: bytes) -> None:
    """Raise `Corrupt` when what was read from a source is not what it is to be stored as."""
    if found != digest:
        raise Corrupt(digest.hex(), "what is to be stored has other bytes")
