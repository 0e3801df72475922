"""Tells the node which chunks requests will want that wait in the engine's queue, so that it may
bring near what is far away. Nothing depends on it: what is too much, too late or not heard is
dropped."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_bridge.plan import Geometry, Place, chunk_keys
from kvfs.client import Client
from kvfs.config import (
    BRIDGE_EXPECT_AFTER_S,
    BRIDGE_EXPECT_AGAIN_S,
    BRIDGE_EXPECTED_CHUNKS_MAX,
    BRIDGE_EXPECTED_REQUESTS_MAX,
)
from kvfs.errors import KvfsError

log = logging.getLogger(__name__)


class Waiting:
    """A request's chunks, as long as it waits. `end` may be called by any thread."""

    __slots__ = ("_is_over",)

    def __init__(self) -> None:
        self._is_over = False

    def end(self) -> None:
        """It is being loaded, or will never be."""
        self._is_over = True

    @property
    def is_over(self) -> bool:
        return self._is_over


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a request found. `due_s`: when it has waited long enough to be worth a word."""

    waiting: Waiting
    place: Place
    hashes: Sequence[bytes]
    due_s: float


class Expectations:
    """One thread, and a connection of its own. Owns the client."""

    def __init__(self, client: Client, geometry: Geometry) -> None:
        self._client = client
        self._geometry = geometry
        self._todo: queue.Queue[_Expected | None] = queue.Queue(BRIDGE_EXPECTED_REQUESTS_MAX)
        self._closing = threading.Event()
        self._deaf_until_s = float("-inf")  # the node brings nothing by itself, or is away
        threading.Thread(target=self._run, name="kvfs-expect", daemon=True).start()

    def expect(self, waiting: Waiting, place: Place, hashes: Sequence[bytes]) -> None:
        """These chunks are there, from the start of a request on. Never blocks."""
        now_s = time.monotonic()
        if not hashes or now_s < self._deaf_until_s:
            return
        found = hashes[:BRIDGE_EXPECTED_CHUNKS_MAX]
        try:
            self._todo.put_nowait(_Expected(waiting, place, found, now_s + BRIDGE_EXPECT_AFTER_S))
        except queue.Full:
            log.debug("kvfs: more requests wait than the node is told of")

    def close(self) -> None:
        """Say nothing more."""
        self._closing.set()
        try:
            self._todo.put_nowait(None)
        except queue.Full:
            log.debug("kvfs: the thread finds the end behind what is queued")
        self._client.close()

    def _run(self) -> None:
        while (expected := self._todo.get()) is not None:
            if self._closing.wait(max(0.0, expected.due_s - time.monotonic())):
                return
            if not expected.waiting.is_over and time.monotonic() >= self._deaf_until_s:
                self._tell(expected)

    def _tell(self, expected: _Expected) -> None:
        names = chunk_keys(self._geometry, expected.hashes).file_names()
        paths = [b"%b/%b/%b" % (expected.place.namespace, name[:2], name) for name in names]
        try:
            is_heard = self._client.expect(paths)
        except KvfsError as error:
            log.info("kvfs: the node is not told what requests wait for: %s", error)
            is_heard = False
        if not is_heard:
            self._deaf_until_s = time.monotonic() + BRIDGE_EXPECT_AGAIN_S
