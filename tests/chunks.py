"""Chunks that continue each other, of 256 tokens each and named by a letter."""

from kvfs.chunk import ChunkHeader, TensorSpec, chunk_info, encode_header
from kvfs.client import Client
from kvfs.digest import digest_of
from kvfs.names import chunk_key, chunk_path, namespace_path
from tests.files import store_bytes

MODEL = "Qwen/Qwen3-8B"
FINGERPRINT = "0123456789abcdef0123456789abcdef"
SPACE = namespace_path(MODEL, FINGERPRINT)


def chunk_file(
    name: str, parent: str | None, number: int, tokens: list[int] | None = None
) -> tuple[bytes, bytes, ChunkHeader]:
    """Path, bytes and header of the chunk of 256 tokens that a short name stands for."""
    start = 256 * number
    payload = name.encode() * 4096
    header = ChunkHeader(
        model=MODEL,
        fingerprint=FINGERPRINT,
        key=chunk_key(digest_of(name.encode()), 0, 0),
        parent="" if parent is None else chunk_key(digest_of(parent.encode()), 0, 0),
        token_start=start,
        token_end=start + 256,
        group=0,
        shard=0,
        engine="test",
        digest=digest_of(payload),
        token_ids=None if tokens is None else tuple(tokens[start : start + 256]),
        tensors=(TensorSpec("layer.0", "U8", (len(payload),)),),
    )
    return chunk_path(SPACE, header.key), encode_header(header) + payload, header


def store_chain(
    client: Client,
    names: str,
    parent: str | None = None,
    number: int = 0,
    tokens: list[int] | None = None,
) -> list[bytes]:
    """Store such chunks; their paths, in order."""
    paths = []
    for name in names:
        path, data, header = chunk_file(name, parent, number, tokens)
        store_bytes(client, path, data, chunk_info(header))
        paths.append(path)
        parent, number = name, number + 1
    return paths
