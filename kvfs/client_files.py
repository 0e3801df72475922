"""The files that a client gets from its node, open, and those that it gives it, staged; see
`kvfs.located` for those whose bytes lie elsewhere."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvfs.located import LocatedFile
from kvfs.meta.contract import ChunkInfo


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A published file, open for reading. The descriptor is the holder's to close."""

    fd: int
    size_bytes: int
    digest: bytes
    directory: int = 0  # the number of the store's, in which it lies

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Staged:
    """A private file to fill. The descriptor is the holder's to close, published or not."""

    token: int
    fd: int


@dataclass(frozen=True, slots=True)
class StagedFile:
    """What a filled staged file is to become."""

    token: int
    path: bytes
    digest: bytes  # xxh3_128 of the whole file
    size_bytes: int
    chunk: ChunkInfo | None = None


def close_all(files: Sequence[OpenFile | LocatedFile | None]) -> None:
    """Close those that are there."""
    for file in files:
        if file is not None:
            file.close()
