"""The embedded engine against a plain model of a namespace, its blobs and their use.

Every step is done to both; errno, names, link counts, references, eviction order and totals must
agree, and the totals must be what a scan of the tables counts.
"""

import errno
import itertools
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfs.errors import NamespaceError
from kvfs.meta.contract import ROOT_INO, ChunkInfo, Publication, Published, RenameMode
from kvfs.meta.lmdb import LmdbEngine
from kvfs.meta.view import View
from kvfs.names import ChunkKeys

LEAF, CHUNK = b"aa", b"aaaa-g0-s0.safetensors"
CHUNK_KEYS = ChunkKeys(b"\xaa\xaa", 2, ((0, 0),))
NAMES = st.sampled_from([LEAF, CHUNK, b"b", b"d" * 255])
PICKS = st.integers(0, 1023)  # which of those that fit, and one time in 16 any or none
ODD = st.sampled_from([False] * 7 + [True])  # whether to ask for what must be refused
DIGESTS = st.integers(1, 5)
KINDS = st.sampled_from([stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO])
T = TypeVar("T")
UNKNOWN_INO = 10**6


def digest_of(number: int) -> bytes:
    return bytes([number]) * 16


def info_of(number: int) -> ChunkInfo:
    return ChunkInfo(
        b"k%d" % number, b"k%d" % (number - 1), number * 16, number * 16 + 16, 0, 0, b""
    )


@dataclass
class Node:
    kind: int
    names: dict[bytes, int] | None = None  # of a directory: name -> ino
    digest: bytes = b""
    used_ns: int = 0
    pinned: bool = False
    chunk: ChunkInfo | None = None


@dataclass
class Model:
    nodes: dict[int, Node] = field(default_factory=dict)
    doomed: set[bytes] = field(default_factory=set)
    places: dict[bytes, int] = field(default_factory=dict)  # directory of each blob, doomed or not

    def entries(self, ino: int) -> dict[bytes, int]:
        if ino not in self.nodes:
            raise NamespaceError(errno.ENOENT)
        names = self.nodes[ino].names
        if names is None:
            raise NamespaceError(errno.ENOTDIR)
        return names

    def links(self, ino: int) -> list[tuple[int, bytes]]:
        return [
            (parent, name)
            for parent, node in self.nodes.items()
            for name, child in (node.names or {}).items()
            if child == ino
        ]

    def nlink(self, ino: int) -> int:
        names = self.nodes[ino].names
        if names is None:
            return len(self.links(ino))
        return 2 + sum(self.nodes[child].names is not None for child in names.values())

    def is_below(self, ino: int, above: int) -> bool:
        while ino != above and ino != ROOT_INO:
            [(ino, _)] = self.links(ino)
        return ino == above

    def references(self) -> Counter[bytes]:
        return Counter(node.digest for node in self.nodes.values() if node.digest)

    def settle(self) -> None:
        """After any change: chunk records need a name, blobs need a holder."""
        for ino, node in self.nodes.items():
            if node.chunk is not None and not self.links(ino):
                node.chunk = None
        references = self.references()
        self.doomed = {digest for digest in self.places if digest not in references}

    def drop_if_gone(self, ino: int) -> None:
        if self.nodes[ino].names is not None and not self.links(ino):
            del self.nodes[ino]


class MetaMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.engine = LmdbEngine.open(Path(self.scratch.name), now_ns=0)
        self.model = Model({ROOT_INO: Node(stat.S_IFDIR, {})})
        self.clock_ns = 1000
        # Something to begin with, so that fewer steps are refused.
        outer = self._make(ROOT_INO, LEAF, stat.S_IFDIR)
        inner = self._make(outer, b"b", stat.S_IFDIR)
        self._make(inner, LEAF, stat.S_IFREG)
        self._publish_path([LEAF], CHUNK, 1, chunked=True)
        self._publish_path([], CHUNK, 2, chunked=False)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            self.scratch.cleanup()

    def now(self) -> int:
        self.clock_ns += 100
        return self.clock_ns

    def pick(self, number: int, kind: int | None = None) -> int:
        """An inode of a kind, if there is one."""
        place, odd = divmod(number, 16)
        fit = [ino for ino, n in self.model.nodes.items() if kind in (None, n.kind)]
        inos = sorted(fit) if fit and odd != 15 else [UNKNOWN_INO, *sorted(self.model.nodes)]
        return inos[place % len(inos)]

    def pick_name(self, number: int, name: bytes) -> tuple[int, bytes]:
        """A name that exists, if there is one."""
        place, odd = divmod(number, 16)
        links = [
            (parent, child)
            for parent, node in sorted(self.model.nodes.items())
            for child in sorted(node.names or {})
        ]
        if not links or odd == 15:
            return self.pick(number, stat.S_IFDIR), name
        return links[place % len(links)]

    def both(self, real: Callable[[], T], modelled: Callable[[], None]) -> T | None:
        """Do one thing to both; the engine's result, or None when both refuse for one reason."""
        expected = None
        try:
            modelled()
        except NamespaceError as error:
            expected = error.code
        try:
            result = real()
        except NamespaceError as error:
            assert expected is not None, f"engine refuses: {error}"
            assert errno.errorcode[error.code] == errno.errorcode[expected]
            return None
        assert expected is None, f"model refuses: {errno.errorcode[expected or 0]}"
        self.model.settle()
        return result

    # Names ---------------------------------------------------------------------------------------
    @rule(parent=PICKS, name=NAMES, kind=KINDS)
    def make(self, parent: int, name: bytes, kind: int) -> None:
        self._make(self.pick(parent, stat.S_IFDIR), name, kind)

    def _make(self, where: int, name: bytes, kind: int) -> int:
        def modelled() -> None:
            if name in self.model.entries(where):
                raise NamespaceError(errno.EEXIST)

        now_ns, target = self.now(), b"t" if kind == stat.S_IFLNK else b""
        made = self.both(
            lambda: self.engine.make(where, name, kind | 0o600, 0, 0, now_ns, target=target),
            modelled,
        )
        if made is not None:
            self.model.nodes[made.ino] = Node(kind, {} if kind == stat.S_IFDIR else None)
            self.model.entries(where)[name] = made.ino
        return made.ino if made is not None else 0

    @rule(ino=PICKS, parent=PICKS, name=NAMES)
    def link(self, ino: int, parent: int, name: bytes) -> None:
        what, where = self.pick(ino, stat.S_IFREG), self.pick(parent, stat.S_IFDIR)

        def modelled() -> None:
            if what not in self.model.nodes:
                raise NamespaceError(errno.ENOENT)
            entries = self.model.entries(where)
            if name in entries:
                raise NamespaceError(errno.EEXIST)
            if self.model.nodes[what].names is not None:
                raise NamespaceError(errno.EPERM)
            if not self.model.links(what):
                raise NamespaceError(errno.ENOENT)
            entries[name] = what

        now_ns = self.now()
        self.both(lambda: self.engine.link(what, where, name, now_ns), modelled)

    @rule(number=PICKS, some_name=NAMES, odd=ODD)
    def remove(self, number: int, some_name: bytes, odd: bool) -> None:
        where, name = self.pick_name(number, some_name)
        node = self.model.nodes.get(where)
        ino = ((node and node.names) or {}).get(name, ROOT_INO)
        as_directory = (self.model.nodes[ino].names is not None) != odd

        def modelled() -> None:
            entries = self.model.entries(where)
            if name not in entries:
                raise NamespaceError(errno.ENOENT)
            ino = entries[name]
            names = self.model.nodes[ino].names
            if as_directory and names is None:
                raise NamespaceError(errno.ENOTDIR)
            if not as_directory and names is not None:
                raise NamespaceError(errno.EISDIR)
            if names:
                raise NamespaceError(errno.ENOTEMPTY)
            del entries[name]
            self.model.drop_if_gone(ino)

        now_ns = self.now()
        call = self.engine.rmdir if as_directory else self.engine.unlink
        self.both(lambda: call(where, name, now_ns), modelled)

    @rule(
        number=PICKS, some_name=NAMES, to=PICKS, to_name=NAMES, over=st.booleans(),
        mode=st.sampled_from(RenameMode),
    )  # fmt: skip
    def rename(
        self, number: int, some_name: bytes, to: int, to_name: bytes, over: bool, mode: RenameMode
    ) -> None:
        old, name = self.pick_name(number, some_name)
        new, new_name = self.pick_name(to, to_name) if over else (
            self.pick(to, stat.S_IFDIR), to_name
        )  # fmt: skip
        now_ns = self.now()
        self.both(
            lambda: self.engine.rename(old, name, new, new_name, now_ns, mode),
            lambda: self._model_rename(old, name, new, new_name, mode),
        )

    def _model_rename(
        self, old: int, name: bytes, new: int, new_name: bytes, mode: RenameMode
    ) -> None:
        model = self.model
        source = model.entries(old)
        if name not in source:
            raise NamespaceError(errno.ENOENT)
        moved = source[name]
        target = model.entries(new)
        found = target.get(new_name)
        exchange = mode is RenameMode.EXCHANGE
        if found is not None and mode is RenameMode.NO_REPLACE:
            raise NamespaceError(errno.EEXIST)
        if found is None and exchange:
            raise NamespaceError(errno.ENOENT)
        moved_names = model.nodes[moved].names
        if moved_names is not None and model.is_below(new, moved):
            raise NamespaceError(errno.EINVAL)
        found_names = None if found is None else model.nodes[found].names
        if found is not None and found_names is not None and model.is_below(old, found):
            raise NamespaceError(errno.EINVAL if exchange else errno.ENOTEMPTY)
        if found == moved:
            return
        if found is not None and not exchange:
            if moved_names is not None and found_names is None:
                raise NamespaceError(errno.ENOTDIR)
            if moved_names is None and found_names is not None:
                raise NamespaceError(errno.EISDIR)
            if found_names:
                raise NamespaceError(errno.ENOTEMPTY)
        del source[name]
        target[new_name] = moved
        if found is not None and exchange:
            source[name] = found
        elif found is not None:
            model.drop_if_gone(found)

    # Content -------------------------------------------------------------------------------------
    @rule(ino=PICKS, number=DIGESTS, chunked=st.booleans())
    def publish_ino(self, ino: int, number: int, chunked: bool) -> None:
        what, now_ns = self.pick(ino, stat.S_IFREG), self.now()
        info = info_of(number) if chunked else None

        def modelled() -> None:
            node = self.model.nodes.get(what)
            if node is None:
                raise NamespaceError(errno.ENOENT)
            if node.kind != stat.S_IFREG:
                raise NamespaceError(errno.EISDIR if node.names is not None else errno.EINVAL)
            if node.digest != digest_of(number):
                node.chunk = None
            node.digest, node.used_ns = digest_of(number), now_ns
            node.chunk = info or node.chunk
            self._model_place(number)

        self.both(lambda: self._publish(number, now_ns, ino=what, chunk=info), modelled)

    @rule(above=st.lists(NAMES, max_size=3), name=NAMES, number=DIGESTS, chunked=st.booleans())
    def publish_path(self, above: list[bytes], name: bytes, number: int, chunked: bool) -> None:
        self._publish_path(above, name, number, chunked=chunked)

    def _publish_path(self, above: list[bytes], name: bytes, number: int, *, chunked: bool) -> None:
        now_ns, info = self.now(), info_of(number) if chunked else None

        def modelled() -> None:
            ino: int | None = ROOT_INO
            for part in above:
                ino = self.model.entries(ino).get(part) if ino is not None else None
            entries = {} if ino is None else self.model.entries(ino)
            if name in entries and self.model.nodes[entries[name]].names is not None:
                raise NamespaceError(errno.EISDIR)

        path = b"/".join([*above, name])
        before = self.engine.resolve([path])[0]
        published = self.both(
            lambda: self._publish(number, now_ns, path=path, chunk=info), modelled
        )
        if published is None:
            return
        [result] = published
        assert (result.replaced and result.replaced.ino) == (before and before.ino)
        ino = ROOT_INO
        for part in above:
            entries = self.model.entries(ino)
            if part not in entries:
                made = self.engine.lookup(ino, part)
                assert made is not None
                self.model.nodes[made.ino] = Node(stat.S_IFDIR, {})
                entries[part] = made.ino
            ino = entries[part]
        self.model.entries(ino)[name] = result.inode.ino
        self.model.nodes[result.inode.ino] = Node(
            stat.S_IFREG, None, digest_of(number), now_ns, False, info
        )
        self._model_place(number)
        self.model.settle()

    def _publish(self, number: int, now_ns: int, **fields: Any) -> list[Published]:
        publication = Publication(
            digest_of(number), number, number * 10, self.place_of(number), 0, **fields
        )
        return self.engine.publish([publication], now_ns)

    def place_of(self, number: int) -> int:
        return (number + self.clock_ns // 100) % 3

    def _model_place(self, number: int) -> None:
        digest = digest_of(number)
        if digest not in self.model.places or digest in self.model.doomed:
            self.model.places[digest] = self.place_of(number)

    @rule(inos=st.lists(PICKS, max_size=3))
    def forget(self, inos: list[int]) -> None:
        chosen = [self.pick(ino) for ino in inos]
        self.engine.forget(chosen)
        for ino in set(chosen) & set(self.model.nodes):
            if ino != ROOT_INO and not self.model.links(ino):
                del self.model.nodes[ino]
        self.model.settle()

    @rule(numbers=st.lists(DIGESTS, max_size=2))
    def bury(self, numbers: list[int]) -> None:
        digests = [digest_of(number) for number in numbers]
        self.engine.bury(digests)
        for digest in set(digests) & self.model.doomed:
            del self.model.places[digest]
        self.model.settle()

    @rule(number=DIGESTS)
    def lose(self, number: int) -> None:
        gone = self.engine.lose(digest_of(number), self.now())
        holders = [i for i, n in self.model.nodes.items() if n.digest == digest_of(number)]
        links = [(p, name, i) for i in holders for p, name in self.model.links(i)]
        assert sorted((p, name, inode.ino) for p, name, inode in gone) == sorted(links)
        for parent, name, _ in links:
            del self.model.entries(parent)[name]
        for ino in holders:
            self.model.nodes[ino].digest = b""
        self.model.places.pop(digest_of(number), None)
        self.model.settle()

    @rule(number=DIGESTS, directory=st.integers(0, 2))
    def relocate(self, number: int, directory: int) -> None:
        digest = digest_of(number)

        def modelled() -> None:
            if digest not in self.model.references():
                raise NamespaceError(errno.ENOENT)
            self.model.places[digest] = directory

        self.both(lambda: self.engine.relocate(digest, directory, number * 10), modelled)

    @rule(inos=st.lists(PICKS, max_size=3))
    def unlink_all(self, inos: list[int]) -> None:
        chosen = [self.pick(ino, stat.S_IFREG) for ino in inos]
        self.engine.unlink_all(chosen, self.now())
        for ino in set(chosen) & set(self.model.nodes):
            if self.model.nodes[ino].names is None:
                for parent, name in self.model.links(ino):
                    del self.model.entries(parent)[name]
        self.model.settle()

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.engine = LmdbEngine.open(Path(self.scratch.name))
        found = self.engine.recover()
        gone = [
            ino
            for ino, node in self.model.nodes.items()
            if (node.kind == stat.S_IFREG and not node.digest)
            or (ino != ROOT_INO and not self.model.links(ino))
        ]
        for ino in gone:
            for parent, name in self.model.links(ino):
                del self.model.entries(parent)[name]
            del self.model.nodes[ino]
        assert found.dropped_inodes == len(gone)
        self.model.settle()
        assert {blob.digest for blob in found.doomed} == self.model.doomed

    # Use -----------------------------------------------------------------------------------------
    def _is_stamped(self, ino: int) -> bool:
        return bool(self.model.nodes[ino].digest) and bool(self.model.links(ino))

    @rule(inos=st.lists(PICKS, max_size=4))
    def restamp(self, inos: list[int]) -> None:
        now_ns = self.now()
        stamps = {self.pick(ino, stat.S_IFREG): now_ns - i for i, ino in enumerate(inos)}
        self.engine.restamp(list(stamps.items()))
        for ino, used_ns in stamps.items():
            if ino in self.model.nodes and self._is_stamped(ino):
                self.model.nodes[ino].used_ns = used_ns

    @rule(ino=PICKS, pinned=st.booleans())
    def pin(self, ino: int, pinned: bool) -> None:
        what = self.pick(ino)

        def modelled() -> None:
            if what not in self.model.nodes:
                raise NamespaceError(errno.ENOENT)
            self.model.nodes[what].pinned = pinned

        self.both(lambda: self.engine.set_pinned(what, pinned), modelled)

    @rule()
    def index_more(self) -> None:
        with patch("kvfs.meta.lookups.CHUNK_INDEX_STEP", 2):
            self.engine.index_more()

    # What must agree -----------------------------------------------------------------------------
    @invariant()
    def names_agree(self) -> None:
        for ino, node in self.model.nodes.items():
            inode = self.engine.inode(ino)
            assert inode is not None
            assert stat.S_IFMT(inode.mode) == node.kind
            assert (inode.digest, inode.pinned) == (node.digest, node.pinned)
            assert inode.nlink == self.model.nlink(ino)
            if node.digest:
                assert inode.used_ns == node.used_ns
            if ino != ROOT_INO:
                assert sorted(self.engine.names_of(ino)) == sorted(self.model.links(ino))
            if node.names is not None:
                listed = {e.name: e.inode for e in self.engine.entries(ino, b"", 99)}
                assert {name: child.ino for name, child in listed.items()} == node.names
                assert all(self.engine.inode(i.ino) == i for i in listed.values())
            paths = self.engine.paths_of(ino)
            assert [i and i.ino for i in self.engine.resolve(paths)] == [ino] * len(paths)
            size = int(node.digest[0]) if node.digest else None
            assert self.engine.sizes(paths) == [size] * len(paths)

    @invariant()
    def chunk_sizes_agree(self) -> None:
        for ino, node in self.model.nodes.items():
            if node.names is not None:
                [path] = self.engine.paths_of(ino)
                leaf = self.model.nodes.get(node.names.get(LEAF, 0))
                names = (leaf.names if leaf is not None else None) or {}
                found = self.model.nodes.get(names.get(CHUNK, 0))
                size = int(found.digest[0]) if found is not None and found.digest else None
                assert self.engine.chunk_sizes(path, CHUNK_KEYS) == [size]

    @invariant()
    def blobs_agree(self) -> None:
        references = self.model.references()
        for number in range(1, 6):
            digest = digest_of(number)
            [blob] = self.engine.blobs([digest])
            assert (0 if blob is None else blob.references) == references[digest]
            assert blob is None or blob.directory == self.model.places[digest]
            holders = [i for i, n in self.model.nodes.items() if n.digest == digest]
            with self.engine._reading() as view:
                assert view.holders(digest) == sorted(holders)
            held = self.engine.held_paths(digest, (0, 0, b""), 99)
            assert [(h.ino, h.parent, h.name) for h in held] == sorted(
                (ino, parent, name) for ino in holders for parent, name in self.model.links(ino)
            )
            assert self.engine.held_paths(digest, (0, 0, b""), 2) == held[:2]
            for first, second in itertools.pairwise(held):
                after = (first.ino, first.parent, first.name)
                assert self.engine.held_paths(digest, after, 1) == [second]
        assert {blob.digest for blob in self.engine.doomed(99)} == self.model.doomed

    @invariant()
    def usage_agrees(self) -> None:
        usage = self.engine.usage()
        places = self.model.places
        assert usage.inodes == len(self.model.nodes)
        assert usage.blobs == len(places)
        assert usage.size_bytes == sum(digest[0] for digest in places)
        for index in range(3):
            weight = sum(digest[0] * 10 for digest, place in places.items() if place == index)
            assert (*usage.allocated_bytes, 0, 0, 0)[index] == weight
        with self.engine._reading() as view:
            assert usage.inodes == _count(view, "inode")
            assert usage.blobs == _count(view, "blob")

    @invariant()
    def order_agrees(self) -> None:
        ranked = [
            (node.used_ns, ino)
            for ino, node in self.model.nodes.items()
            if self._is_stamped(ino) and not node.pinned
        ]
        assert [(c.used_ns, c.ino) for c in self.engine.coldest(99)] == sorted(ranked)
        assert self.engine.newest_used_ns() == max((used for used, _ in ranked), default=0)

    @invariant()
    def chunks_agree(self) -> None:
        chunks = {ino: node.chunk for ino, node in self.model.nodes.items() if node.chunk}
        for ino in self.model.nodes:
            assert self.engine.chunk(ino) == chunks.get(ino)
        with self.engine._reading() as view:
            assert _count(view, "chunk") == _count(view, "child") == len(chunks)


def _count(view: View, table: str) -> int:
    with view.txn.cursor(getattr(view.tables, table)) as cursor:
        return sum(1 for _ in cursor)


TestMetaModel = MetaMachine.TestCase
TestMetaModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
