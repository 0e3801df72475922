"""The metadata engine of a cluster: names on a server that speaks Redis's protocol, what this node
has of its own in LMDB. Decision 005 says why it is so.

Its layers: transactions on what all share (`kvfs.meta.shared_engine`), following what others do
(`kvfs.meta.following`), and here which node has which bytes.
"""

import errno
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self

from kvfs.config import (
    ABANDONED_NODES_MAX,
    CLUSTER_LEASE_S,
    CLUSTER_NODES_MAX,
    CLUSTER_SWEEP_KEYS,
    META_BYTES_MAX,
    RECHECK_STEP,
)
from kvfs.errors import InvalidInput, NamespaceError
from kvfs.meta import content, records
from kvfs.meta.abandoned import Named, drop_loose
from kvfs.meta.batch import Batch
from kvfs.meta.cluster import ClusterView
from kvfs.meta.contract import Blob, Inode, Publication, Recovery, Usage
from kvfs.meta.following import FollowingEngine
from kvfs.meta.lmdb import Database
from kvfs.meta.members import Member, Members, is_taken
from kvfs.meta.primary import Refused
from kvfs.meta.server import MetaServer
from kvfs.meta.shared import Record, SharedTable, copies_page, holders_page
from kvfs.meta.shared_engine import of_cluster
from kvfs.meta.tier_contract import GivenUp


class RedisEngine(FollowingEngine):
    """`MetaEngine` of a cluster. Raises `Unavailable` besides, where the server does not answer."""

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

    def is_taken(self, store: str, boot_id: str) -> bool:
        """Whether a node of another place is a member under this node's id. Raises
        `Unavailable`."""
        return is_taken(self._server, self.node_id, store, boot_id)

    def members(self, me: Member, lease_s: float = CLUSTER_LEASE_S) -> Members:
        """The list of nodes, with this one on it as it describes itself."""
        return Members(self._server, me, lease_s)

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
        with self._reading_own() as local:
            keys = list(islice(local.keys(self._tables.blob, b"", after), limit))
            found = [local.blob(key) for key in keys]
        return [blob for blob in found if blob is not None]

    def blobs(self, digests: Sequence[bytes]) -> list[Blob | None]:
        """As the contract says; what lies in a directory that is missing is not here."""
        found = super().blobs(digests)
        return [None if blob and blob.directory in self.absent else blob for blob in found]

    def add_copy(self, publication: Publication) -> bool:
        """The bytes of a digest have come here from another node, and lie where the publication
        says; False where no file holds it any more."""
        return self._write(lambda batch: of_cluster(batch).add_copy(publication))

    def add_found(
        self, publications: Sequence[Publication], former_ids: Sequence[bytes]
    ) -> list[bool]:
        """These lie here, and were not known to: whether each is a copy now of what files of the
        cluster hold. `former_ids`: of this node, when it last knew them."""
        self.read_holders_ahead([publication.digest for publication in publications])

        def change(batch: Batch) -> list[bool]:
            view = of_cluster(batch)
            view.read_inodes_ahead(ino for p in publications for ino in view.holders(p.digest))
            return [view.add_found(publication, former_ids) for publication in publications]

        return self._write(change)

    def read_holders_ahead(self, digests: Iterable[bytes]) -> None:
        """What holds these will be asked for one by one: one round trip for all. Raises
        `Unavailable`."""
        self._known.read_pages_ahead(map(holders_page, digests))

    def end_copies(self, digests: Sequence[bytes], others: Container[bytes]) -> list[bytes]:
        """Give up the copies here of those digests that one of the `others` has as well, which are
        returned: their blobs are doomed. What is pinned stays."""

        def change(batch: Batch) -> list[bytes]:
            view = of_cluster(batch)
            ended = [
                digest
                for digest in digests
                if view.has_copy_among(digest, others) and not content.is_pinned(view, digest)
            ]
            for digest in ended:
                view.end_copy(digest)
            return ended

        return self._write(change)

    def give_up(self, digests: Sequence[bytes]) -> list[GivenUp]:
        """As the contract says; the blobs that were here are doomed."""

        def change(batch: Batch) -> list[GivenUp]:
            view = of_cluster(batch)
            given = [
                digest
                for digest in digests
                if view.tier_mask(digest) and not content.is_pinned(view, digest)
            ]
            for digest in given:
                view.end_copy(digest)
            return [GivenUp(digest, None) for digest in given]

        return self._write(change)

    def lose(self, digest: bytes, now_ns: int) -> list[tuple[int, bytes, Inode]]:
        """As the contract says, where no other node has the bytes, and no tier; else only this copy
        is lost, and the names live on."""

        def change(batch: Batch) -> list[tuple[int, bytes, Inode]]:
            view = of_cluster(batch)
            is_here_only = all(node == self.node_id for node in view.copies(digest))
            if is_here_only and not view.tier_mask(digest):
                return content.lose(batch, digest, now_ns)
            view.end_copy(digest)
            view.bury(digest)
            return []

        return self._write(change)

    def digests_of(self, node_ids: Sequence[bytes], cursor: bytes) -> tuple[bytes, list[bytes]]:
        """As `MetaServer.digests_of`, in small steps."""
        return self._server.digests_of(node_ids, cursor, CLUSTER_SWEEP_KEYS)

    def end_nodes(
        self, node_ids: Sequence[bytes], digests: Sequence[bytes], now_ns: int
    ) -> list[tuple[int, bytes, Inode]]:
        """Those nodes are no more, and what they had of these is nowhere but where it is known to
        be: names of what nobody has go, as by `lose`."""

        def change(batch: Batch) -> list[tuple[int, bytes, Inode]]:
            view = of_cluster(batch)
            gone: list[tuple[int, bytes, Inode]] = []
            for digest in digests:
                others = set(view.copies(digest)) - set(node_ids)
                view.end_copies_of(digest, node_ids)
                if not others and not view.tier_mask(digest):
                    gone += content.lose(batch, digest, now_ns)
            return gone

        return self._write(change)

    # What nodes leave unfinished ----------------------------------------------------------------
    def recover(self) -> Recovery:
        """As the contract says; also of what the server knows, and this node's own tables do not
        any more: what was about to be a copy here is none."""
        left = super().recover()
        intended = iter([digest for digest, _ in left.intended])
        while digests := list(islice(intended, RECHECK_STEP)):
            self.settle_copies(digests)
        while self.drop_loose(self.node_id, if_gone=False) is not None:
            pass
        return left

    def gone_nodes(self, after_s: float, settled: bytes = b"") -> list[bytes]:
        """Some of the nodes that have not been members for so long, and may have left something
        unfinished. `settled`: one that has not any more."""
        return self._server.gone_nodes(after_s, ABANDONED_NODES_MAX, settled)

    def drop_loose(self, node_id: bytes, *, if_gone: bool = True) -> list[Named] | None:
        """As `abandoned.drop_loose`: a step of it. Raises `Unavailable`."""
        return self._write(lambda batch: drop_loose(of_cluster(batch), node_id, if_gone=if_gone))

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
