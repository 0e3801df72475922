"""Which bytes the server may say to be here though they are not.

A transaction whose answer was lost, or that this node's own tables did not take, may be done on the
server all the same, perhaps only later: a kernel sends again what a cable lost. Others give up
their copies for one that a node is said to have, so each such digest is compared.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from kvfs.config import CLUSTER_UNSETTLED_MAX
from kvfs.meta.shared import NODE_ID_BYTES, Record, SharedTable


def copies_of(records: Iterable[Record], node_id: bytes) -> list[bytes]:
    """The digests of which these records say whether that node has the bytes."""
    return [
        record.key[:-NODE_ID_BYTES]
        for record in records
        if record.table is SharedTable.COPY and record.key.endswith(node_id)
    ]


class Unsettled:
    """Digests to compare, each once; `again` are those that were. The oldest go where there are too
    many: their intents stay, so that the next start compares them."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, None] = {}
        self._settled: deque[bytes] = deque(maxlen=CLUSTER_UNSETTLED_MAX)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._waiting

    def add(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._waiting[digest] = None
        while len(self._waiting) > CLUSTER_UNSETTLED_MAX:
            del self._waiting[next(iter(self._waiting))]

    def first(self, limit: int) -> list[bytes]:
        """The next ones to compare."""
        return list(self._waiting)[:limit]

    def settle(self, digests: Sequence[bytes]) -> None:
        """They were compared."""
        for digest in digests:
            self._waiting.pop(digest, None)
        self._settled += digests

    def again(self) -> None:
        """A part of the feed was not heard: what was done late may be in it."""
        self.add(self._settled)
        self._settled.clear()

    def clear(self) -> None:
        """The server says nothing any more."""
        self._waiting.clear()
        self._settled.clear()
