"""What every metadata engine must do with the content of files, and over a restart."""

import errno
import stat
from collections.abc import Callable
from dataclasses import replace

from kvfs.meta.contract import ROOT_INO, Blob, Changes, MetaEngine, Usage
from tests.contract.meta_words import FILE, T0, OfEngine, chunk, digest, publication, refused


class MetaContentSuite(OfEngine):
    def test_publish_by_path(self, meta: MetaEngine) -> None:
        wanted = publication(1, b"/a/b/f", uid=3, gid=4, mode=FILE, mtime_ns=T0 - 7)
        [published] = meta.publish([wanted], T0)
        inode = published.inode
        assert meta.resolve([b"a/b/f"]) == [inode]
        assert (inode.digest, inode.size_bytes, inode.used_ns) == (digest(1), 101, T0)
        assert (inode.mtime_ns, inode.ctime_ns, inode.uid, inode.gid) == (T0 - 7, T0, 3, 4)
        assert meta.paths_of(published.parent) == [b"a/b"]
        assert (published.name, published.replaced) == (b"f", None)
        assert meta.blobs([digest(1), digest(2), b""]) == [
            Blob(digest(1), 101, 4096, 0, 1), None, None
        ]  # fmt: skip
        [held] = meta.held_paths(digest(1), (0, 0, b""), 9)
        assert held.ino == inode.ino
        parent = meta.inode(published.parent)
        assert parent is not None
        assert (parent.uid, stat.S_IMODE(parent.mode)) == (3, 0o755)

    def test_publish_by_ino(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        meta.set_attributes(ino, Changes(size_bytes=5), T0)
        [published] = meta.publish([publication(1, ino=ino)], T0 + 1)
        assert (published.parent, published.name, published.replaced) == (0, b"", None)
        assert meta.inode(ino) == published.inode
        assert (published.inode.size_bytes, published.inode.ctime_ns) == (101, T0 + 1)
        meta.publish([publication(2, ino=ino)], T0 + 2)
        assert [blob.digest for blob in meta.doomed(9)] == [digest(1)]
        assert meta.blobs([digest(1)]) == [None]
        assert meta.usage() == Usage(2, 2, 203, (8192,))

    def test_publish_of_what_was_there_before(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        [published] = meta.publish([publication(1, ino=ino, ctime_ns=T0 + 5)], T0 + 9)
        assert published.inode.ctime_ns == T0 + 5
        meta.set_attributes(ino, Changes(mode=0o600), T0 + 20)  # time does not go back
        [published] = meta.publish([publication(2, ino=ino, ctime_ns=T0 + 7)], T0 + 21)
        assert published.inode.ctime_ns == T0 + 20
        [published] = meta.publish([publication(3, ino=ino)], T0 + 30)
        assert published.inode.ctime_ns == T0 + 30
        [published] = meta.publish([publication(4, ino=ino, ctime_ns=2**70)], T0 + 31)
        assert meta.inode(ino) == published.inode  # as far as a record holds it

    def test_publish_replaces_a_name(self, meta: MetaEngine) -> None:
        [old] = meta.publish([publication(1, b"f")], T0)
        [new] = meta.publish([publication(2, b"f")], T0 + 1)
        assert new.replaced is not None
        assert (new.replaced.ino, new.replaced.nlink) == (old.inode.ino, 0)
        assert meta.doomed(9) == []
        meta.forget([old.inode.ino])
        assert [blob.digest for blob in meta.doomed(9)] == [digest(1)]

    def test_publish_is_refused_whole(self, meta: MetaEngine) -> None:
        self.directory(meta, b"d")
        self.file(meta, b"f")
        meta.publish([publication(1, b"kept")], T0)
        before = meta.usage()
        good = publication(2, b"good/x")
        long_key = replace(chunk(b"k"), key=b"k" * 256)
        backward = replace(chunk(b"k"), token_end=0)
        for code, bad in [
            (errno.EISDIR, publication(3, b"d")),
            (errno.EINVAL, publication(3, b"/")),
            (errno.ENOTDIR, publication(3, b"f/x")),
            (errno.EINVAL, publication(3, b"a/../x")),
            (errno.EINVAL, publication(3, b"a/x/")),
            (errno.ENAMETOOLONG, publication(3, b"n" * 256)),
            (errno.ENAMETOOLONG, publication(3, b"a/" * 2048 + b"x")),
            (errno.EISDIR, publication(3, ino=ROOT_INO)),
            (errno.ENOENT, publication(3, ino=999)),
            (errno.EINVAL, publication(3)),
            (errno.EINVAL, publication(3, b"x", digest=b"short")),
            (errno.EINVAL, publication(3, b"x", mode=stat.S_IFDIR | 0o755)),
            (errno.EINVAL, publication(1, b"x", size_bytes=7)),
            (errno.EINVAL, publication(3, b"a/b/x", chunk=long_key)),
            (errno.EINVAL, publication(3, b"a/b/x", chunk=backward)),
        ]:
            refused(code, meta.publish, [good, bad], T0)
            assert meta.resolve([b"good"]) == [None]
            assert meta.usage() == before

    def test_equal_content_is_one_blob(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f"), publication(1, b"g", directory=1)], T0)
        assert meta.blobs([digest(1)]) == [Blob(digest(1), 101, 4096, 0, 2)]
        assert meta.usage() == Usage(3, 1, 101, (4096,))
        meta.forget([meta.unlink(ROOT_INO, b"f", T0).ino])
        assert meta.doomed(9) == []
        meta.forget([meta.unlink(ROOT_INO, b"g", T0).ino])
        assert meta.doomed(9) == [Blob(digest(1), 101, 4096, 0, 0)]
        assert meta.usage() == Usage(1, 1, 101, (4096,))
        meta.bury([digest(1), digest(7)])
        assert (meta.doomed(9), meta.usage()) == ([], Usage(1, 0, 0, (0,)))

    def test_held_paths_resume(self, meta: MetaEngine) -> None:
        names = [b"d/%02d" % n for n in range(7)]
        published = meta.publish([publication(1, name) for name in names], T0)
        ino, parent = published[3].inode.ino, published[3].parent
        for number in range(5):
            meta.link(ino, ROOT_INO if number % 2 else parent, b"link%d" % number, T0)
        meta.publish([publication(2, b"other")], T0)
        meta.unlink(published[5].parent, b"05", T0)  # an orphan: without a path
        seen, after = [], (0, 0, b"")
        while page := meta.held_paths(digest(1), after, 2):
            assert len(page) <= 2
            seen += page
            after = (page[-1].ino, page[-1].parent, page[-1].name)
        assert [(h.ino, h.parent, h.name) for h in seen] == sorted(
            (h.ino, h.parent, h.name) for h in seen
        )
        expected = [*names[:5], names[6]]
        expected += [b"link%d" % n if n % 2 else b"d/link%d" % n for n in range(5)]
        assert sorted(h.path for h in seen) == sorted(expected)
        assert meta.held_paths(digest(9), (0, 0, b""), 5) == []
        assert meta.held_paths(b"short", (0, 0, b""), 5) == []

    def test_hard_links_share_one_reference(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"f")], T0)
        meta.link(published.inode.ino, ROOT_INO, b"g", T0)
        meta.unlink(ROOT_INO, b"f", T0)
        meta.forget([published.inode.ino])
        assert meta.doomed(9) == []
        assert meta.sizes([b"g"]) == [101]

    def test_publishing_what_is_doomed_takes_the_new_place(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"f")], T0)
        meta.unlink(ROOT_INO, b"f", T0)
        meta.forget([published.inode.ino])
        meta.publish([publication(1, b"g", directory=2, allocated_bytes=8192)], T0)
        assert meta.doomed(9) == []
        assert meta.blobs([digest(1)]) == [Blob(digest(1), 101, 8192, 2, 1)]
        assert meta.usage() == Usage(2, 1, 101, (0, 0, 8192))
        meta.bury([digest(1)])
        assert meta.usage() == Usage(2, 1, 101, (0, 0, 8192))

    def test_an_orphan_keeps_its_content_until_it_is_forgotten(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        meta.unlink(ROOT_INO, b"f", T0)
        meta.publish([publication(1, ino=ino, chunk=chunk(b"k"))], T0)
        assert meta.chunk(ino) is None
        assert meta.coldest(9) == []
        assert meta.blobs([digest(1)]) == [Blob(digest(1), 101, 4096, 0, 1)]
        assert meta.held_paths(digest(1), (0, 0, b""), 9) == []
        meta.forget([ino, ino, 999])
        assert [blob.digest for blob in meta.doomed(9)] == [digest(1)]

    def test_doomed_is_bounded(self, meta: MetaEngine) -> None:
        published = meta.publish([publication(n, b"f%d" % n) for n in range(1, 6)], T0)
        inos = [p.inode.ino for p in published]
        meta.unlink_all(inos, T0)
        meta.forget(inos)
        assert len(meta.doomed(3)) == 3
        meta.bury([blob.digest for blob in meta.doomed(3)])
        assert len(meta.doomed(3)) == 2

    def test_lose(self, meta: MetaEngine) -> None:
        [one, two, kept, open_one] = meta.publish(
            [
                publication(1, b"d/1", chunk=chunk(b"k")),
                publication(1, b"2"),
                publication(2, b"3"),
                publication(1, b"4"),
            ],
            T0,
        )
        meta.link(one.inode.ino, ROOT_INO, b"again", T0)
        meta.unlink(ROOT_INO, b"4", T0)
        gone = meta.lose(digest(1), T0 + 1)
        names = {(parent, name, inode.ino, inode.digest) for parent, name, inode in gone}
        assert names == {
            (one.parent, b"1", one.inode.ino, digest(1)),
            (ROOT_INO, b"again", one.inode.ino, digest(1)),
            (ROOT_INO, b"2", two.inode.ino, digest(1)),
        }
        assert meta.blobs([digest(1), digest(2)])[0] is None
        assert (meta.doomed(9), meta.held_paths(digest(1), (0, 0, b""), 9)) == ([], [])
        assert meta.chunk(one.inode.ino) is None
        assert meta.usage().blobs == 1
        meta.forget([one.inode.ino, two.inode.ino, open_one.inode.ino, kept.inode.ino])
        assert meta.usage() == Usage(3, 1, 102, (4096,))
        assert meta.lose(digest(1), T0) == []
        meta.publish([publication(1, b"2")], T0)
        assert meta.sizes([b"2"]) == [101]

    def test_relocate(self, meta: MetaEngine) -> None:
        [one, two, pinned, orphan, other] = meta.publish(
            [publication(1, b"m/h/%d" % n, chunk=chunk(b"k%d" % n)) for n in range(4)]
            + [publication(2, b"other")],
            T0,
        )
        meta.set_pinned(pinned.inode.ino, True)
        meta.unlink(orphan.parent, orphan.name, T0)
        before = [meta.inode(p.inode.ino) for p in (one, two, pinned, orphan, other)]
        meta.intend([(digest(1), 2), (digest(2), 0)])
        meta.relocate(digest(1), 2, 8192)
        assert meta.blobs([digest(1)]) == [Blob(digest(1), 101, 8192, 2, 4)]
        assert meta.usage() == Usage(8, 2, 203, (4096, 0, 8192))
        assert [meta.inode(p.inode.ino) for p in (one, two, pinned, orphan, other)] == before
        assert [c.ino for c in meta.coldest(9, directory=0)] == [other.inode.ino]
        assert [(c.ino, c.directory) for c in meta.coldest(9, directory=2)] == [
            (two.inode.ino, 2),
            (one.inode.ino, 2),
        ]
        assert meta.chunk(one.inode.ino) == chunk(b"k0")
        meta.set_pinned(pinned.inode.ino, False)
        meta.restamp([(one.inode.ino, T0 + 1)])
        assert [c.ino for c in meta.coldest(9, directory=2)][-1] == one.inode.ino
        assert len(meta.coldest(9)) == 4
        assert meta.recover().intended == ()
        inos = [p.inode.ino for p in (one, two, pinned)]
        meta.unlink_all(inos, T0)
        meta.forget([*inos, orphan.inode.ino])
        meta.bury([digest(1)])
        assert meta.usage().allocated_bytes == (4096, 0, 0)

    def test_only_a_blob_in_use_is_relocated(self, meta: MetaEngine) -> None:
        refused(errno.ENOENT, meta.relocate, digest(1), 1, 4096)
        refused(errno.EINVAL, meta.relocate, b"short", 1, 4096)
        [published] = meta.publish([publication(1, b"f")], T0)
        meta.unlink(ROOT_INO, b"f", T0)
        meta.forget([published.inode.ino])
        refused(errno.ENOENT, meta.relocate, digest(1), 1, 4096)
        assert meta.usage() == Usage(1, 1, 101, (4096,))

    def test_losing_a_doomed_blob_frees_it(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"f")], T0)
        meta.unlink(ROOT_INO, b"f", T0)
        meta.forget([published.inode.ino])
        assert meta.lose(digest(1), T0) == []
        assert (meta.doomed(9), meta.usage()) == ([], Usage(1, 0, 0, (0,)))

    # Restart -------------------------------------------------------------------------------------
    def test_everything_survives_a_restart(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        [published] = meta.publish([publication(1, b"m/h/f", chunk=chunk(b"k"))], T0)
        ino = published.inode.ino
        pinned = meta.set_pinned(ino, True)
        usage = meta.usage()
        meta.sync()
        meta = reopen()
        assert meta.recover().dropped_inodes == 0
        assert (meta.inode(ino), meta.usage()) == (pinned, usage)
        assert meta.chunk(ino) == chunk(b"k")
        assert meta.make(ROOT_INO, b"new", FILE, 0, 0, T0).ino > ino

    def test_recover(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        unpublished = self.file(meta, b"unpublished")
        meta.link(unpublished, self.directory(meta, b"d"), b"too", T0)
        [orphan, kept] = meta.publish([publication(1, b"orphan"), publication(2, b"kept")], T0)
        meta.unlink(ROOT_INO, b"orphan", T0)
        link = meta.make(ROOT_INO, b"l", stat.S_IFLNK | 0o777, 0, 0, T0, target=b"x")
        meta.intend([(digest(2), 0), (digest(2), 1), (digest(3), 1)])
        meta = reopen()
        found = meta.recover()
        assert found.dropped_inodes == 2
        assert sorted(found.intended) == [(digest(2), 1), (digest(3), 1)]
        assert found.open_blobs == ((digest(2), 0),)
        assert [blob.digest for blob in found.doomed] == [digest(1)]
        assert [e.name for e in meta.entries(ROOT_INO, b"", 9)] == [b"d", b"kept", b"l"]
        assert (meta.inode(unpublished), meta.inode(orphan.inode.ino)) == (None, None)
        assert (meta.inode(link.ino), meta.inode(kept.inode.ino)) == (link, kept.inode)
        assert replace(meta.recover(), dropped_inodes=2) == found
        meta.bury([digest(1), digest(2), digest(3)])
        assert meta.recover() == type(found)((), (), (), 0)
        assert meta.usage() == Usage(4, 1, 102, (4096,))

    def test_publish_clears_intents(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        meta.intend([(digest(1), 0), (digest(2), 0)])
        meta.publish([publication(1, b"f")], T0)
        assert reopen().recover().intended == ((digest(2), 0),)

    def test_an_open_blob_stays_on_record(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        opened = [publication(n, b"f%d" % n, is_open=True, directory=n % 2) for n in (1, 2, 3)]
        meta.publish([*opened, publication(4, b"g")], T0)
        meta.publish([publication(2, b"h")], T0)  # a file of its own, which nobody writes to
        meta = reopen()
        assert sorted(meta.recover().open_blobs) == [(digest(1), 1), (digest(3), 1)]
        meta.bury([digest(1)])
        assert meta.recover().open_blobs == ((digest(3), 1),)
        meta.unlink(ROOT_INO, b"f3", T0)
        assert meta.recover().open_blobs == ()
        assert meta.sizes([b"f1", b"f2", b"f3"]) == [101, 102, None]

    def test_burying_a_doomed_blob_keeps_the_intent_of_its_next_copy(
        self, reopen: Callable[[], MetaEngine]
    ) -> None:
        meta = reopen()
        [published] = meta.publish([publication(1, b"f")], T0)
        meta.unlink(ROOT_INO, b"f", T0)
        meta.forget([published.inode.ino])
        meta.intend([(digest(1), 0)])
        meta.bury([digest(1)])
        assert reopen().recover().intended == ((digest(1), 0),)
