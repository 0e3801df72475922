"""Reading the header of a chunk file from a descriptor, without its payload."""

import os

from kvfs.chunk import ChunkHeader, decode_header, header_bytes_needed
from kvfs.config import PAGE_BYTES
from kvfs.errors import Corrupt


def read_header(fd: int, file_bytes: int) -> ChunkHeader:
    """The header of a chunk file, checked against the file's length. Raises `Corrupt`."""
    page = os.pread(fd, PAGE_BYTES, 0)
    needed = header_bytes_needed(page)
    header = page if needed <= len(page) else os.pread(fd, needed, 0)
    if len(header) < needed:
        raise Corrupt("chunk", "the file ends inside its header")
    return decode_header(header, file_bytes)[0]
