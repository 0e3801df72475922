"""What the arguments of a request must be beyond their types.

Each function gives its argument back, or raises `InvalidInput`.
"""

from typing import Any

from kvfs.config import BATCH_ITEMS_MAX, PATH_BYTES_MAX
from kvfs.errors import InvalidInput
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.wire import check_batch

_INO_MAX = 2**63 - 1


def checked_paths(values: list[Any], limit: int = BATCH_ITEMS_MAX) -> list[bytes]:
    check_batch(values, bytes, limit, "paths")
    for path in values:
        checked_path(path)
    return values


def checked_path(path: bytes) -> bytes:
    """Looking up a longer one would take a step for each of its parts."""
    if len(path) > PATH_BYTES_MAX:
        raise InvalidInput("path", f"has {len(path)} bytes; {PATH_BYTES_MAX} are the limit")
    return path


def checked_digests(values: list[Any]) -> list[bytes]:
    check_batch(values, bytes, BATCH_ITEMS_MAX, "digests")
    for digest in values:
        checked_digest(digest)
    return values


def checked_digest(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidInput("digest", f"has {len(digest)} bytes; {DIGEST_BYTES} are needed")
    return digest


def checked_limit(limit: int) -> int:
    if not 0 < limit <= BATCH_ITEMS_MAX:
        raise InvalidInput("limit", f"{limit} is not in 1..{BATCH_ITEMS_MAX}")
    return limit


def checked_ino(ino: int) -> int:
    if not 0 <= ino <= _INO_MAX:
        raise InvalidInput("after", f"{ino} is no inode number")
    return ino
