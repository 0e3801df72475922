"""What a node shows its peers."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from kvfs.cluster.hints import Hints
from kvfs.errors import Unavailable
from kvfs.node import Node
from kvfs.peers.messages import Health

_Result = TypeVar("_Result")


class NodeSource:
    """`kvfs.peers.source.Source` of a node: asked by the peer server's threads, answered in the
    node's own."""

    def __init__(self, node: Node, hints: Hints, token: trio.lowlevel.TrioToken) -> None:
        self._node = node
        self._hints = hints
        self._token = token

    def _ask(self, question: Callable[[], _Result]) -> _Result:
        try:
            return trio.from_thread.run_sync(question, trio_token=self._token)
        except trio.RunFinishedError as error:
            raise Unavailable("the node has stopped") from error

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        def ask() -> list[int | None]:
            found = self._node.meta.blobs(digests)
            return [None if blob is None else blob.size_bytes for blob in found]

        return self._ask(ask)

    def open(self, digest: bytes) -> int | None:
        return self._ask(lambda: self._node.open_blob(digest))

    def hinted(self, digests: Sequence[bytes]) -> None:
        self._ask(lambda: self._hints.take(digests))

    def health(self) -> Health:
        def ask() -> Health:
            uptime_s = (time.time_ns() - self._node.started_ns) / 1e9
            return Health(self._hints.spare_bytes(), 0.0, max(0.0, uptime_s))

        return self._ask(ask)
