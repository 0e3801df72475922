"""A node that exists in this process only: what the bridge asks for, with files in memory."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvfs.client_files import OpenFile, Staged, StagedFile
from kvfs.digest import digest_of
from kvfs.errors import OutOfSpace, Unavailable
from kvfs.located import NOWHERE, Located, LocatedFile, ToldTiers
from kvfs.meta.contract import ChunkInfo
from kvfs.names import ChunkKeys

Result = TypeVar("Result")


class MemoryNode:
    """Stands in for a `Link` and its client. `is_away`: every call fails. `before`: called with the
    name of each operation before it happens, on the caller's thread."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.digests: dict[bytes, bytes] = {}  # where they are not those of the bytes
        self.infos: dict[bytes, ChunkInfo | None] = {}
        self.reported: list[bytes] = []
        self.calls: list[str] = []
        self.open_staged: dict[int, int] = {}
        self.is_away = False
        self.is_full = False
        self.tiers_told = ToldTiers(1, {})
        self.tiers_of: dict[
            bytes, tuple[int, ...]
        ] = {}  # of files, the numbers of those that have it
        self.only_in_tiers: set[bytes] = set()
        self.coming: set[bytes] = set()  # on their way from there
        self.gone: list[tuple[int, bytes]] = []
        self.before: Callable[[str], None] = lambda name: None
        self._lock = threading.Lock()
        self._token = 0

    @property
    def client(self) -> "MemoryNode":
        return self

    def ask(self, call: "Callable[[MemoryNode], Result]") -> Result | None:
        try:
            return call(self)
        except Unavailable:
            return None

    def beside(self, deadline_s: float) -> "MemoryNode":
        return self

    def close(self) -> None:
        pass

    def put(self, path: bytes, content: bytes, digest: bytes | None = None) -> None:
        """Publish, with a digest that is not that of the content when one is given."""
        self.files[path] = content
        self.digests[path] = digest_of(content) if digest is None else digest

    # The client's operations ----------------------------------------------------------------------
    def lookup(self, paths: Sequence[bytes]) -> list[int | None]:
        self._note("lookup")
        return [len(self.files[path]) if path in self.files else None for path in paths]

    def lookup_chunks(self, namespace: bytes, keys: ChunkKeys) -> list[int | None]:
        return self.lookup([b"%b/%b/%b" % (namespace, n[:2], n) for n in keys.file_names()])

    def bring(
        self, paths: Sequence[bytes], wait_s: float
    ) -> tuple[list[OpenFile | None], list[int]]:
        self._note("bring")
        here = self.files.keys() - self.only_in_tiers
        coming = [number for number, path in enumerate(paths) if path in self.coming]
        return [self._open(path) if path in here else None for path in paths], coming

    def locate(self, paths: Sequence[bytes]) -> Located:
        self._note("locate")
        files: list[LocatedFile | None] = []
        for path in paths:
            tiers = self.tiers_of.get(path, ())
            if path not in self.files:
                files.append(None)
            elif path in self.only_in_tiers:
                size_bytes, digest = len(self.files[path]), self.digests[path]
                files.append(LocatedFile(size_bytes, digest, None, NOWHERE, tiers, ()))
            else:
                here = self._open(path)
                files.append(LocatedFile(here.size_bytes, here.digest, here.fd, 0, tiers, ()))
        return Located(self.tiers_told.revision, files)

    def tiers(self) -> ToldTiers:
        self._note("tiers")
        return self.tiers_told

    def note_gone(self, gone: Sequence[tuple[int, bytes]]) -> None:
        self._note("note_gone")
        self.gone += gone

    def _open(self, path: bytes) -> OpenFile:
        fd = os.memfd_create("chunk")
        os.pwrite(fd, self.files[path], 0)
        return OpenFile(fd, len(self.files[path]), self.digests[path])

    def stage(self, sizes_bytes: Sequence[int]) -> list[Staged]:
        self._note("stage")
        if self.is_full:
            raise OutOfSpace("full")
        staged = []
        for _ in sizes_bytes:
            with self._lock:
                self._token += 1
                token = self._token
                self.open_staged[token] = os.memfd_create("staged")
            staged.append(Staged(token, os.dup(self.open_staged[token])))
        return staged

    def publish(self, files: Sequence[StagedFile]) -> None:
        self._note("publish")
        for file in files:
            fd = self.open_staged.pop(file.token)
            content = os.pread(fd, file.size_bytes + 1, 0)
            os.close(fd)
            assert len(content) == file.size_bytes
            assert digest_of(content) == file.digest
            self.put(file.path, content)
            self.infos[file.path] = file.chunk

    def discard(self, tokens: Sequence[int]) -> None:
        self._note("discard")
        for token in tokens:
            os.close(self.open_staged.pop(token))

    def report_corrupt(self, digest: bytes, deadline_s: float) -> bool:
        self._note("report_corrupt")
        self.reported.append(digest)
        return True

    def _note(self, name: str) -> None:
        self.before(name)
        if self.is_away:
            raise Unavailable("away")
        with self._lock:
            self.calls.append(name)
