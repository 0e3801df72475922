"""The digest of a file that is written from its start to its end, ready when it is closed."""

import xxhash


class GrowingDigest:
    """Of the bytes that were added so far."""

    __slots__ = ("_hash", "size_bytes")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        """The bytes that follow."""
        self._hash.update(data)
        self.size_bytes += len(data)

    def digest(self) -> bytes:
        return self._hash.digest()
