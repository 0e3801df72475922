"""Getting the bytes of blobs here from elsewhere: each blob once, however many want it, into a file
that becomes the copy here or nothing."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import trio

from kvfs.errors import KvfsError, first_of
from kvfs.node import Node
from kvfs.stage import Stage

log = logging.getLogger(__name__)


class Awaited(Protocol):
    """What those who want a blob wait for."""

    def end(self) -> None:
        """Tell them that the fetch is over, whatever came of it."""


Fetch = TypeVar("Fetch", bound=Awaited)


class SharedFetches(Generic[Fetch]):
    """Fetches by the digests of their blobs, in the node's thread. One goes on when nobody waits
    for it any more, until `stop`."""

    def __init__(self, source: str, together_max: int) -> None:
        """`source`: where they come from, for the log. More than `together_max` wait."""
        self._source = source
        self._slots = trio.Semaphore(together_max)
        self._under_way: dict[bytes, tuple[Fetch, trio.CancelScope]] = {}
        self._nursery: trio.Nursery | None = None  # None: nothing is fetched (any more)
        self.failed = 0  # that ended with an error

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Background task: fetch what is asked for, until it is cancelled or `stop`; before and
        after, nothing is."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def stop(self) -> None:
        """The node ends: nobody waits any more."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            self._nursery = None

    def __len__(self) -> int:
        """How many are under way, or wait for that."""
        return len(self._under_way)

    def find(self, digest: bytes) -> Fetch | None:
        """The fetch of a blob, if it is under way."""
        found = self._under_way.get(digest)
        return None if found is None else found[0]

    def start(self, digest: bytes, fetch: Fetch, work: Callable[[], Awaitable[None]]) -> bool:
        """Begin one that is not under way, and have it end when its work does; False where nothing
        is fetched. KvfsError and OSError of the work are logged."""
        assert digest not in self._under_way
        if self._nursery is None:
            return False
        scope = trio.CancelScope()
        self._under_way[digest] = fetch, scope
        self._nursery.start_soon(self._carry_out, digest, fetch, scope, work)
        return True

    def cancel(self, digest: bytes) -> None:
        """A fetch that is under way is of no use any more."""
        _, scope = self._under_way[digest]
        scope.cancel()

    async def _carry_out(
        self,
        digest: bytes,
        fetch: Fetch,
        scope: trio.CancelScope,
        work: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            with scope:
                async with self._slots:
                    await work()
        except* (KvfsError, OSError) as group:
            self.failed += 1
            log.warning(
                "blob %s cannot be fetched from %s: %s",
                digest.hex(),
                self._source,
                first_of(group),
            )
        except* Exception:  # one fetch must not end the node
            log.exception("the fetch of blob %s from %s met a bug", digest.hex(), self._source)
        finally:
            fetch.end()
            del self._under_way[digest]


@asynccontextmanager
async def staged(node: Node, size_bytes: int) -> AsyncIterator[Stage]:
    """A stage with room for a size, which is gone at the end unless it was adopted. Raises
    `OutOfSpace`."""
    stage = node.stage(size_bytes)
    try:
        await node.reserve(stage, size_bytes)
        yield stage
    finally:
        if stage.is_open:
            node.discard(stage)
        else:
            node.reclaim.close(stage.fd)
