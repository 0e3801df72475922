"""A client of a store that exists only in memory, for tests of what looks at one."""

import errno
import stat
from collections.abc import Sequence
from dataclasses import replace

import xxhash

from kvfs.errors import NamespaceError
from kvfs.meta.contract import Blob, ChunkEntry, ChunkInfo, Entry, Inode
from kvfs.names import chunk_key, chunk_path

START_NS = 1_800_000_000 * 10**9


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """As in chunk files: xxh3_64 of the token ids as little-endian u32."""
    return xxhash.xxh3_64_digest(b"".join(token.to_bytes(4, "little") for token in tokens))


class FakeClient:
    """Directories, files and chunks, with the answers that a node gives."""

    def __init__(self) -> None:
        self.inodes: dict[bytes, Inode] = {b"": self._inode(1, stat.S_IFDIR | 0o755)}
        self.infos: dict[int, ChunkInfo] = {}
        self.bad: set[bytes] = set()
        self.verified: list[bytes] = []
        self.calls = 0

    @staticmethod
    def _inode(ino: int, mode: int) -> Inode:
        at_ns = START_NS + ino
        return Inode(ino, mode, 0, 0, 1, 0, at_ns, at_ns, at_ns)

    # Filling -------------------------------------------------------------------------------------
    def add_file(
        self, path: bytes, content: bytes = b"x", *, size_bytes: int | None = None
    ) -> Inode:
        parts = path.split(b"/")
        for depth in range(1, len(parts)):
            above = b"/".join(parts[:depth])
            if above not in self.inodes:
                self.inodes[above] = self._inode(len(self.inodes) + 1, stat.S_IFDIR | 0o755)
        ino = max(inode.ino for inode in self.inodes.values()) + 1
        inode = replace(
            self._inode(ino, stat.S_IFREG | 0o644),
            size_bytes=len(content) if size_bytes is None else size_bytes,
            digest=xxhash.xxh3_128_digest(content),
            used_ns=START_NS + ino,
        )
        self.inodes[path] = inode
        return inode

    def add_chunk(
        self,
        namespace: bytes,
        name: str,
        parent: str | None,
        span: tuple[int, int],
        *,
        part: tuple[int, int] = (0, 0),
        tokens: Sequence[int] | None = None,
        used_ns: int | None = None,
        size_bytes: int = 2 * 2**20,
    ) -> bytes:
        """A chunk file; `name` and `parent` stand for block hashes. Its path."""
        key = chunk_key(block_hash(name), *part)
        path = chunk_path(namespace, key)
        inode = self.add_file(path, path, size_bytes=size_bytes)
        if used_ns is not None:
            self.inodes[path] = replace(inode, used_ns=used_ns)
        self.infos[inode.ino] = ChunkInfo(
            key=key.encode(),
            parent=b"" if parent is None else chunk_key(block_hash(parent), *part).encode(),
            token_start=span[0],
            token_end=span[1],
            group=part[0],
            shard=part[1],
            tokens_digest=b"" if tokens is None else tokens_digest(tokens[span[0] : span[1]]),
        )
        return path

    def remove(self, path: bytes) -> None:
        del self.inodes[path]

    # What a node answers -------------------------------------------------------------------------
    def stat(self, path: bytes) -> Inode | None:
        return self.inodes.get(path)

    def entries(self, path: bytes, after: bytes, limit: int) -> list[Entry]:
        self.calls += 1
        inode = self.inodes.get(path)
        if inode is None or not inode.is_directory:
            raise NamespaceError(errno.ENOENT if inode is None else errno.ENOTDIR, path)
        prefix = path + b"/" if path else b""
        names = sorted(
            found[len(prefix) :]
            for found in self.inodes
            if found.startswith(prefix) and found != path and b"/" not in found[len(prefix) :]
        )
        later = [name for name in names if name > after][:limit]
        return [Entry(name, self.inodes[prefix + name]) for name in later]

    def children(
        self, namespace: bytes, parent_key: bytes, after: int, limit: int
    ) -> list[ChunkEntry]:
        self.calls += 1
        found = [
            ChunkEntry(self.infos[inode.ino], inode)
            for path, inode in self.inodes.items()
            if path.startswith(namespace + b"/")
            and inode.ino in self.infos
            and inode.ino > after
            and self.infos[inode.ino].parent == parent_key
        ]
        return sorted(found, key=lambda entry: entry.inode.ino)[:limit]

    def children_of(
        self, namespace: bytes, parent_keys: Sequence[bytes], limit: int
    ) -> list[list[ChunkEntry]]:
        return [self.children(namespace, key, 0, limit) for key in parent_keys]

    def chunk(self, path: bytes) -> ChunkInfo | None:
        inode = self.inodes.get(path)
        return None if inode is None else self.infos.get(inode.ino)

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        self.calls += 1
        found: list[Blob | None] = []
        for digest in digests:
            files = [inode for inode in self.inodes.values() if inode.digest == digest]
            if not files:
                found.append(None)
                continue
            size_bytes = files[0].size_bytes
            allocated_bytes = -(-size_bytes // 4096) * 4096
            found.append(Blob(digest, size_bytes, allocated_bytes, 0, len(files)))
        return found

    def paths_of(self, digest: bytes) -> list[bytes]:
        return [path for path, inode in self.inodes.items() if inode.digest == digest]

    def verify(self, path: bytes) -> bool:
        inode = self.inodes.get(path)
        if inode is None:
            raise NamespaceError(errno.ENOENT, path)
        self.verified.append(path)
        if inode.digest not in self.bad:
            return True
        for other in self.paths_of(inode.digest):
            self.remove(other)
        return False


def block_hash(name: str) -> bytes:
    """The block hash that a test's short name stands for."""
    return xxhash.xxh3_128_digest(name.encode())
