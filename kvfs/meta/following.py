"""A node that follows what the others do: the feed of changes, and what a server that lost some of
it, or everything, is told again.

Between two calls of `catch_up` a node sees the namespace as of the first, and its own changes.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import msgpack

from kvfs.config import CLUSTER_CATCH_UP_ENTRIES, CLUSTER_NEWS_ENTRIES, RECHECK_STEP
from kvfs.errors import Unavailable
from kvfs.meta import records
from kvfs.meta.batch import Batch
from kvfs.meta.cluster import ClusterBatch, ClusterView
from kvfs.meta.cluster_transaction import ClusterTransaction
from kvfs.meta.contract import DIGEST_BYTES, Inode
from kvfs.meta.journal import Deed, Journal, Point, Redo, Standing
from kvfs.meta.lmdb import Database
from kvfs.meta.mirror import Mirror
from kvfs.meta.news import FEED_END, News
from kvfs.meta.probe import Memory
from kvfs.meta.refill import (
    Refill,
    give_back,
    give_back_deed,
    note_epoch,
    read_epoch,
    remember_deed,
)
from kvfs.meta.server import Done, MetaServer
from kvfs.meta.shared import Commit, SharedTable, SharedTransaction, copies_page, holders_page
from kvfs.meta.shared_engine import SharedEngine, of_cluster
from kvfs.meta.told import Heard, concerns, decode_news
from kvfs.meta.view import InodeCache
from kvfs.meta.ways import Ways, find_ways

log = logging.getLogger(__name__)
_LAST_KEY = b"last"  # in the table of the state: this node's last transaction
_ANYTHING = Heard((), (), moves_directories=True)  # any name may lead elsewhere


class FollowingEngine(SharedEngine):
    """See the module's docstring."""

    def __init__(self, database: Database, server: MetaServer, node_id: bytes, root: Inode) -> None:
        self._root = root
        self._refill: Refill | None = None
        self._ways = Ways()
        self._untold: list[Heard] = []  # what `catch_up` will tell
        self._checked_to: tuple[int, bytes] | None = None  # of `_own_tables`, and of its keys
        super().__init__(database, server, node_id)
        with self._reading_own() as local:
            server.inodes = max(1, local.state().inodes)
        news = server.news(FEED_END)
        self._seen, self._inodes = news.last, news.inodes
        self._journal, self._redo = Journal(news.last), Redo()
        self._begin_refill()
        self.recheck()

    # The feed ------------------------------------------------------------------------------------
    def catch_up(self) -> list[Heard]:
        """All that other nodes did until now, and was not told before; from then on nothing here is
        older than that. One round trip when there is little. Raises `Unavailable`."""
        self._listen()
        told, self._untold = self._untold, []
        return told

    def wait_news(self) -> bool:
        """Wait a while until there is something to `catch_up` with; for a thread of its own.
        Raises `Unavailable`."""
        return self._server.wait_news(self._seen.sequence)

    def _listen(self) -> None:
        dirents: dict[bytes, bytes | None] = {}  # as they are at the end of the feed
        while True:
            news = self._server.news(self._seen.sequence)
            if news.epoch != self._server.epoch:
                raise self._begin_again()
            self._inodes = news.inodes
            behind = news.last.sequence - self._seen.sequence
            if behind > CLUSTER_CATCH_UP_ENTRIES or not news.continues(self._seen):
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
                dirents.update(one.dirents)  # also this node's own, which came between others'
                if not self._journal.hear(at):
                    heard.append(one)
                    if node == self.node_id:  # done after this node had given it up
                        self._doubt(one.records)
                last = at
            if heard:
                self._hear(heard)
                self._tell_later(heard)
            self._seen = last
            if last == news.last and not self._journal.is_broken(last):
                self._known.tell(dirents)
                return
            if is_cut or last == news.last:
                self._start_over(news)
                return

    def _hear(self, heard: Sequence[Heard]) -> None:
        """Others did this, or this node without knowing. What of it is known here is asked for
        once, as it is now; most of it says nothing to this node, and costs no question."""
        changed = tuple(dict.fromkeys(record for one in heard for record in one.records))
        moves = [move for one in heard for move in one.moves]
        self._forget_records(changed)
        if any(one.moves_directories for one in heard):
            self._lookups.forget_directories()
        for move in moves:
            self._cache.discard(move.ino)
        with self._reading_own() as local:
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

    def _tell_later(self, heard: Sequence[Heard]) -> None:
        """Keep for `catch_up` what was heard; when nobody asks for long, that there was much."""
        self._untold += heard
        if len(self._untold) > CLUSTER_NEWS_ENTRIES:
            self._untold = [_ANYTHING]

    def forget_remembered(self) -> None:
        """The server answers again: what was only remembered is no longer good enough."""
        self._cache.clear()
        self._lookups.forget_directories()

    # A server that lost something -----------------------------------------------------------------
    def _start_over(self, news: News) -> None:
        """What was between is lost, or too much to hear while others wait, or the server has
        another history than this node saw, as a replica has that was behind: of nothing it is known
        whether it changed."""
        lost, may_be_more = self._journal.begin_at(news.last, self._server.history)
        self._forget_all()
        self._unsettled.again()
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

    def _begin_again(self) -> Unavailable:
        """The server has lost everything, or was made anew by another node."""
        self._server.begin(records.encode_inode(self._root), records.encode_dirent(self._root))
        self._forget_all()
        self._unsettled.clear()
        self._seen = self._server.news(FEED_END).last
        self._journal, self._redo = Journal(self._seen), Redo()
        self._refill = Refill()
        return Unavailable("the metadata server was emptied; nodes tell it again what they have")

    def look_after(self) -> None:
        """Have the server be sound: what it lost, or others spoiled, of what all nodes count on is
        made anew. Little work, for now and then. Raises `Unavailable`."""
        self._server.mend()

    def memory(self) -> Memory | None:
        """As `MetaServer.memory`."""
        return self._server.memory()

    def give_back_lost(self) -> None:
        """The server took names away by itself: it gets back what this node knows. Not while that
        is being done already."""
        if self._refill is None and self._checked_to is None:
            self._forget_all()
            self._refill = Refill(of_single_keys=True)
            self.recheck()

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
            of_single_keys = self._refill.of_single_keys
            self._write(
                lambda batch: give_back(
                    of_cluster(batch), names, now_ns, of_single_keys=of_single_keys
                )
            )
            return True
        with self._writing() as txn:
            note_epoch(txn, self._tables, self._server.epoch)
        self._refill = None
        self.recheck()
        return False

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
            self._write(lambda batch: give_back_deed(of_cluster(batch), commit, names, now_ns))
        else:  # whose directory was lost with it: all that is remembered, from the root
            self._refill = Refill()

    def _did(self, deed: Deed) -> None:
        self._journal.note(deed)

    def _note_last(self, batch: ClusterBatch, at: Point) -> None:
        """So that a start finds out what the server lost meanwhile."""
        raw = msgpack.packb([self._server.epoch, at.sequence, at.mark])
        batch.txn.put(_LAST_KEY, raw, db=self._tables.state)

    def _was_lost_while_away(self) -> bool:
        with self._reading_own() as local:
            raw = local.txn.get(_LAST_KEY, db=self._tables.state)
        if raw is None:
            return False
        epoch, sequence, mark = msgpack.unpackb(raw)
        return epoch == self._server.epoch and (
            self._server.history([Point(sequence, mark)]) == [Standing.LOST]
        )

    # What this node knows of its own files --------------------------------------------------------
    def _note_ways(self, batch: ClusterBatch, commit: Commit) -> None:
        self._ways.note(batch.arrived)
        self._ways.note(
            int.from_bytes(record.key, "little")
            for record, value in commit.writes.items()
            if record.table is SharedTable.INODE and value is not None
        )

    def remember_more(self) -> bool:
        """Learn what leads to some more of the files whose bytes are here, for a server that will
        have lost it; False once all is known. Raises `Unavailable`."""
        with self._reading_own() as local:
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

    def recheck(self) -> None:
        """Something was missed: all that this node's own tables say has to be looked at."""
        self._checked_to = 0, b""

    def recheck_more(self) -> bool:
        """Make the order of use, and the blobs' counts of files, say of some more what is so;
        False once all do."""
        if not self._redo.is_over:
            return False  # what was lost may say of blobs that they have names
        if self._unsettled:
            self._settle_more()
            return True
        if self._checked_to is None:
            return False
        index, after = self._checked_to
        with self._reading_own() as local:
            table = (self._tables.stamp, self._tables.blob)[index]
            keys = list(islice(local.keys(table, b"", after), RECHECK_STEP))
        digests = [key for key in keys if len(key) == DIGEST_BYTES]

        def change(batch: Batch) -> None:
            view = of_cluster(batch)
            inos = [int.from_bytes(key, "little") for key in keys if len(key) != DIGEST_BYTES]
            view.read_inodes_ahead(inos)
            for ino in inos:
                view.recheck_stamp(ino)
            self._ways.note(inos)
            for digest in digests:
                view.recheck_copy(digest)

        if keys:
            self._known.read_pages_ahead(
                page for digest in digests for page in (copies_page(digest), holders_page(digest))
            )
            self._write(change)
            self._checked_to = index, keys[-1]
        else:
            self._checked_to = (index + 1, b"") if index == 0 else None
        return self._checked_to is not None


def _decode(raw: bytes) -> Heard | None:
    """An entry of the feed; None for one that another version wrote, as if it had been lost."""
    try:
        return decode_news(raw)
    except (ValueError, TypeError, LookupError):
        log.warning("another version of kvfs wrote to this cluster; what it says is read anew")
        return None
