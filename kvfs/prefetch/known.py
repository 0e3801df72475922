"""What a node knows of files that are not here: which chunks continue which, and who has the bytes.

Nothing here fails: what cannot be said at the moment is not there.
"""

import logging
from collections.abc import Collection, Sequence

from kvfs.config import TIERS_MAX
from kvfs.errors import KvfsError
from kvfs.meta.contract import Inode
from kvfs.node import Node
from kvfs.prefetch.words import Wanted
from kvfs.replicate import HolderState

log = logging.getLogger(__name__)

TIERS = (1 << TIERS_MAX) - 1  # sources: bit n is the tier with number n
PEERS = 1 << TIERS_MAX  # and these the other nodes,
ANYBODY = 1 << TIERS_MAX + 1  # and who may turn out to have it, asked for orders only


class Known:
    """What `Prefetch` asks, in the node's thread."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def children(self, ino: int, limit: int) -> Sequence[int] | None:
        """The chunks that continue a chunk, at most `limit`, the last used first; None for a file
        that is no chunk."""
        meta = self._node.meta
        try:
            chunk = meta.chunk(ino)
            if chunk is None:
                return None
            names = meta.names_of(ino)
            if not names:
                return ()
            namespace = meta.parent_of(names[0][0])
            found = meta.children(namespace, chunk.key, 0, limit)
        except KvfsError as error:
            log.debug("what continues a chunk is not known: %s", error)
            return ()
        found = [child for child in found if child.info.token_start > chunk.token_start]
        return [c.inode.ino for c in sorted(found, key=lambda c: c.inode.used_ns, reverse=True)]

    def lacking(self, inos: Sequence[int]) -> Sequence[Wanted]:
        """In this order, what of these files is not here and may be fetched on a guess: not from
        tiers that charge for it."""
        found = self.wanted(self.files(inos))
        free = ~self._charging
        return [
            Wanted(one.ino, one.digest, one.size_bytes, one.sources & free)
            for one in found
            if one.sources & free
        ]

    def is_here(self, digest: bytes) -> bool:
        """Whether this node can open a blob."""
        try:
            return self._node.is_here([digest])[0]
        except KvfsError as error:
            log.debug("whether %s is here is not known: %s", digest.hex(), error)
            return False

    def files(self, inos: Sequence[int]) -> list[Inode]:
        """Those that are there and published."""
        try:
            found = [self._node.meta.inode(ino) for ino in inos]
        except KvfsError as error:
            log.debug("files are not known: %s", error)
            return []
        return [inode for inode in found if inode is not None and inode.is_published]

    def wanted(self, inodes: Sequence[Inode]) -> list[Wanted]:
        """Those whose bytes are not here, with who has them; nobody, where that is not known."""
        digests = [inode.digest for inode in inodes]
        try:
            here = self._node.is_here(digests)
        except KvfsError as error:
            log.debug("what is here is not known: %s", error)
            return []
        away = [inode for inode, is_here in zip(inodes, here, strict=True) if not is_here]
        masks = self._masks(away)
        held = self._held_by_peers([i.digest for i in away if not masks[i.digest]])
        return [
            Wanted(
                inode.ino,
                inode.digest,
                inode.size_bytes,
                masks[inode.digest] or (PEERS if inode.digest in held else 0),
            )
            for inode in away
        ]

    def _masks(self, inodes: Sequence[Inode]) -> dict[bytes, int]:
        digests = [inode.digest for inode in inodes]
        tiering = self._node.tiering
        if tiering is None:
            return dict.fromkeys(digests, 0)
        usable = sum(1 << one.number for one in tiering.tiers if one.is_usable)
        masks = tiering.holdings.masks(digests)
        return {digest: mask & usable for digest, mask in zip(digests, masks, strict=True)}

    @property
    def _charging(self) -> int:
        """The tiers that cost something."""
        tiering = self._node.tiering
        mask = 0
        for one in () if tiering is None else tiering.tiers:
            if one.config.limits.cost_per_request or one.config.limits.cost_per_gib:
                mask |= 1 << one.number
        return mask

    def _held_by_peers(self, digests: Sequence[bytes]) -> Collection[bytes]:
        neighbours = self._node.neighbours
        if neighbours is None or not digests:
            return ()
        try:
            copies = neighbours.copies(digests)
        except KvfsError as error:
            log.debug("who has a file is not known: %s", error)
            return ()
        return {
            digest
            for digest, holders in zip(digests, copies, strict=True)
            if any(h.state is not HolderState.GONE and not h.is_this for h in holders)
        }
