"""What tests of metadata say: made-up files, and what each suite of an engine is given."""

import errno
import stat
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvfs.errors import NamespaceError
from kvfs.meta.contract import ROOT_INO, ChunkInfo, MetaEngine, Publication

DIRECTORY = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644
T0 = 1_000_000_000_000_000_000


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def publication(number: int, path: bytes = b"", **fields: object) -> Publication:
    base = Publication(digest(number), 100 + number, 4096, 0, T0, path=path)
    return replace(base, **fields)  # type: ignore[arg-type]  # a test's own words


def chunk(key: bytes, parent: bytes = b"", start: int = 0) -> ChunkInfo:
    return ChunkInfo(key, parent, start, start + 256, 0, 0, b"\1" * 8)


def refused(code: int, call: Callable[..., object], *arguments: object) -> None:
    """The call must fail with this errno."""
    with pytest.raises(NamespaceError) as caught:
        call(*arguments)
    assert errno.errorcode[caught.value.code] == errno.errorcode[code]


class OfEngine:
    """Subclasses give `reopen`: a function that closes the engine and opens it again, as a restart
    does, and that opens a new one at first."""

    @pytest.fixture
    def reopen(self) -> Callable[[], MetaEngine]:
        raise NotImplementedError

    @pytest.fixture
    def meta(self, reopen: Callable[[], MetaEngine]) -> MetaEngine:
        return reopen()

    def directory(self, meta: MetaEngine, name: bytes, parent: int = ROOT_INO) -> int:
        return meta.make(parent, name, DIRECTORY, 0, 0, T0).ino

    def file(self, meta: MetaEngine, name: bytes, parent: int = ROOT_INO) -> int:
        return meta.make(parent, name, FILE, 0, 0, T0).ino
