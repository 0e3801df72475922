"""The digest of a file: xxh3_128 of its bytes, 16 bytes long."""

import os

import xxhash

_READ_BYTES = 4 * 1024 * 1024


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of bytes in memory. Releases the GIL while it runs."""
    return xxhash.xxh3_128(data).digest()


def digest_file(fd: int) -> tuple[int, bytes]:
    """The size in bytes and the digest of an open file, read from its start. May block."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    size_bytes = 0
    while count := os.preadv(fd, [buffer], size_bytes):
        hasher.update(buffer[:count])
        size_bytes += count
    return size_bytes, hasher.digest()
