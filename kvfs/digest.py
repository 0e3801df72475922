"""The digest of a file: xxh3_128 of its bytes, 16 bytes long."""

import xxhash


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of bytes in memory. Releases the GIL while it runs."""
    return xxhash.xxh3_128(data).digest()
