"""The metadata engine of a cluster: names on a server that speaks Redis's protocol, what this node
has of its own in LMDB. Decision 005 says why it is so.

Between two calls of `catch_up` a node sees the namespace as of the first, and its own changes. A
write is right in any case: what it read is compared on the server, and what had changed meanwhile
is read again. A write to the server that goes through while this node's own tables cannot be
written leaves names without bytes here: as after a crash, `recover` finds the file by its intent.
"""

import errno
import logging
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgpack

from kvfs.config import (
    ABANDONED_NODES_MAX,
    CLUSTER_CONFLICTS_MAX,
    CLUSTER_LEASE_S,
    CLUSTER_NEWS_ENTRIES,
    CLUSTER_NODES_MAX,
    CLUSTER_SWEEP_KEYS,
    META_BYTES_MAX,
    RECHECK_STEP,
)
from kvfs.errors import Corrupt, InvalidInput, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta import content, records
from kvfs.meta.abandoned import Named, drop_loose
from kvfs.meta.batch import Batch
from kvfs.meta.cluster import (
    ClusterBatch,
    ClusterTransaction,
    ClusterView,
    Heard,
    concerns,
    decode_news,
    encode_news,
)
from kvfs.meta.contract import DIGEST_BYTES, Blob, Inode, Publication, Recovery, Usage
from kvfs.meta.journal import Deed, Journal, Point, Redo, Standing
from kvfs.meta.known import Known
from kvfs.meta.lmdb import Database, LmdbEngine
from kvfs.meta.members import Member, Members
from kvfs.meta.mirror import Mirror
from kvfs.meta.numbers import Numbers
from kvfs.meta.primary import Refused
from kvfs.meta.refill import (
    Refill,
    give_back,
    give_back_deed,
    note_epoch,
    read_epoch,
    remember_deed,
)
from kvfs.meta.server import FEED_END, Conflict, Done, Emptied, MetaServer, News
from kvfs.meta.shared import (
    FIRST_PAGE_MEMBERS,
    Commit,
    Page,
    Record,
    SharedTable,
    SharedTransaction,
    copies_page,
)
from kvfs.meta.view import InodeCache, View
from kvfs.meta.ways import Ways, find_ways

if TYPE_CHECKING:
    import lmdb

_Result = TypeVar("_Result")
log = logging.getLogger(__name__)
_LAST_KEY = b"last"  # in the table of the state: this node's last transaction
_ANYTHING = Heard((), (), moves_directories=True)  # any name may lead elsewhere


class _Changed(Exception):
    """What a transaction saw has changed: it runs again."""


class RedisEngine(LmdbEngine):
    """`MetaEngine` of a cluster. Raises `Unavailable` besides, where the server does not answer."""

    def __init__(self, database: Database, server: MetaServer, node_id: bytes, root: Inode) -> None:
        self._server = server
        self._root = root
        self._known = Known(server)
        self._refill: Refill | None = None
        self._ways = Ways()
        self._untold: list[Heard] = []  # what `catch_up` will tell
        self._checked_to: tuple[int, bytes] | None = None  # of `_own_tables`, and of its keys
        self.node_id = node_id
        self.absent: Container[int] = ()  # directories of the store that are missing
        self._numbers = Numbers.claim(server, database)
        news = server.news(FEED_END)
        self._seen, self._inodes = news.last, news.inodes
        self._journal, self._redo = Journal(news.last), Redo()
        super().__init__(database)
        self._begin_refill()
        self.recheck()

    @classmethod
    def join(
        cls,
        directory: Path,
        url: str,
        cluster: str,
        node_id: bytes,
        *,
        root_uid: int = 0,
        root_gid: int = 0,
        now_ns: int | None = None,
        map_bytes: int = META_BYTES_MAX,
        connect: Callable[[str, str, bytes], MetaServer] = MetaServer,
    ) -> Self:
        """Open this node's own tables and the cluster on the server, making what is missing.

        `node_id`: 16 random bytes that stay the same for one store. `connect`: what speaks with the
        server, as `MetaServer` does. Raises as `Database.open`, `InvalidInput` for a URL that is
        none or whose user is refused, `Unavailable` where the server does not answer.
        """
        now_ns = time.time_ns() if now_ns is None else now_ns
        root = records.new_root(root_uid, root_gid, now_ns)
        with ExitStack() as stack:
            server = stack.enter_context(closing(connect(url, cluster, node_id)))
            try:
                server.begin(records.encode_inode(root), records.encode_dirent(root))
            except Refused as error:
                raise InvalidInput("metadata URL", str(error)) from error
            database = Database.open(directory, root, map_bytes)
            stack.callback(database.env.close)
            engine = cls(database, server, node_id, root)
            stack.pop_all()
        return engine

    def close(self) -> None:
        super().close()
        self._server.close()

    @contextmanager
    def _reading(self) -> Iterator[View]:
        with super()._reading() as local:
            shared = SharedTransaction(_OrRemembered(self._known, self._remembered))
            txn = ClusterTransaction(local.txn, shared, self._tables)
            yield ClusterView(txn, self._tables, self._cache)  # type: ignore[arg-type]  # see there

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
            result, batch = self._run(change, shared)
        except (Unavailable, OutOfSpace, Corrupt):
            # Perhaps the server has done it, and this node's own tables have not, or do not know.
            if shared.commit.was_sent:
                self._forget_records(tuple(shared.commit.writes))
                self.recheck()
            raise
        batch.committed()
        self._ways.note(batch.arrived)
        self._ways.note(
            int.from_bytes(record.key, "little")
            for record, value in shared.commit.writes.items()
            if record.table is SharedTable.INODE and value is not None
        )
        self._known.learn(shared.commit)
        self._lookups.note(batch)
        return result

    def _run(
        self, change: Callable[[Batch], _Result], shared: SharedTransaction
    ) -> tuple[_Result, ClusterBatch]:
        """One try, with the server and with this node's own tables."""
        with self._writing() as txn:
            batch = self._batch(txn, shared)
            try:
                result = change(batch)
            except (NamespaceError, AssertionError, struct.error):
                # Is it so, or was it so, or were the records of different times?
                self._settle(batch, None)
                raise
            self._settle(batch, encode_news(batch) if shared.commit.writes else None)
            batch.finish()
            Mirror(txn, self._tables).learn(shared.commit)
        return result, batch

    def _settle(self, batch: ClusterBatch, news: bytes | None) -> None:
        """Have the server compare what was seen, and write with `news`. Raises `_Changed`."""
        commit = batch.txn.shared.commit
        if commit.is_empty:
            return
        inodes = batch.totals.inodes - batch.inodes_before
        outcome = self._server.commit(commit, news, inodes)
        if isinstance(outcome, Done):
            batch.totals.inodes = self._inodes = outcome.inodes
            if news is not None:
                self._journal.note(Deed(outcome.at, commit, news, inodes))
                self._note_last(batch, outcome.at)
            return
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

    # The feed ------------------------------------------------------------------------------------
    def catch_up(self) -> list[Heard]:
        """All that other nodes did until now, and was not told before; from then on nothing here is
        older than that. One round trip when there is little. Raises `Unavailable`."""
        self._listen()
        told, self._untold = self._untold, []
        return told

    def _listen(self) -> None:
        while True:
            news = self._server.news(self._seen.sequence)
            if news.epoch != self._server.epoch:
                raise self._begin_again()
            self._inodes = news.inodes
            if not news.continues(self._seen):
                self._start_over(news)
                return
            is_cut = not news.entries
            heard: list[Heard] = []
            last = self._seen
            for at, node, raw in news.entries:
                one = _decode(raw) if at.sequence == last.sequence + 1 else None
                if one is None:
                    is_cut = True
                    break
                if node != self.node_id:
                    heard.append(one)
                self._journal.hear(at)
                last = at
            self._hear(heard)
            self._tell_later(heard)
            self._seen = last
            if last == news.last and not self._journal.is_broken(last):
                return
            if is_cut or last == news.last:
                self._start_over(news)
                return

    def _start_over(self, news: News) -> None:
        """What was between is lost, or the server has another history than this node saw, as a
        replica has that was behind: of nothing it is known whether it changed."""
        lost, may_be_more = self._journal.begin_at(news.last, self._server.history)
        self._forget_all()
        if may_be_more:
            log.warning("the metadata server has lost names; this node gives its own back")
            self._refill = Refill()
        elif lost:
            log.warning(
                "the metadata server has lost %d changes of this node: done again", len(lost)
            )
        self._redo.add(lost)
        self._seen = news.last
        self.recheck()
        self._tell_later([_ANYTHING])

    def _tell_later(self, heard: Sequence[Heard]) -> None:
        """Keep for `catch_up` what was heard; when nobody asks for long, that there was much."""
        self._untold += heard
        if len(self._untold) > CLUSTER_NEWS_ENTRIES:
            self._untold = [_ANYTHING]

    def _begin_again(self) -> Unavailable:
        """The server has lost everything, or was made anew by another node."""
        self._server.begin(records.encode_inode(self._root), records.encode_dirent(self._root))
        self._forget_all()
        self._seen = self._server.news(FEED_END).last
        self._journal, self._redo = Journal(self._seen), Redo()
        self._refill = Refill()
        return Unavailable("the metadata server was emptied; nodes tell it again what they have")

    def _begin_refill(self) -> None:
        """Tell the server of a new epoch all names again: it was emptied while this node was away;
        or one that has lost what this node did last. Before anything is compared with it, which
        would find no names for what lies here."""
        with self._writing() as txn:
            told = read_epoch(txn, self._tables)
            if told is None:  # a new database, with nothing to tell
                note_epoch(txn, self._tables, self._server.epoch)
            elif told != self._server.epoch:
                self._refill = Refill()
        if self._was_lost_while_away():
            log.warning("the metadata server lost names meanwhile; this node gives its own back")
            self._refill = Refill()

    def refill_more(self, now_ns: int) -> bool:
        """Give a server that lost everything some more names of files whose bytes are here; False
        once it has all, or never lost any. What has got another meanwhile keeps that."""
        if self._redo_more(now_ns):
            return True
        if self._refill is None or not self._redo.is_over:
            return False
        with self._remembered() as mirror:
            names = self._refill.next_names(mirror)
        if names:
            self._write(lambda batch: give_back(_of_cluster(batch), names, now_ns))
            return True
        with self._writing() as txn:
            note_epoch(txn, self._tables, self._server.epoch)
        self._refill = None
        self.recheck()
        return False

    def remember_more(self) -> bool:
        """Learn what leads to some more of the files whose bytes are here, for a server that will
        have lost it; False once all is known. Raises `Unavailable`."""
        with super()._reading() as local:
            inos = self._ways.take(local, Mirror(local.txn, self._tables))
            shared = SharedTransaction(self._known)
            txn = ClusterTransaction(local.txn, shared, self._tables)
            try:
                names = find_ways(ClusterView(txn, self._tables, InodeCache()), inos)  # type: ignore[arg-type]  # see there
            except Unavailable:
                self._ways.note(inos)
                raise
        if not inos:
            return False
        with self._writing() as own:
            mirror = Mirror(own, self._tables)
            for record, value in shared.commit.values.items():
                if value is not None:
                    mirror.put(record, value)
            for record in names:
                mirror.put(record, b"")
        return True

    def _redo_more(self, now_ns: int) -> bool:
        """Do one more transaction again that the server has lost; False at the end of a round."""
        following = self._redo.first()
        if following is None:
            return False
        deed, is_last_try = following
        assert deed.commit is not None
        outcome = self._server.commit(deed.commit, deed.news, deed.inodes)
        self._forget_records(tuple(deed.commit.writes))
        if isinstance(outcome, Done):
            self._journal.note(replace(deed, at=outcome.at))
            self._redo.done()
        elif outcome.changed is None:
            raise self._begin_again()
        elif is_last_try:
            self._give_back_deed(deed.commit, now_ns)
            self._redo.done()
        else:
            self._redo.put_off()
        return True

    def _give_back_deed(self, commit: Commit, now_ns: int) -> None:
        with self._remembered() as mirror:
            names = remember_deed(mirror, commit)
        if all(self.inode(one.parent) is not None for one in names):
            self._write(lambda batch: give_back_deed(_of_cluster(batch), commit, names, now_ns))
        else:  # whose directory was lost with it: all that is remembered, from the root
            self._refill = Refill()

    def _note_last(self, batch: ClusterBatch, at: Point) -> None:
        """So that a start finds out what the server lost meanwhile."""
        raw = msgpack.packb([self._server.epoch, at.sequence, at.mark])
        batch.txn.put(_LAST_KEY, raw, db=self._tables.state)

    def _was_lost_while_away(self) -> bool:
        with LmdbEngine._reading(self) as local:
            raw = local.txn.get(_LAST_KEY, db=self._tables.state)
        if raw is None:
            return False
        epoch, sequence, mark = msgpack.unpackb(raw)
        return epoch == self._server.epoch and (
            self._server.history([Point(sequence, mark)]) == [Standing.LOST]
        )

    def forget_remembered(self) -> None:
        """The server answers again: what was only remembered is no longer good enough."""
        self._cache.clear()
        self._lookups.forget_directories()

    def recheck(self) -> None:
        """Something was missed: all that this node's own tables say has to be looked at."""
        self._checked_to = 0, b""

    def recheck_more(self) -> bool:
        """Make the order of use, and the blobs' counts of files, say of some more what is so;
        False once all do."""
        if self._checked_to is None or not self._redo.is_over:
            return False  # what was lost may say of blobs that they have names
        index, after = self._checked_to
        with super()._reading() as local:
            table = (self._tables.stamp, self._tables.blob)[index]
            keys = list(islice(local.keys(table, b"", after), RECHECK_STEP))

        def change(batch: Batch) -> None:
            of_cluster = _of_cluster(batch)
            inos = [int.from_bytes(key, "little") for key in keys if len(key) != DIGEST_BYTES]
            of_cluster.read_inodes_ahead(inos)
            for ino in inos:
                of_cluster.recheck_stamp(ino)
            self._ways.note(inos)
            for key in keys:
                if len(key) == DIGEST_BYTES:
                    of_cluster.recheck_copy(key)

        if keys:
            self._write(change)
            self._checked_to = index, keys[-1]
        else:
            self._checked_to = (index + 1, b"") if index == 0 else None
        return self._checked_to is not None

    @contextmanager
    def _remembered(self) -> Iterator[Mirror]:
        with super()._reading() as local:
            yield Mirror(local.txn, self._tables)

    def _hear(self, heard: Sequence[Heard]) -> None:
        """Others did this. What of it is known here is asked for once, as it is now; most of it
        says nothing to this node, and costs no question."""
        changed = tuple(dict.fromkeys(record for one in heard for record in one.records))
        moves = [move for one in heard for move in one.moves]
        self._forget_records(changed)
        if any(one.moves_directories for one in heard):
            self._lookups.forget_directories()
        for move in moves:
            self._cache.discard(move.ino)
        with super()._reading() as local:
            mirror = Mirror(local.txn, self._tables)
            outdated, renamed = mirror.outdated(changed), mirror.renamed(changed)
            moves = [move for move in moves if concerns(local, move)]
        if outdated or renamed:
            values = self._server.values(outdated)
            with self._writing() as txn:
                mirror = Mirror(txn, self._tables)
                for record, value in zip(outdated, values, strict=True):
                    mirror.put(record, value)
                for record in renamed:
                    mirror.put(record, None)
            self._ways.note(int.from_bytes(record.split()[0], "big") for record in renamed)
        if moves:
            with self._writing() as txn:
                batch = self._batch(txn, SharedTransaction(self._known))
                batch.read_inodes_ahead({move.ino: None for move in moves})
                for move in moves:
                    batch.follow(move)
                batch.finish()

    def _batch(self, txn: "lmdb.Transaction[bytes]", shared: SharedTransaction) -> ClusterBatch:
        return ClusterBatch(
            ClusterTransaction(txn, shared, self._tables),
            self._tables,
            self._cache,
            self.node_id,
            self._numbers,
            self.absent,
        )

    # Copies --------------------------------------------------------------------------------------
    def copies(self, digest: bytes) -> list[bytes]:
        """The nodes that have the bytes of a digest, by their ids."""
        with self._reading() as view:
            assert isinstance(view, ClusterView)
            return view.copies(digest)

    def known_copies(self, digests: Sequence[bytes]) -> list[set[bytes]]:
        """As `copies`, of many at once: one round trip for those that are not known. Raises
        `Unavailable`."""
        self._known.read_pages_ahead(map(copies_page, digests))
        with self._reading() as view:
            assert isinstance(view, ClusterView)
            return [set(view.copies(digest)) for digest in digests]

    def ask_copies(self, digests: Sequence[bytes]) -> list[set[bytes]]:
        """As `known_copies`, for a walk over everything: nothing of it is kept."""
        pages = [copies_page(digest, CLUSTER_NODES_MAX) for digest in digests]
        return [set(found) for found in self._server.pages(pages)] if pages else []

    def own_blobs(self, after: bytes, limit: int) -> list[Blob]:
        """The next blobs whose files are here, doomed ones among them, in order of their digests
        from behind `after`."""
        with super()._reading() as local:
            keys = list(islice(local.keys(self._tables.blob, b"", after), limit))
            found = [local.blob(key) for key in keys]
        return [blob for blob in found if blob is not None]

    def members(self, me: Member, lease_s: float = CLUSTER_LEASE_S) -> Members:
        """The list of nodes, with this one on it as it describes itself."""
        return Members(self._server, me, lease_s)

    def wait_news(self) -> bool:
        """Wait a while until there is something to `catch_up` with; for a thread of its own.
        Raises `Unavailable`."""
        return self._server.wait_news(self._seen.sequence)

    def add_copy(self, publication: Publication) -> bool:
        """The bytes of a digest have come here from another node, and lie where the publication
        says; False where no file holds it any more."""
        return self._write(lambda batch: _of_cluster(batch).add_copy(publication))

    def add_found(
        self, publications: Sequence[Publication], former_ids: Sequence[bytes]
    ) -> list[bool]:
        """These lie here, and were not known to: whether each is a copy now of what files of the
        cluster hold. `former_ids`: of this node, when it last knew them."""
        self.read_holders_ahead([publication.digest for publication in publications])

        def change(batch: Batch) -> list[bool]:
            view = _of_cluster(batch)
            view.read_inodes_ahead(ino for p in publications for ino in view.holders(p.digest))
            return [view.add_found(publication, former_ids) for publication in publications]

        return self._write(change)

    def read_holders_ahead(self, digests: Iterable[bytes]) -> None:
        """What holds these will be asked for one by one: one round trip for all. Raises
        `Unavailable`."""
        self._known.read_pages_ahead(
            Page(SharedTable.HOLDER, digest, b"", FIRST_PAGE_MEMBERS) for digest in digests
        )

    def digests_of(self, node_ids: Sequence[bytes], cursor: bytes) -> tuple[bytes, list[bytes]]:
        """As `MetaServer.digests_of`, in small steps."""
        return self._server.digests_of(node_ids, cursor, CLUSTER_SWEEP_KEYS)

    def end_nodes(
        self, node_ids: Sequence[bytes], digests: Sequence[bytes], now_ns: int
    ) -> list[tuple[int, bytes, Inode]]:
        """Those nodes are no more, and what they had of these is nowhere but where it is known to
        be: names of what nobody has go, as by `lose`."""

        def change(batch: Batch) -> list[tuple[int, bytes, Inode]]:
            view = _of_cluster(batch)
            gone: list[tuple[int, bytes, Inode]] = []
            for digest in digests:
                others = set(view.copies(digest)) - set(node_ids)
                view.end_copies_of(digest, node_ids)
                if not others:
                    gone += content.lose(batch, digest, now_ns)
            return gone

        return self._write(change)

    def lose(self, digest: bytes, now_ns: int) -> list[tuple[int, bytes, Inode]]:
        """As the contract says, where no other node has the bytes; else only this copy is lost, and
        the names live on."""

        def change(batch: Batch) -> list[tuple[int, bytes, Inode]]:
            view = _of_cluster(batch)
            if all(node == self.node_id for node in view.copies(digest)):
                return content.lose(batch, digest, now_ns)
            view.end_copy(digest)
            view.bury(digest)
            return []

        return self._write(change)

    def end_copies(self, digests: Sequence[bytes], others: Container[bytes]) -> list[bytes]:
        """Give up the copies here of those digests that one of the `others` has as well, which are
        returned: their blobs are doomed. What is pinned stays."""

        def change(batch: Batch) -> list[bytes]:
            view = _of_cluster(batch)
            ended = [
                digest
                for digest in digests
                if view.has_copy_among(digest, others) and not view.is_pinned(digest)
            ]
            for digest in ended:
                view.end_copy(digest)
            return ended

        return self._write(change)

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        """As the contract says; what lies in a directory that is missing is not here."""
        found = super().blobs(digests)
        return [None if blob and blob.directory in self.absent else blob for blob in found]

    # What nodes leave unfinished ----------------------------------------------------------------
    def recover(self) -> Recovery:
        """As the contract says; also of what the server knows, and this node's own tables do not
        any more."""
        left = super().recover()
        while self.drop_loose(self.node_id, if_gone=False) is not None:
            pass
        return left

    def gone_nodes(self, after_s: float, settled: bytes = b"") -> list[bytes]:
        """Some of the nodes that have not been members for so long, and may have left something
        unfinished. `settled`: one that has not any more."""
        return self._server.gone_nodes(after_s, ABANDONED_NODES_MAX, settled)

    def drop_loose(self, node_id: bytes, *, if_gone: bool = True) -> list[Named] | None:
        """As `abandoned.drop_loose`: a step of it. Raises `Unavailable`."""
        return self._write(lambda batch: drop_loose(_of_cluster(batch), node_id, if_gone=if_gone))

    # What differs --------------------------------------------------------------------------------
    def lookup(self, parent: int, name: bytes) -> Inode | None:
        """As the contract says. An entry that leads to nothing was read before its file was
        replaced: it is read anew, so that a name that is there at all times is found."""
        try:
            return super().lookup(parent, name)
        except NamespaceError as error:
            if error.code != errno.ENOENT:
                raise
        key = records.pack_ordered(parent) + name
        self._forget_records((Record(SharedTable.DIRENT, key),))
        return super().lookup(parent, name)

    def usage(self) -> Usage:
        return replace(super().usage(), inodes=self._inodes)

    def index_more(self) -> bool:
        return False  # this node does not have all names


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
            return [value or records.NO_DIRENT for value in found]

    def members(self, page: Page) -> tuple[bytes, ...]:
        try:
            return self._known.members(page)
        except Unavailable:
            with self._remembered() as mirror:
                found = mirror.members(page)
            if page.table is not SharedTable.DIRENT:
                raise
            return found


def _decode(raw: bytes) -> Heard | None:
    """An entry of the feed; None for one that another version wrote, as if it had been lost."""
    try:
        return decode_news(raw)
    except (ValueError, TypeError, LookupError):
        log.warning("another version of kvfs wrote to this cluster; what it says is read anew")
        return None


def _of_cluster(batch: Batch) -> ClusterBatch:
    assert isinstance(batch, ClusterBatch)
    return batch
