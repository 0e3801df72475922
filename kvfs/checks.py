"""Which blobs were found whole since the node started, and the reading that finds it."""

import os

import trio

from kvfs.blob_files import open_blob_file
from kvfs.config import VERIFIED_MAX
from kvfs.stored import digest_file


class Checks:
    """Digests of blobs that were read whole and are right, with the time of their files' last
    change. Bounded: the oldest are forgotten, and checked again when they are opened."""

    def __init__(self) -> None:
        self._right: dict[bytes, int] = {}
        self._running: dict[bytes, trio.Event] = {}

    def note(self, digest: bytes, mtime_ns: int) -> None:
        """These bytes were hashed just now, of a file that was changed then."""
        self._right[digest] = mtime_ns
        if len(self._right) > VERIFIED_MAX:
            self._right.pop(next(iter(self._right)))

    def forget(self, digest: bytes) -> None:
        """The file under this digest is another one, or none."""
        self._right.pop(digest, None)

    def is_changed(self, digest: bytes, mtime_ns: int) -> bool:
        """Whether a file was written to since its bytes were found right."""
        return self._right.get(digest, mtime_ns) != mtime_ns

    def is_known(self, digest: bytes) -> bool:
        """Whether a blob was found right, and nobody is looking again."""
        return digest in self._right and digest not in self._running

    async def is_right(self, digest: bytes, path: str, *, again: bool) -> bool:
        """Whether a blob's file has the bytes of its digest, read once unless `again`. Who asks
        while it is read waits for that. A file that is gone is not wrong."""
        while (running := self._running.get(digest)) is not None:
            await running.wait()
        if digest in self._right and not again:
            return True
        self._running[digest] = trio.Event()
        try:
            found = await trio.to_thread.run_sync(_digest_of_path, path, abandon_on_cancel=True)
        finally:
            self._running.pop(digest).set()
        if found is None:
            return True
        found_digest, mtime_ns = found
        if found_digest == digest:
            self.note(digest, mtime_ns)
        return found_digest == digest


def _digest_of_path(path: str) -> tuple[bytes, int] | None:
    """The digest of a file's bytes, and when it was changed last; None when it is gone."""
    try:
        fd = open_blob_file(path)
    except FileNotFoundError:
        return None
    try:
        mtime_ns = os.fstat(fd).st_mtime_ns  # before: what is written meanwhile is seen then
        return digest_file(fd), mtime_ns
    finally:
        os.close(fd)
