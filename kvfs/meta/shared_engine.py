"""Transactions on the names that all nodes of a cluster share: what a rule read is compared on the
server, in the step that writes; what had changed meanwhile is read again. What only this node has
to say stays in its own database, in the same call.

A write to the server that goes through while this node's own tables cannot be written leaves names
without bytes here: as after a crash, `recover` finds the file by its intent.
"""

import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import lmdb

from kvfs.config import CLUSTER_CONFLICTS_MAX, RECHECK_STEP
from kvfs.errors import Corrupt, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta import content, records
from kvfs.meta.batch import Batch
from kvfs.meta.cluster import ClusterBatch, ClusterView
from kvfs.meta.cluster_transaction import ClusterTransaction
from kvfs.meta.journal import Deed, Point
from kvfs.meta.known import Known
from kvfs.meta.lmdb import Database, LmdbEngine
from kvfs.meta.mirror import Mirror
from kvfs.meta.numbers import Numbers
from kvfs.meta.server import Conflict, Done, Emptied, MetaServer
from kvfs.meta.shared import Commit, Page, Record, SharedTable, SharedTransaction
from kvfs.meta.told import encode_news
from kvfs.meta.unsettled import Unsettled, copies_of
from kvfs.meta.view import View

_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


class _Changed(Exception):
    """What a transaction saw has changed: it runs again."""


# What rules meet where records do not fit each other.
_CONTRADICTIONS = (AssertionError, struct.error, lmdb.BadValsizeError)


def _contradiction(error: Exception) -> Corrupt:
    return Corrupt("the metadata server", f"its records contradict each other ({error!r})")


class SharedEngine(LmdbEngine, ABC):
    """`MetaEngine` with the shared tables on a server. Raises `Unavailable` besides. Who follows
    the others' changes is built on it (`kvfs.meta.following`)."""

    def __init__(self, database: Database, server: MetaServer, node_id: bytes) -> None:
        self._server = server
        self._known = Known(server)
        self._inodes = 0  # of the cluster
        self._unsettled = Unsettled()
        self.node_id = node_id
        self.absent: Container[int] = ()  # directories of the store that are missing
        self._numbers = Numbers.claim(server, database)
        super().__init__(database)

    def close(self) -> None:
        super().close()
        self._server.close()

    @contextmanager
    def _reading(self) -> Iterator[View]:
        with self._reading_own() as local:
            shared = SharedTransaction(_OrRemembered(self._known, self._remembered))
            txn = ClusterTransaction(local.txn, shared, self._tables)
            try:
                yield ClusterView(txn, self._tables, self._cache)  # type: ignore[arg-type]  # see there
            except _CONTRADICTIONS as error:
                raise _contradiction(error) from error

    def _write(self, change: Callable[[Batch], _Result]) -> _Result:
        for attempt in range(CLUSTER_CONFLICTS_MAX):
            if attempt:
                self._listen()
            try:
                return self._try_write(change)
            except _Changed:
                continue
            except Emptied as error:
                raise self._begin_again() from error
        raise Unavailable(
            f"others changed the same names {CLUSTER_CONFLICTS_MAX} times in a row; try again"
        )

    def _try_write(self, change: Callable[[Batch], _Result]) -> _Result:
        shared = SharedTransaction(self._known)
        try:
            result, batch, deed = self._run(change, shared)
        except (Unavailable, OutOfSpace, Corrupt):
            # Perhaps the server has done it, and this node's own tables have not, or do not know.
            if shared.commit.was_sent:
                self._forget_records(tuple(shared.commit.writes))
                self._doubt(tuple(shared.commit.writes))
                self.recheck()
            raise
        if deed is not None:
            self._did(deed)
        batch.committed()
        self._note_ways(batch, shared.commit)
        self._known.learn(shared.commit)
        self._lookups.note(batch)
        return result

    def _run(
        self, change: Callable[[Batch], _Result], shared: SharedTransaction
    ) -> tuple[_Result, ClusterBatch, Deed | None]:
        """One try, with the server and with this node's own tables; and what others will hear."""
        with self._writing() as txn:
            batch = self._batch(txn, shared)
            try:
                result = change(batch)
            except (NamespaceError, *_CONTRADICTIONS) as error:
                # Is it so, or was it so, or were the records of different times?
                self._settle(batch, None)
                if isinstance(error, NamespaceError):
                    raise
                raise _contradiction(error) from error
            news = None
            if shared.commit.writes:
                news = encode_news(shared, batch.moves, moves_directories=batch.moves_directories)
            deed = self._settle(batch, news)
            batch.finish()
            Mirror(txn, self._tables).learn(shared.commit)
        return result, batch, deed

    def _settle(self, batch: ClusterBatch, news: bytes | None) -> Deed | None:
        """Have the server compare what was seen, and write with `news`. Raises `_Changed`."""
        commit = batch.txn.shared.commit
        if commit.is_empty:
            return None
        inodes = batch.totals.inodes - batch.inodes_before
        outcome = self._server.commit(commit, news, inodes)
        if isinstance(outcome, Done):
            batch.totals.inodes = self._inodes = outcome.inodes
            if news is None:
                return None
            self._note_last(batch, outcome.at)
            return Deed(outcome.at, commit, news, inodes)
        self._forget(outcome)
        raise _Changed

    def _forget(self, conflict: Conflict) -> None:
        if isinstance(conflict.changed, Record):
            self._forget_records((conflict.changed,))
        elif isinstance(conflict.changed, Page):
            self._known.forget_page(conflict.changed)
        else:
            raise self._begin_again()

    def _forget_records(self, changed: tuple[Record, ...]) -> None:
        self._known.forget(changed)
        for record in changed:
            if record.table is SharedTable.INODE:
                self._cache.discard(int.from_bytes(record.key, "little"))

    def _forget_all(self) -> None:
        self._known.clear()
        self._cache.clear()
        self._lookups.forget_directories()

    def _batch(self, txn: "lmdb.Transaction[bytes]", shared: SharedTransaction) -> ClusterBatch:
        return ClusterBatch(
            ClusterTransaction(txn, shared, self._tables),
            self._tables,
            self._cache,
            self.node_id,
            self._numbers,
            self.absent,
        )

    @contextmanager
    def _reading_own(self) -> Iterator[View]:
        """A transaction that sees this node's own tables only."""
        with super()._reading() as local:
            yield local

    @contextmanager
    def _remembered(self) -> Iterator[Mirror]:
        with self._reading_own() as local:
            yield Mirror(local.txn, self._tables)

    # What the server may say wrongly -------------------------------------------------------------
    def _doubt(self, changed: Iterable[Record]) -> None:
        """The server may have changed these, and this node's own tables do not say so."""
        self._unsettled.add(copies_of(changed, self.node_id))

    def settle_copies(self, digests: Sequence[bytes]) -> None:
        """Have the server say of these whether their bytes are here. Raises `Unavailable`."""

        def change(batch: Batch) -> None:
            for digest in digests:
                of_cluster(batch).settle_copy(digest)

        self._write(change)

    def _settle_more(self) -> None:
        """Some of what is in doubt; then the intents that `bury` left have nothing more to say."""
        digests = self._unsettled.first(RECHECK_STEP)
        self.settle_copies(digests)
        self._unsettled.settle(digests)

        def end_intents(batch: Batch) -> None:
            for digest in digests:
                if batch.blob(digest) is None:
                    batch.clear_intents(digest)

        self._write(end_intents)

    def bury(self, digests: Sequence[bytes]) -> None:
        """As the contract says; but an intent stays, for the next start, while the server may say
        wrongly that the bytes are here."""

        def change(batch: Batch) -> None:
            content.bury(batch, [digest for digest in digests if digest not in self._unsettled])
            for digest in digests:
                if digest in self._unsettled:
                    batch.bury(digest)

        self._write(change)

    # What following the others adds ---------------------------------------------------------------
    @abstractmethod
    def _listen(self) -> None:
        """Know what others did until now. Raises `Unavailable`."""

    @abstractmethod
    def _begin_again(self) -> Unavailable:
        """The server has lost everything, or was made anew by another node; the error to raise."""

    @abstractmethod
    def _note_last(self, batch: ClusterBatch, at: Point) -> None:
        """The server has written a transaction; this node's own tables are about to."""

    @abstractmethod
    def _did(self, deed: Deed) -> None:
        """So have both."""

    @abstractmethod
    def _note_ways(self, batch: ClusterBatch, commit: Commit) -> None:
        """A transaction is through: the way to some files may not be known to this node."""

    @abstractmethod
    def recheck(self) -> None:
        """Something was missed: all that this node's own tables say has to be looked at."""


class _OrRemembered:
    """`Source` for who only reads: what is known, or what this node remembers while the server does
    not answer. That may be old, so nothing is written by it."""

    def __init__(
        self, known: Known, remembered: Callable[[], AbstractContextManager[Mirror]]
    ) -> None:
        self._known = known
        self._remembered = remembered

    def values(self, wanted: Sequence[Record]) -> list[bytes | None]:
        try:
            return self._known.values(wanted)
        except Unavailable:
            with self._remembered() as mirror:
                found = [mirror.value(record) for record in wanted]
            if None in found:
                raise
            return found

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        try:
            return self._known.dirents(keys)
        except Unavailable:
            found = self.values([Record(SharedTable.DIRENT, key) for key in keys])
            return [
                value if value and records.is_dirent(value) else records.NO_DIRENT
                for value in found
            ]

    def members(self, page: Page) -> tuple[bytes, ...]:
        try:
            return self._known.members(page)
        except Unavailable:
            with self._remembered() as mirror:
                found = mirror.members(page)
            if page.table is not SharedTable.DIRENT:
                raise
            return found


def of_cluster(batch: Batch) -> ClusterBatch:
    """The batch of a transaction of this engine."""
    assert isinstance(batch, ClusterBatch)
    return batch
