"""The inode numbers of a cluster: each node gives some from a range of its own, each once.

A number is used up when it is taken, whatever becomes of the transaction: one whose answer was lost
may have been done, and a number that is given twice shows a name another file's bytes. A node that
dies between the server's part of a transaction and its own has lost count of the last ones; so a
start leaves out more than can be in question.
"""

import secrets

from kvfs.config import CLUSTER_CLAIMS_MAX, CLUSTER_NUMBERS_SKIPPED
from kvfs.errors import Unavailable
from kvfs.meta.lmdb import Database
from kvfs.meta.server import MetaServer

_NUMBERS_KEY = b"numbers"  # in the table of the state
_RANGES = 1 << 26  # of 2^32 inode numbers each: numbers stay below 2^58


class Numbers:
    """Those that one database gives."""

    def __init__(self, base: int, following: int) -> None:
        self._base = base
        self.following = following  # below the base, the one that is given next

    @classmethod
    def claim(cls, server: MetaServer, database: Database) -> "Numbers":
        """A range for a new database, since it does not know which numbers were given; its own for
        any other. Raises `Unavailable`, and `OutOfSpace` where that cannot be noted."""
        base = _claim_range(server, database)
        return cls(base, database.skip_inos(0 if database.is_new else CLUSTER_NUMBERS_SKIPPED))

    def take(self, written: int) -> int:
        """A number that nobody ever had. `written`: the one that this node's own tables would give
        next. Raises `Unavailable` when they were not written for too long to go on."""
        if self.following - written > CLUSTER_NUMBERS_SKIPPED // 2:
            raise Unavailable("this node's own metadata could not be written for too long")
        number = self._base | self.following
        self.following += 1
        return number


def _claim_range(server: MetaServer, database: Database) -> int:
    table = database.tables.state
    with database.env.begin() as txn:
        raw = txn.get(_NUMBERS_KEY, db=table)
    for _ in range(CLUSTER_CLAIMS_MAX):
        chosen = int.from_bytes(raw, "little") if raw else secrets.randbelow(_RANGES - 1) + 1
        if server.claim(b"numbers:%d" % chosen):
            with database.env.begin(write=True) as txn:
                txn.put(_NUMBERS_KEY, chosen.to_bytes(4, "little"), db=table)
            return chosen << 32
        raw = None  # after a loss of the server another node has taken it
    raise Unavailable("the metadata server has no range of inode numbers for this node: join again")
