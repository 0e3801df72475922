"""The word with the node, as the bridge keeps it: a node that is away costs misses, and is said
once."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvfs.client import Client
from kvfs.config import PAGE_BYTES
from kvfs.errors import KvfsError, OutOfSpace, Unavailable

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Link:
    """A client whose failures are values. Several threads may use it; each call has the deadline
    that the client was made with."""

    def __init__(self, store: Path, *, deadline_s: float, start: bool) -> None:
        self.client = Client(store, start=start, deadline_s=deadline_s)
        self._store = store
        self._lock = threading.Lock()
        self._is_lost = False
        self._is_closed = False

    def ask(self, call: Callable[[Client], Result]) -> Result | None:
        """What the call returns, or None when the node does not answer or refuses, and after
        `close`. Raises `OutOfSpace`."""
        if self._is_closed:
            return None
        try:
            result = call(self.client)
        except OutOfSpace:
            raise
        except Unavailable as error:
            self._note_lost(error)
            return None
        except KvfsError as error:
            log.warning("kvfs: the node of %s refuses: %s", self._store, error)
            return None
        self._note_found()
        return result

    def beside(self, deadline_s: float) -> Client:
        """Another client of the same node, for calls behind which no others are to wait; the
        caller's to close."""
        return Client(self._store, deadline_s=deadline_s)

    def close(self) -> None:
        self._is_closed = True
        self.client.close()

    @property
    def is_lost(self) -> bool:
        """Whether the node did not answer the last time."""
        with self._lock:
            return self._is_lost

    def _note_lost(self, error: Unavailable) -> None:
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
        if not was_lost:
            log.warning("kvfs: working without cache until its node answers: %s", error)

    def _note_found(self) -> None:
        with self._lock:
            was_lost, self._is_lost = self._is_lost, False
        if was_lost:
            log.warning("kvfs: the node of %s answers again", self._store)


def is_chunk_size(size_bytes: int | None) -> bool:
    """Whether a file of this size (None: no file) can be a chunk: none is shorter than a header."""
    return size_bytes is not None and size_bytes >= PAGE_BYTES
