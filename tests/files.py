"""Files of a running node, stored and read as a client does."""

import os
import stat
from pathlib import Path

from kvfs.client import Client
from kvfs.client_files import StagedFile
from kvfs.digest import digest_of
from kvfs.meta.contract import ChunkInfo

# What may lie in a file's place, as it is called; a device only root can make.
ODD_KINDS = {
    "a FIFO": stat.S_IFIFO,
    "a socket": stat.S_IFSOCK,
    "a character device": stat.S_IFCHR,
}


def store_bytes(client: Client, path: bytes, data: bytes, info: ChunkInfo | None = None) -> None:
    """Publish one file. `info`: what its header says, of a chunk."""
    (staged,) = client.stage([len(data)])
    try:
        assert os.pwrite(staged.fd, data, 0) == len(data)
        client.publish([StagedFile(staged.token, path, digest_of(data), len(data), info)])
    finally:
        os.close(staged.fd)


def store_at(store: Path, path: bytes, data: bytes) -> None:
    """The same, by a client of its own."""
    with Client(store) as client:
        store_bytes(client, path, data)


def load_bytes(client: Client, path: bytes) -> bytes | None:
    """A file's bytes, which must have its digest; None for a miss."""
    (opened,) = client.open([path])
    if opened is None:
        return None
    with opened:
        data = os.pread(opened.fd, opened.size_bytes + 1, 0)
        assert digest_of(data) == opened.digest
        return data
