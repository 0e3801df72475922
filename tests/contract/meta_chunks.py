"""What every metadata engine must do with chunk records, and for eviction."""

import errno

from kvfs.meta.contract import ROOT_INO, MetaEngine
from tests.contract.meta_words import T0, OfEngine, chunk, digest, publication, refused


class MetaChunksSuite(OfEngine):
    def test_children(self, meta: MetaEngine) -> None:
        [a, b, c, _] = meta.publish(
            [
                publication(1, b"kv/m/00/a", chunk=chunk(b"a")),
                publication(2, b"kv/m/01/b", chunk=chunk(b"b", b"a", 256)),
                publication(3, b"kv/m/02/c", chunk=chunk(b"c", b"a", 256)),
                publication(4, b"kv/other/00/a", chunk=chunk(b"x", b"a", 256)),
            ],
            T0,
        )
        namespace = meta.parent_of(a.parent)
        assert meta.paths_of(namespace) == [b"kv/m"]

        def inos(parent: bytes, after: int = 0, limit: int = 9) -> list[int]:
            return [e.inode.ino for e in meta.children(namespace, parent, after, limit)]

        assert inos(b"") == [a.inode.ino]
        assert inos(b"a") == [b.inode.ino, c.inode.ino]
        assert inos(b"a", 0, 1) == [b.inode.ino]
        assert inos(b"a", b.inode.ino) == [c.inode.ino]
        assert (inos(b"b"), inos(b"k" * 300), inos(b"aa")) == ([], [], [])
        entry = meta.children(namespace, b"a", 0, 1)[0]
        assert (entry.info, entry.inode) == (chunk(b"b", b"a", 256), b.inode)

    def test_set_chunk(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"m/h/f")], T0)
        ino = published.inode.ino
        assert meta.chunk(ino) is None
        meta.set_chunk(ino, chunk(b"k"))
        meta.set_chunk(ino, chunk(b"k", b"p", 256))
        assert meta.chunk(ino) == chunk(b"k", b"p", 256)
        namespace = meta.parent_of(published.parent)
        assert meta.children(namespace, b"", 0, 9) == []
        assert [e.inode.ino for e in meta.children(namespace, b"p", 0, 9)] == [ino]
        refused(errno.ENOENT, meta.set_chunk, 999, chunk(b"k"))
        refused(errno.EINVAL, meta.set_chunk, ROOT_INO, chunk(b"k"))
        refused(errno.EINVAL, meta.set_chunk, self.file(meta, b"u"), chunk(b"k"))
        refused(errno.EINVAL, meta.set_chunk, ino, chunk(b""))

    def test_drop_chunk(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"m/h/f", chunk=chunk(b"k"))], T0)
        ino = published.inode.ino
        for _ in range(2):
            meta.drop_chunk(ino)
            assert meta.chunk(ino) is None
            assert meta.children(meta.parent_of(published.parent), b"", 0, 9) == []
        assert meta.inode(ino) == published.inode
        meta.drop_chunk(999)
        meta.set_chunk(ino, chunk(b"k"))
        assert meta.chunk(ino) == chunk(b"k")

    def test_a_chunk_record_ends_with_its_content(self, meta: MetaEngine) -> None:
        [one, two] = meta.publish(
            [
                publication(1, b"m/h/1", chunk=chunk(b"1")),
                publication(2, b"m/h/2", chunk=chunk(b"2")),
            ],
            T0,
        )
        namespace = meta.parent_of(one.parent)
        meta.publish([publication(1, ino=one.inode.ino)], T0)
        assert meta.chunk(one.inode.ino) == chunk(b"1")
        meta.publish([publication(3, ino=one.inode.ino)], T0)
        meta.unlink(two.parent, b"2", T0)
        assert [meta.chunk(p.inode.ino) for p in (one, two)] == [None, None]
        assert meta.children(namespace, b"", 0, 9) == []

    def test_a_chunk_moves_to_another_namespace(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"m/h/f", chunk=chunk(b"k"))], T0)
        there = meta.make_directories(b"n/h", 0o755, 0, 0, T0)
        meta.rename(published.parent, b"f", there.ino, b"f", T0)
        old, new = meta.parent_of(published.parent), meta.parent_of(there.ino)
        assert meta.children(old, b"", 0, 9) == []
        assert [e.inode.ino for e in meta.children(new, b"", 0, 9)] == [published.inode.ino]

    # Use and eviction ----------------------------------------------------------------------------
    def coldest(self, meta: MetaEngine, directory: int | None = None) -> list[tuple[int, int]]:
        return [(c.ino, c.used_ns) for c in meta.coldest(99, directory=directory)]

    def test_publications_and_stamps_are_uses(self, meta: MetaEngine) -> None:
        published = meta.publish([publication(n, b"f%d" % n) for n in range(1, 4)], T0)
        one, two, three = (p.inode.ino for p in published)
        assert self.coldest(meta) == [(three, T0 - 2), (two, T0 - 1), (one, T0)]
        unpublished = self.file(meta, b"u")
        inos = [three, unpublished, 999, ROOT_INO, one]
        meta.restamp([(ino, T0 + 10 - index) for index, ino in enumerate(inos)])
        assert self.coldest(meta) == [(two, T0 - 1), (one, T0 + 6), (three, T0 + 10)]
        assert meta.newest_used_ns() == T0 + 10
        touched = meta.inode(three)
        assert touched is not None
        assert touched.used_ns == T0 + 10

    def test_coldest_pages(self, meta: MetaEngine) -> None:
        meta.publish([publication(n, b"f%d" % n, directory=n % 2) for n in range(1, 8)], T0)
        everything = meta.coldest(99)
        seen, after = [], (0, 0)
        while page := meta.coldest(3, after):
            seen += page
            after = (page[-1].used_ns, page[-1].ino)
        assert seen == everything
        assert [c.used_ns for c in seen] == sorted(c.used_ns for c in seen)
        assert {c.directory for c in meta.coldest(99, directory=1)} == {1}
        assert len(self.coldest(meta, 0)) + len(self.coldest(meta, 1)) == 7
        assert self.coldest(meta, 2) == []

    def test_what_eviction_does_not_see(self, meta: MetaEngine) -> None:
        assert (meta.coldest(9), meta.newest_used_ns()) == ([], 0)
        [pinned, orphan, seen] = meta.publish([publication(n, b"f%d" % n) for n in (1, 2, 3)], T0)
        self.file(meta, b"unpublished")
        assert meta.set_pinned(pinned.inode.ino, True).pinned
        meta.unlink(ROOT_INO, orphan.name, T0)
        assert [c.ino for c in meta.coldest(9)] == [seen.inode.ino]
        meta.restamp([(pinned.inode.ino, T0 - 9), (999, 5)])
        meta.set_pinned(pinned.inode.ino, False)
        assert self.coldest(meta)[0] == (pinned.inode.ino, T0 - 9)
        refused(errno.ENOENT, meta.set_pinned, 999, True)

    def test_candidates_say_what_they_weigh(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f", directory=1), publication(1, b"g")], T0)
        [first, second] = meta.coldest(9)
        assert (first.digest, first.directory, first.references) == (digest(1), 1, 2)
        assert (second.allocated_bytes, second.is_pinned) == (4096, False)

    def test_continuations(self, meta: MetaEngine) -> None:
        [a, b, c, circle, plain] = meta.publish(
            [
                publication(1, b"m/h/a", chunk=chunk(b"a", b"", 256)),
                publication(2, b"m/h/b", chunk=chunk(b"b", b"a", 512)),
                publication(3, b"m/h/c", chunk=chunk(b"c", b"a", 512)),
                publication(4, b"m/h/o", chunk=chunk(b"o", b"a", 0)),
                publication(5, b"m/h/p"),
            ],
            T0,
        )
        meta.set_pinned(c.inode.ino, True)
        found = meta.continuations(a.inode.ino, 0, 9)
        assert [(x.ino, x.is_pinned) for x in found] == [(b.inode.ino, False), (c.inode.ino, True)]
        assert [x.ino for x in meta.continuations(a.inode.ino, b.inode.ino, 9)] == [c.inode.ino]
        assert len(meta.continuations(a.inode.ino, 0, 1)) == 1
        for other in (b, circle, plain):
            assert meta.continuations(other.inode.ino, 0, 9) == []
        meta.unlink(b.parent, b"b", T0)
        assert [x.ino for x in meta.continuations(a.inode.ino, 0, 9)] == [c.inode.ino]
