"""Hashing on threads of its own, while a disk works for the caller."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import xxhash

Result = TypeVar("Result")


class PieceDigest:
    """The digest of bytes that arrive in pieces: each is hashed on another thread while the caller
    fetches the next. A piece must not change until `digest` returned."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._newest: memoryview | None = None
        self._running: Future[None] | None = None

    def add(self, piece: memoryview) -> None:
        """The next bytes. Waits for the piece before the one before, so that few are under way."""
        if self._newest is not None:
            self._wait()
            self._running = in_background(self._hash.update, self._newest)
        self._newest = piece

    def digest(self) -> bytes:
        """The digest of all pieces."""
        self._wait()
        if self._newest is not None:
            self._hash.update(self._newest)
            self._newest = None
        return self._hash.digest()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


def in_background(work: Callable[..., Result], *arguments: object) -> "Future[Result]":
    """Run hashing on a thread that is kept for it. The work must not wait for other such work."""
    return _hashers().submit(work, *arguments)


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "kvfs-digest")


os.register_at_fork(after_in_child=_hashers.cache_clear)  # threads do not survive a fork
