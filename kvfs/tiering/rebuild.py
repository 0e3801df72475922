"""Names of chunk files that were lost with the metadata, found again in tiers: from the headers of
what lies there. Bytes are checked when they are read, like all others; other files have no names to
be found."""

import logging
import os
from collections.abc import Iterator, Sequence

import trio

from kvfs.chunk import chunk_info, decode_header, header_bytes_needed
from kvfs.config import PAGE_BYTES
from kvfs.errors import Corrupt, InvalidInput, NamespaceError
from kvfs.file_io import allocate
from kvfs.meta.contract import AWAY, Publication
from kvfs.node import Node
from kvfs.tiering.opening import ConfiguredTier
from kvfs.tiers.contract import WritableTier
from kvfs.upkeep import path_of

log = logging.getLogger(__name__)
_HEADERS_AT_ONCE = 16

Found = list[tuple[bytes, int]]  # digests and sizes


async def rebuild_from_tier(node: Node, one: ConfiguredTier) -> int:
    """Give chunk files of a tier their names again, where nobody has these or the bytes; how many.
    For who holds `Node.upkeep_lock`. Raises `Unavailable` when the tier does not answer."""
    tier = one.tier
    if tier is None:
        return 0
    named = 0
    batches = tier.scan()
    while batch := await trio.to_thread.run_sync(_next_batch, batches):
        for begin in range(0, len(batch), _HEADERS_AT_ONCE):
            part = _unnamed(node, batch[begin : begin + _HEADERS_AT_ONCE])
            if part:
                found = await trio.to_thread.run_sync(_read_publications, tier, part, node.now_ns())
                named += _name(node, one, found)
    return named


def _next_batch(batches: Iterator[Found]) -> Found:
    return next((batch for batch in batches if batch), [])


def _unnamed(node: Node, blobs: Found) -> Found:
    uses = node.meta.uses_of([digest for digest, _ in blobs])
    return [blob for blob, use in zip(blobs, uses, strict=True) if use is None]


def _name(node: Node, one: ConfiguredTier, found: Sequence[Publication]) -> int:
    """What was named meanwhile stays as it is."""
    assert node.tiering is not None
    named = 0
    for publication in found:
        if node.meta.resolve([publication.path])[0] is not None:
            continue
        node.tiering.holdings.note_held(publication.digest, publication.size_bytes, one.number)
        try:
            (published,) = node.meta.publish([publication], node.now_ns())
        except NamespaceError as error:
            log.warning("%s: %s", os.fsdecode(publication.path), error)
            continue
        node.notify(published.parent, published.name, published.inode.ino)
        named += 1
    return named


def _read_publications(tier: WritableTier, blobs: Found, now_ns: int) -> list[Publication]:
    found = []
    for digest, size_bytes in blobs:
        try:
            publication = _read_publication(tier, digest, size_bytes, now_ns)
        except (Corrupt, InvalidInput) as error:
            log.info("blob %s in tier %s is no chunk: %s", digest.hex(), tier.name, error)
            continue
        if publication is not None:
            found.append(publication)
    return found


def _read_publication(
    tier: WritableTier, digest: bytes, size_bytes: int, now_ns: int
) -> Publication | None:
    """None for what went meanwhile. Raises `Corrupt` and `InvalidInput` for no chunk, and
    `Unavailable`."""
    if size_bytes == 0:
        return None
    header = _memory(min(size_bytes, PAGE_BYTES))
    if not tier.read_into(digest, 0, header):
        return None
    needed = header_bytes_needed(header)
    if needed > len(header):
        header = _memory(min(size_bytes, needed))
        if not tier.read_into(digest, 0, header):
            return None
    decoded, _ = decode_header(bytes(header), size_bytes)
    return Publication(
        digest=digest,
        size_bytes=size_bytes,
        allocated_bytes=0,
        directory=AWAY,
        mtime_ns=now_ns,
        path=path_of(decoded),
        uid=os.geteuid(),
        gid=os.getegid(),
        chunk=chunk_info(decoded),
    )


def _memory(size_bytes: int) -> memoryview:
    return allocate(size_bytes)[:size_bytes]
