"""Checking many files against their digests: what `kvfs verify` does, in batches.

The node reads the files. A batch is bounded by bytes, so that its answer comes within a deadline
and progress shows, and by files, so that a hundred thousand small ones are a hundred round trips.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.config import CHUNK_BYTES_MAX
from kvfs.inspect import PAGE_ITEMS, Catalogue, Found, walk

_BATCH_BYTES_MAX = CHUNK_BYTES_MAX


class Verdict(enum.Enum):
    """What a check of one file found."""

    GOOD = "good"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"  # which says nothing of its bytes
    GONE = "gone"  # removed while the check was on its way
    UNPUBLISHED = "unpublished"  # still being written


@dataclass(frozen=True, slots=True)
class Checked:
    """A file and its verdict; `read_bytes` is 0 when equal bytes were checked before. `reason`: why
    it cannot be read."""

    path: bytes
    size_bytes: int
    verdict: Verdict
    read_bytes: int
    reason: str = ""


class Verifier(Catalogue, Protocol):
    """What checking files takes besides."""

    def verify_all(self, paths: Sequence[bytes]) -> Sequence[bool | str | None]: ...


def verify_files(verifier: Verifier, path: bytes) -> Iterator[Checked]:
    """Check every file below a path against its digest; equal bytes are read once.

    The node quarantines what is bad, and takes every name of those bytes away.
    """
    known: dict[bytes, Verdict] = {}  # of bytes that files of other batches may have too
    batch: list[Found] = []
    batch_bytes = 0
    for found in walk(verifier, path):
        if not found.inode.is_regular:
            continue
        if batch and (
            len(batch) >= PAGE_ITEMS or batch_bytes + found.inode.size_bytes > _BATCH_BYTES_MAX
        ):
            yield from _verify_batch(verifier, batch, known)
            batch, batch_bytes = [], 0
        batch.append(found)
        batch_bytes += found.inode.size_bytes
    yield from _verify_batch(verifier, batch, known)


def _verify_batch(
    verifier: Verifier, batch: Sequence[Found], known: dict[bytes, Verdict]
) -> Iterator[Checked]:
    first: dict[bytes, bytes] = {}  # digest -> the path that is read for it
    for item in batch:
        if item.inode.digest and item.inode.digest not in known:
            first.setdefault(item.inode.digest, item.path)
    answers = dict(zip(first, verifier.verify_all(list(first.values())), strict=True))
    blobs = verifier.blobs(list(first)) if first else []
    shared = {blob.digest for blob in blobs if blob is not None and blob.references > 1}
    for item in batch:
        digest = item.inode.digest
        if not digest:
            yield Checked(item.path, item.inode.size_bytes, Verdict.UNPUBLISHED, 0)
        elif digest in known:
            yield Checked(item.path, item.inode.size_bytes, known[digest], 0)
        elif first[digest] == item.path:
            yield _checked(item, answers[digest], is_first=True)
        elif answers[digest] is None:  # that name has gone; this one may still be there
            first[digest] = item.path
            (answers[digest],) = verifier.verify_all([item.path])
            yield _checked(item, answers[digest], is_first=True)
        else:
            yield _checked(item, answers[digest], is_first=False)
    for digest, answer in answers.items():
        if answer is False or (answer is True and digest in shared):
            known[digest] = Verdict.GOOD if answer else Verdict.CORRUPT


def _checked(item: Found, answer: bool | str | None, *, is_first: bool) -> Checked:
    """What the node's answer says of a file; `is_first`: it was read for it."""
    size_bytes = item.inode.size_bytes
    if isinstance(answer, str):
        return Checked(item.path, size_bytes, Verdict.UNREADABLE, 0, answer)
    verdict = {True: Verdict.GOOD, False: Verdict.CORRUPT, None: Verdict.GONE}[answer]
    return Checked(item.path, size_bytes, verdict, size_bytes if is_first else 0)
