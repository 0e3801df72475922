"""What a node shows its peers.

A part of a blob, which its reader cannot check by itself, goes out when the node has read all of it
and found it right once since it started; who reads a whole blob is given it at once.

A blob that is given out stays open for a while, so that a peer who reads it range by range has all
of it, whatever becomes of its name here meanwhile. Their room is not free until then; where room is
needed they are let go.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from kvfs.cluster.hints import Hints
from kvfs.config import PEER_CHECK_WAIT_S, PEER_CHECKS_MAX, SERVED_FILES_MAX, SERVED_S
from kvfs.errors import Corrupt, KvfsError, Unavailable
from kvfs.node import Node
from kvfs.peers.messages import Health

_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    """A blob that a peer reads."""

    fd: int
    size_bytes: int
    until_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Check:
    """A blob that is being read whole; several may wait for that."""

    end: trio.Event = field(default_factory=trio.Event)
    is_wrong: bool = False


class NodeSource:
    """`kvfs.peers.source.Source` of a node: asked by the peer server's threads, answered in the
    node's own."""

    def __init__(self, node: Node, hints: Hints, token: trio.lowlevel.TrioToken) -> None:
        self._node = node
        self._hints = hints
        self._token = token
        self._served: OrderedDict[bytes, _Served] = OrderedDict()  # the longest not read first
        self._nursery: trio.Nursery | None = None
        self._checking: dict[bytes, _Check] = {}
        self._checks = trio.Semaphore(PEER_CHECKS_MAX)
        node.on_shortage(self._let_go)

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Do what answers need, for ever; nothing can be opened before."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    await trio.sleep(SERVED_S / 2)
                    self._let_go(trio.current_time())
        finally:
            self._nursery = None
            self._let_go()

    # As `Source`, in other threads ----------------------------------------------------------------
    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        return self._ask(lambda: self._sizes(digests))

    def open(self, digest: bytes) -> int | None:
        return self._ask(lambda: self._open(digest))

    def check(self, digest: bytes) -> None:
        if self._ask(lambda: self._node.contents.needs_check(digest)) and not self._wait_checked(
            digest
        ):
            raise Corrupt(digest.hex(), "its bytes changed since they were stored")

    def hinted(self, digests: Sequence[bytes], *, spare_only: bool) -> None:
        self._ask(lambda: self._hints.take(digests, spare_only=spare_only))

    def health(self) -> Health:
        def ask() -> Health:
            uptime_s = (time.time_ns() - self._node.started_ns) / 1e9
            return Health(self._hints.spare_bytes(), 0.0, max(0.0, uptime_s))

        return self._ask(ask)

    def _ask(self, question: Callable[[], _Result]) -> _Result:
        try:
            return trio.from_thread.run_sync(question, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise Unavailable("the node has stopped") from error

    def _wait_checked(self, digest: bytes) -> bool:
        try:
            return trio.from_thread.run(self._check, digest, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise Unavailable("the node has stopped") from error

    # In the node's thread -------------------------------------------------------------------------
    def _sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        found = self._node.meta.blobs(digests)
        return [
            self._served_size(digest) if blob is None else blob.size_bytes
            for digest, blob in zip(digests, found, strict=True)
        ]

    def _served_size(self, digest: bytes) -> int | None:
        served = self._served.get(digest)
        return None if served is None else served.size_bytes

    def _open(self, digest: bytes) -> int | None:
        fd = self._node.contents.open_blob(digest)
        if fd is not None and digest not in self._served:
            self._keep(digest, fd)
        served = self._served.get(digest)
        if served is None:
            return fd
        served.until_s = trio.current_time() + SERVED_S
        self._served.move_to_end(digest)
        if fd is None and digest not in self._node.open_blobs:
            fd = os.dup(served.fd)
        return fd

    def _keep(self, digest: bytes, fd: int) -> None:
        try:
            served = _Served(os.dup(fd), os.fstat(fd).st_size)
        except OSError:
            os.close(fd)
            raise
        self._served[digest] = served
        if len(self._served) > SERVED_FILES_MAX:
            self._close(next(iter(self._served)))

    async def _check(self, digest: bytes) -> bool:
        """Return when a blob was read and compared with its digest, or that takes long: it goes on
        then, and who reads the blob compares. Whether it is, as far as is known, right."""
        if self._nursery is None:
            raise Unavailable("the node stops")
        check = self._checking.get(digest)
        if check is None:
            check = self._checking[digest] = _Check()
            self._nursery.start_soon(self._read_whole, digest, check)
        with trio.move_on_after(PEER_CHECK_WAIT_S):
            await check.end.wait()
        return not check.is_wrong

    async def _read_whole(self, digest: bytes, check: _Check) -> None:
        try:
            async with self._checks:
                await self._node.contents.check(digest)
        except Corrupt:
            check.is_wrong = True
            self._close(digest)  # it is in the quarantine
        except OSError as error:
            check.is_wrong = True
            self._node.contents.note_unreadable(digest, error)
        except KvfsError as error:  # it is wrong, and its names cannot be taken away now
            check.is_wrong = True
            log.warning("blob %s cannot be checked for a peer: %s", digest.hex(), error)
        finally:
            del self._checking[digest]
            check.end.set()

    def _let_go(self, until_s: float = float("inf")) -> None:
        """Close what was not read lately; all, where room is needed."""
        for digest in [d for d, served in self._served.items() if served.until_s <= until_s]:
            self._close(digest)

    def _close(self, digest: bytes) -> None:
        served = self._served.pop(digest, None)
        if served is not None:
            self._node.reclaim.close(served.fd)
