"""One rank's part of chunks: what its chunk files say, how large they are, and whether one that was
read is the one that was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_bridge.layout import GroupLayout
from gpu_bridge.plan import Chunk, Geometry, Place
from kvfs.chunk import TOKEN_MAX, ChunkHeader, encode_header
from kvfs.config import whole_pages
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.names import BLOCK_HASH_BYTES_MAX, FINGERPRINT_BYTES_MAX, chunk_key, chunk_path

_NO_DIGEST = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank: its number, and where its layers' bytes lie. `engine`: who writes, for the header."""

    index: int
    engine: str
    geometry: Geometry
    layouts: Mapping[int, GroupLayout]

    def blocks(self, group: int) -> int:
        """How many blocks of a group a chunk has."""
        tokens = next(g.block_tokens for g in self.geometry.groups if g.index == group)
        return self.geometry.chunk_tokens // tokens

    def payload_bytes(self, group: int) -> int:
        return self.layouts[group].block_bytes * self.blocks(group)

    def path(self, place: Place, chunk: Chunk) -> bytes:
        return chunk_path(place.namespace, self._key(chunk.hash, chunk.group))

    def header(self, place: Place, chunk: Chunk, token_ids: tuple[int, ...] | None) -> ChunkHeader:
        """The header of a chunk file, before the payload's digest is known."""
        return ChunkHeader(
            model=place.model,
            fingerprint=place.fingerprint,
            key=self._key(chunk.hash, chunk.group),
            parent=self._key(chunk.parent, chunk.group) if chunk.parent else "",
            token_start=chunk.token_start,
            token_end=chunk.token_end,
            group=chunk.group,
            shard=self.index,
            engine=self.engine,
            digest=_NO_DIGEST,
            token_ids=token_ids,
            tensors=self.layouts[chunk.group].specs(self.blocks(chunk.group)),
        )

    def file_bytes_max(self, model: str) -> int:
        """What the largest chunk file takes, in whole pages."""
        return max(self._file_bytes_max(model, group.index) for group in self.geometry.groups)

    def _file_bytes_max(self, model: str, group: int) -> int:
        own, parent = bytes(BLOCK_HASH_BYTES_MAX), b"\1" * BLOCK_HASH_BYTES_MAX
        tokens = self.geometry.chunk_tokens
        chunk = Chunk(own, parent, TOKEN_MAX - tokens, TOKEN_MAX, group)
        place = Place(b"", model, "0" * FINGERPRINT_BYTES_MAX)
        header = encode_header(self.header(place, chunk, (TOKEN_MAX,) * tokens))
        return whole_pages(len(header) + self.payload_bytes(group))

    def _key(self, block_hash: bytes, group: int) -> str:
        return chunk_key(block_hash, group, self.index)
