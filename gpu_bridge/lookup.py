"""Looks up chunks in the background, so that the engine's scheduler never waits for the node."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from itertools import takewhile

from gpu_bridge.counters import Counters
from gpu_bridge.expectations import Expectations, Waiting
from gpu_bridge.link import Link, is_chunk_size
from gpu_bridge.plan import Geometry, Place, chunk_keys, presence
from kvfs.config import BRIDGE_LOOKUPS_MAX, BRIDGE_PROBE_INTERVAL_S
from kvfs.names import KV_DIRECTORY

log = logging.getLogger(__name__)

Answer = Sequence[tuple[bool, ...]]
"""For each chunk from the start of the request, which groups of it are stored whole."""


class Lookup:
    """One question. A node that does not answer, or not in time, answers that nothing is there."""

    def __init__(self, place: Place, hashes: Sequence[bytes], deadline_s: float) -> None:
        self.place = place
        self.hashes = hashes
        self.waiting = Waiting()
        self._end_s = time.monotonic() + deadline_s
        self._answer: Answer | None = None
        self._is_done = threading.Event()

    def answer(self, wait_s: float) -> Answer | None:
        """The answer, or None when there is none yet; waits at most `wait_s`."""
        if self._is_done.wait(wait_s):
            return self._answer
        return () if time.monotonic() > self._end_s else None

    def finish(self, answer: Answer) -> None:
        self._answer = answer
        self._is_done.set()


class LookupService:
    """One thread that asks, in the order of the questions. A node that went away costs one question
    its deadline; until it is back all others are answered at once."""

    def __init__(
        self, link: Link, geometry: Geometry, counters: Counters, deadline_s: float
    ) -> None:
        self._link = link
        self._geometry = geometry
        self._counters = counters
        self._deadline_s = deadline_s
        self._expectations = Expectations(link.beside(deadline_s), geometry)
        self._todo: queue.Queue[Lookup | None] = queue.Queue(BRIDGE_LOOKUPS_MAX)
        self._thread = threading.Thread(target=self._run, name="kvfs-lookup", daemon=True)
        self._thread.start()

    def start(self, place: Place, hashes: Sequence[bytes]) -> Lookup:
        """Ask for the chunks with these hashes; returns at once."""
        lookup = Lookup(place, hashes, self._deadline_s)
        if not hashes:
            lookup.finish(())
            return lookup
        if self._link.is_lost:  # the thread asks it time and again; nobody waits for that
            self._counters.add("failed_lookups.unavailable")
            lookup.finish(())
            return lookup
        try:
            self._todo.put_nowait(lookup)
        except queue.Full:
            self._counters.add("failed_lookups.queue_full")
            lookup.finish(())
        return lookup

    def close(self, deadline_s: float) -> None:
        self._expectations.close()
        try:
            self._todo.put(None, timeout=deadline_s)
        except queue.Full:
            return  # a daemon thread: it ends with the process
        self._thread.join(deadline_s)
        self._link.close()

    def _run(self) -> None:
        self._probe()  # connects, which may start the node
        while True:
            try:
                lookup = self._todo.get(
                    timeout=BRIDGE_PROBE_INTERVAL_S if self._link.is_lost else None
                )
            except queue.Empty:
                self._probe()
                continue
            if lookup is None:
                return
            answer: Answer = ()
            try:
                answer = self._ask(lookup)
            except Exception:
                # The edge of this thread: without it no request would find anything again.
                log.exception("kvfs: a look-up failed in an unforeseen way")
            lookup.finish(answer)
            found = list(takewhile(all, answer))
            self._expectations.expect(lookup.waiting, lookup.place, lookup.hashes[: len(found)])

    def _probe(self) -> None:
        self._link.ask(lambda client: client.lookup([KV_DIRECTORY]))

    def _ask(self, lookup: Lookup) -> Answer:
        began_s = time.monotonic()
        keys = chunk_keys(self._geometry, lookup.hashes)
        sizes = self._link.ask(lambda client: client.lookup_chunks(lookup.place.namespace, keys))
        self._counters.add("lookup_seconds", time.monotonic() - began_s)
        self._counters.add("lookups")
        if sizes is None:
            self._counters.add("failed_lookups.unavailable")
            return ()
        return presence(self._geometry, [is_chunk_size(size) for size in sizes])
