"""A directory of a store as a tier of another process: it reads what the node handed over.

That process may have no right to open the directory's files, and need not even see them.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence

from kvfs.errors import TierBusy
from kvfs.file_io import read_into
from kvfs.settings.words import TierKind, TierLimits
from kvfs.tiers.contract import Tier, check_time


class HandedFile:
    """A blob's descriptor. It is closed when it was taken back and no read uses it."""

    __slots__ = ("digest", "error", "fd", "is_short", "size_bytes", "turn", "users")

    def __init__(self, digest: bytes, size_bytes: int, fd: int) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.fd = fd
        self.users = 1  # who handed it over, and reads; under the tier's lock
        self.turn = threading.Lock()  # O_DIRECT is set and unset on a descriptor while it is read
        self.is_short = False  # it has fewer bytes than its node said
        self.error: OSError | None = None  # of the last read that failed


class HandedTier(Tier):
    """Blobs by their descriptors. Each is here as often as it was handed over and not taken back:
    jobs that read the same blob at the same time have a descriptor each."""

    def __init__(self, name: str, limits: TierLimits, complain: Callable[[bytes], None]) -> None:
        """`complain` is told of a blob that has other bytes than its digest says; it must not
        block."""
        super().__init__(name, TierKind.NVME, limits)
        self._complain = complain
        self._files: dict[bytes, list[HandedFile]] = {}
        self._files_lock = threading.Lock()

    def hand(self, digest: bytes, size_bytes: int, fd: int) -> HandedFile:
        """Have a blob read by a descriptor, which is the tier's from now on."""
        file = HandedFile(digest, size_bytes, fd)
        with self._files_lock:
            self._files.setdefault(digest, []).append(file)
        return file

    def take_back(self, file: HandedFile) -> None:
        """Pairs with `hand`: no read of it begins any more."""
        with self._files_lock:
            files = self._files[file.digest]
            files.remove(file)
            if not files:
                del self._files[file.digest]
        self._let_go(file)

    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        file = self._take(digest)
        if file is None:
            return False
        try:
            return self._read(file, offset_bytes, buffer, end_s)
        except OSError as error:
            file.error = error
            raise
        finally:
            self._let_go(file)

    def _read(self, file: HandedFile, at: int, buffer: memoryview, end_s: float) -> bool:
        def tell(_: memoryview) -> None:
            check_time(end_s, self.name)

        if not file.turn.acquire(timeout=max(0.0, end_s - time.monotonic())):
            raise TierBusy(self.name, "reads of one file")
        try:
            count = read_into(file.fd, buffer, len(buffer), tell, at)
        finally:
            file.turn.release()
        if count == len(buffer):
            return True
        if at + len(buffer) <= file.size_bytes:
            file.is_short = True
            self._complain(file.digest)
        return False

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        with self._files_lock:
            found = [self._files.get(digest) for digest in digests]
            return [files[0].size_bytes if files else None for files in found]

    def _recheck(self, digest: bytes, end_s: float) -> bool:
        """The node does it, which is told."""
        self._complain(digest)
        return False

    def _take(self, digest: bytes) -> HandedFile | None:
        """A descriptor that nobody reads now, if there is one."""
        with self._files_lock:
            files = self._files.get(digest)
            if not files:
                return None
            file = min(files, key=lambda file: file.users)
            file.users += 1
            return file

    def _let_go(self, file: HandedFile) -> None:
        with self._files_lock:
            file.users -= 1
            is_unused = file.users == 0
        if is_unused:
            os.close(file.fd)
