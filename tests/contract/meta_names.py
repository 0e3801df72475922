"""What every metadata engine must do with names: directories, links, renames, attributes."""

import errno
import os
import stat
from dataclasses import replace

import pytest

from kvfs.meta.contract import ROOT_INO, Changes, Inode, MetaEngine, RenameMode, Usage
from kvfs.names import ChunkKeys, chunk_key, chunk_path
from tests.contract.meta_words import DIRECTORY, FILE, T0, OfEngine, digest, publication, refused


class MetaNamesSuite(OfEngine):
    def test_new_store_is_an_empty_root(self, meta: MetaEngine) -> None:
        root = meta.inode(ROOT_INO)
        assert root is not None
        assert (root.is_directory, root.nlink) == (True, 2)
        assert meta.entries(ROOT_INO, b"", 10) == []
        assert meta.parent_of(ROOT_INO) == ROOT_INO
        assert meta.paths_of(ROOT_INO) == [b""]
        assert meta.usage() == Usage(1, 0, 0, ())

    def test_a_directory_may_take_the_name_of_a_file_that_was_looked_below(
        self, meta: MetaEngine
    ) -> None:
        self.file(meta, b"f")
        assert meta.resolve([b"f/x"]) == [None]
        assert meta.sizes([b"f/x"]) == [None]
        meta.unlink(ROOT_INO, b"f", T0)
        inner = self.file(meta, b"x", self.directory(meta, b"f"))
        found = meta.resolve([b"f/x"])[0]
        assert found is not None and found.ino == inner

    def test_make_keeps_what_it_is_told(self, meta: MetaEngine) -> None:
        made = meta.make(ROOT_INO, b"f", stat.S_IFREG | 0o640, 7, 8, T0 + 5)
        assert made == Inode(made.ino, stat.S_IFREG | 0o640, 7, 8, 1, 0, T0 + 5, T0 + 5, T0 + 5)
        assert meta.inode(made.ino) == meta.lookup(ROOT_INO, b"f") == made
        link = meta.make(ROOT_INO, b"l", stat.S_IFLNK | 0o777, 0, 0, T0, target=b"to/there")
        assert (link.target, link.size_bytes) == (b"to/there", 8)
        assert meta.inode(link.ino) == link
        device = meta.make(ROOT_INO, b"d", stat.S_IFCHR | 0o600, 0, 0, T0, rdev=os.makedev(1, 3))
        assert meta.inode(device.ino) == device
        assert device.rdev == os.makedev(1, 3)

    def test_make_changes_the_parent(self, meta: MetaEngine) -> None:
        self.file(meta, b"f")
        meta.make(ROOT_INO, b"d", DIRECTORY, 0, 0, T0 + 9)
        root = meta.inode(ROOT_INO)
        assert root is not None
        assert (root.nlink, root.mtime_ns, root.ctime_ns) == (3, T0 + 9, T0 + 9)

    def test_make_is_refused(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        before = meta.usage()
        make = meta.make
        refused(errno.EEXIST, make, ROOT_INO, b"f", FILE, 0, 0, T0)
        refused(errno.ENOTDIR, make, ino, b"g", FILE, 0, 0, T0)
        refused(errno.ENOENT, make, 999, b"g", FILE, 0, 0, T0)
        refused(errno.ENAMETOOLONG, make, ROOT_INO, b"n" * 256, FILE, 0, 0, T0)
        for name in (b"", b".", b"..", b"a/b", b"a\0b"):
            refused(errno.EINVAL, make, ROOT_INO, name, FILE, 0, 0, T0)
        assert meta.usage() == before
        assert [e.name for e in meta.entries(ROOT_INO, b"", 10)] == [b"f"]

    def test_longest_name(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"n" * 255)
        assert meta.paths_of(ino) == [b"n" * 255]

    def test_setgid_directory_gives_its_group(self, meta: MetaEngine) -> None:
        shared = meta.make(ROOT_INO, b"s", DIRECTORY | stat.S_ISGID, 1, 50, T0)
        file = meta.make(shared.ino, b"f", FILE, 2, 60, T0)
        below = meta.make(shared.ino, b"d", DIRECTORY, 2, 60, T0)
        assert (file.gid, bool(file.mode & stat.S_ISGID)) == (50, False)
        assert (below.gid, bool(below.mode & stat.S_ISGID)) == (50, True)
        [published] = meta.publish([publication(1, b"s/p", gid=60)], T0)
        assert published.inode.gid == 50

    def test_make_directories(self, meta: MetaEngine) -> None:
        made = meta.make_directories(b"/a/b//c/", 0o700, 5, 6, T0)
        assert meta.paths_of(made.ino) == [b"a/b/c"]
        assert made == meta.make_directories(b"a/b/c", 0o755, 0, 0, T0 + 1) == meta.inode(made.ino)
        assert meta.make_directories(b"", 0o755, 0, 0, T0).ino == ROOT_INO
        self.file(meta, b"f", made.ino)
        refused(errno.ENOTDIR, meta.make_directories, b"a/b/c/f/g", 0o755, 0, 0, T0)
        refused(errno.EINVAL, meta.make_directories, b"new/../x", 0o755, 0, 0, T0)
        refused(errno.ENAMETOOLONG, meta.make_directories, b"a/" * 2049, 0o755, 0, 0, T0)
        assert meta.lookup(ROOT_INO, b"new") is None

    def test_lookup(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        assert meta.lookup(ROOT_INO, b"g") is None
        refused(errno.ENOTDIR, meta.lookup, ino, b"x")
        refused(errno.ENOENT, meta.lookup, 999, b"x")
        refused(errno.ENAMETOOLONG, meta.lookup, ROOT_INO, b"n" * 256)
        assert meta.inode(999) is None

    def test_resolve(self, meta: MetaEngine) -> None:
        deep = meta.make_directories(b"a/b", 0o755, 0, 0, T0)
        file = self.file(meta, b"f", deep.ino)
        paths = [b"", b"/", b"a", b"/a/b/", b"a/b/f", b"/a//b/f", b"a/b/g", b"x/y", b"a/b/f/z"]
        paths += [b"n" * 300, b"n" * 3000 + b"/f", b"a/./b", b"a/..", b"a/" * 5000]
        found = [None if inode is None else inode.ino for inode in meta.resolve(paths)]
        above = meta.lookup(ROOT_INO, b"a")
        assert above is not None
        places = [ROOT_INO, ROOT_INO, above.ino, deep.ino, file, file]
        assert found == places + [None] * 8

    def test_resolve_follows_what_moves(self, meta: MetaEngine) -> None:
        deep = meta.make_directories(b"a/b", 0o755, 0, 0, T0)
        file = self.file(meta, b"f", deep.ino)
        assert [i and i.ino for i in meta.resolve([b"a/b/f", b"c/b/f"])] == [file, None]
        meta.rename(ROOT_INO, b"a", ROOT_INO, b"c", T0)
        assert [i and i.ino for i in meta.resolve([b"a/b/f", b"c/b/f"])] == [None, file]
        other = meta.make_directories(b"a/b", 0o755, 0, 0, T0)
        assert meta.resolve([b"a/b", b"a/b/f"]) == [other, None]
        meta.rename(ROOT_INO, b"a", ROOT_INO, b"c", T0, RenameMode.EXCHANGE)
        assert [i and i.ino for i in meta.resolve([b"a/b/f", b"c/b"])] == [file, other.ino]
        above = meta.parent_of(other.ino)
        meta.rmdir(above, b"b", T0)
        assert meta.resolve([b"c/b", b"c/b/f"]) == [None, None]
        assert meta.make_directories(b"c/b", 0o755, 0, 0, T0).ino != other.ino

    def test_sizes_are_of_published_files_only(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"d/f"), publication(2, b"d/g", size_bytes=0)], T0)
        self.file(meta, b"unpublished")
        meta.make(ROOT_INO, b"l", stat.S_IFLNK | 0o777, 0, 0, T0, target=b"d/f")
        paths = [b"d/f", b"/d/g", b"d", b"unpublished", b"l", b"x", b"x/y", b"", b"d/f/z"]
        assert meta.sizes(paths) == [101, 0, *[None] * 7]
        assert meta.sizes([]) == []

    def test_sizes_follow_content_and_names(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        meta.link(ino, ROOT_INO, b"g", T0)
        meta.publish([publication(1, ino=ino)], T0)
        assert meta.sizes([b"f", b"g"]) == [101, 101]
        meta.publish([publication(2, ino=ino)], T0)
        meta.rename(ROOT_INO, b"g", ROOT_INO, b"h", T0)
        assert meta.sizes([b"f", b"g", b"h"]) == [102, None, 102]
        meta.lose(digest(2), T0)
        assert meta.sizes([b"f", b"h"]) == [None, None]

    def test_a_run_of_slashes_is_one_however_long(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"a/b/f")], T0)
        for run in (b"//", b"/" * 1_000_000):
            paths = [run + b"a" + run + b"b" + run + b"f" + run, b"a" + run + b"c" + run + b"f"]
            assert meta.sizes(paths) == [101, None]
            assert [inode is not None for inode in meta.resolve(paths)] == [True, False]
            assert meta.resolve([run])[0] == meta.inode(ROOT_INO)

    @pytest.mark.parametrize("is_indexed", [False, True])
    def test_chunk_sizes_are_those_of_their_paths(self, meta: MetaEngine, is_indexed: bool) -> None:
        while is_indexed and meta.index_more():
            pass
        hashes = [bytes([n]) * 2 for n in (1, 2, 17)]
        keys = ChunkKeys(b"".join(hashes), 2, ((0, 0), (1, 10)))
        paths = [
            chunk_path(b"kv/m@f", chunk_key(block_hash, *part))
            for block_hash in hashes
            for part in keys.parts
        ]
        meta.publish([publication(n, path) for n, path in enumerate(paths) if n not in (1, 4)], T0)
        assert meta.chunk_sizes(b"kv/m@f", keys) == [100, None, 102, 103, None, 105]
        assert meta.chunk_sizes(b"/kv/m@f/", keys) == [100, None, 102, 103, None, 105]
        assert meta.chunk_sizes(b"kv/other@f", keys) == [None] * 6
        assert meta.chunk_sizes(b"", keys) == [None] * 6
        assert meta.chunk_sizes(b"kv/m@f", ChunkKeys(b"", 2, keys.parts)) == []
        assert meta.chunk_sizes(b"kv/m@f", ChunkKeys(b"ab", 2, ())) == []

    def test_thousands_of_chunks_are_indexed_while_they_change(self, meta: MetaEngine) -> None:
        hashes = [n.to_bytes(2, "big") * 16 for n in range(3000)]
        paths = [chunk_path(b"kv/m@f", chunk_key(block_hash, 0, 0)) for block_hash in hashes]
        keys = ChunkKeys(b"".join(hashes), 32, ((0, 0),))
        meta.publish([publication(n % 200, path) for n, path in enumerate(paths[:2000])], T0)
        meta.index_more()
        meta.publish([publication(n % 200, path) for n, path in enumerate(paths[2000:])], T0)
        for n in range(0, 3000, 3):
            directory = meta.resolve([paths[n].rpartition(b"/")[0]])[0]
            assert directory is not None
            meta.unlink(directory.ino, paths[n].rpartition(b"/")[2], T0)
        sizes = [None if n % 3 == 0 else 100 + n % 200 for n in range(3000)]
        assert meta.chunk_sizes(b"kv/m@f", keys) == sizes
        while meta.index_more():
            pass
        assert meta.chunk_sizes(b"kv/m@f", keys) == sizes
        kv = meta.resolve([b"kv"])[0]
        assert kv is not None
        meta.rename(kv.ino, b"m@f", kv.ino, b"m@g", T0)
        assert meta.chunk_sizes(b"kv/m@f", keys) == [None] * 3000
        assert meta.chunk_sizes(b"kv/m@g", keys) == sizes

    def test_entries_resume(self, meta: MetaEngine) -> None:
        names = [b"%02d" % n for n in range(20)]
        for name in names:
            self.file(meta, name)
        self.directory(meta, b"03.d")
        self.file(meta, b"elsewhere", self.directory(meta, b"zz"))
        seen, after = [], b""
        while page := meta.entries(ROOT_INO, after, 6):
            seen += [entry.name for entry in page]
            after = seen[-1]
            if after == b"04":
                meta.unlink(ROOT_INO, b"04", T0)
                meta.unlink(ROOT_INO, b"07", T0)
        assert seen == sorted({*names, b"03.d", b"zz"} - {b"07"})
        refused(errno.ENOENT, meta.entries, 999, b"", 1)
        refused(errno.ENOTDIR, meta.entries, self.file(meta, b"f"), b"", 1)

    # Links ---------------------------------------------------------------------------------------
    def test_link_and_unlink(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        below = self.directory(meta, b"d")
        assert meta.link(ino, below, b"g", T0 + 1).nlink == 2
        assert sorted(meta.paths_of(ino)) == [b"d/g", b"f"]
        assert sorted(meta.names_of(ino)) == sorted([(ROOT_INO, b"f"), (below, b"g")])
        after = meta.unlink(ROOT_INO, b"f", T0 + 2)
        assert (after.nlink, after.ctime_ns) == (1, T0 + 2)
        assert meta.unlink(below, b"g", T0 + 3).nlink == 0
        orphan = meta.inode(ino)
        assert orphan is not None
        assert (orphan.nlink, meta.paths_of(ino), meta.names_of(ino)) == (0, [], [])
        refused(errno.ENOENT, meta.link, ino, ROOT_INO, b"h", T0)
        meta.forget([ino])
        assert meta.inode(ino) is None

    def test_link_is_refused(self, meta: MetaEngine) -> None:
        ino, below = self.file(meta, b"f"), self.directory(meta, b"d")
        refused(errno.EEXIST, meta.link, ino, ROOT_INO, b"d", T0)
        refused(errno.EPERM, meta.link, below, ROOT_INO, b"e", T0)
        refused(errno.ENOENT, meta.link, 999, ROOT_INO, b"e", T0)
        refused(errno.ENOENT, meta.link, ino, 999, b"e", T0)
        refused(errno.ENOTDIR, meta.link, ino, ino, b"e", T0)

    def test_unlink_and_rmdir_are_refused(self, meta: MetaEngine) -> None:
        ino, below = self.file(meta, b"f"), self.directory(meta, b"d")
        refused(errno.EISDIR, meta.unlink, ROOT_INO, b"d", T0)
        refused(errno.ENOENT, meta.unlink, ROOT_INO, b"x", T0)
        refused(errno.ENOTDIR, meta.unlink, ino, b"x", T0)
        refused(errno.ENOTDIR, meta.rmdir, ROOT_INO, b"f", T0)
        refused(errno.EINVAL, meta.rmdir, ROOT_INO, b".", T0)
        self.file(meta, b"g", below)
        refused(errno.ENOTEMPTY, meta.rmdir, ROOT_INO, b"d", T0)

    def test_rmdir(self, meta: MetaEngine) -> None:
        below = self.directory(meta, b"d")
        assert meta.rmdir(ROOT_INO, b"d", T0 + 1).nlink == 0
        root = meta.inode(ROOT_INO)
        assert root is not None
        assert (root.nlink, root.mtime_ns) == (2, T0 + 1)
        assert meta.inode(below) is None
        refused(errno.ENOENT, meta.make, below, b"x", FILE, 0, 0, T0)
        refused(errno.ENOENT, meta.parent_of, below)

    def test_unlink_all(self, meta: MetaEngine) -> None:
        [first, second] = meta.publish([publication(1, b"d/a"), publication(2, b"b")], T0)
        meta.link(first.inode.ino, ROOT_INO, b"c", T0)
        below = first.parent
        gone = meta.unlink_all([first.inode.ino, second.inode.ino, below, 999], T0 + 1)
        names = {(parent, name) for parent, name, _ in gone}
        assert names == {(below, b"a"), (ROOT_INO, b"c"), (ROOT_INO, b"b")}
        assert all(inode.nlink == 0 for _, _, inode in gone)
        assert [e.name for e in meta.entries(ROOT_INO, b"", 9)] == [b"d"]
        parent = meta.inode(below)
        assert parent is not None
        assert parent.mtime_ns == T0 + 1

    # Rename --------------------------------------------------------------------------------------
    def test_rename_moves(self, meta: MetaEngine) -> None:
        ino, below = self.file(meta, b"f"), self.directory(meta, b"d")
        renamed = meta.rename(ROOT_INO, b"f", below, b"g", T0 + 1)
        assert (renamed.moved.ino, renamed.moved.ctime_ns, renamed.replaced) == (ino, T0 + 1, None)
        assert meta.paths_of(ino) == [b"d/g"]
        for parent in (ROOT_INO, below):
            inode = meta.inode(parent)
            assert inode is not None
            assert inode.mtime_ns == T0 + 1

    def test_rename_replaces(self, meta: MetaEngine) -> None:
        ino, old = self.file(meta, b"f"), self.file(meta, b"g")
        renamed = meta.rename(ROOT_INO, b"f", ROOT_INO, b"g", T0)
        assert renamed.replaced is not None
        assert (renamed.replaced.ino, renamed.replaced.nlink) == (old, 0)
        assert meta.lookup(ROOT_INO, b"g") == meta.inode(ino)
        assert meta.lookup(ROOT_INO, b"f") is None
        assert meta.inode(old) is not None
        meta.forget([old, ino])
        assert (meta.inode(old), meta.inode(ino)) == (None, renamed.moved)

    def test_rename_counts_subdirectories(self, meta: MetaEngine) -> None:
        one, two = self.directory(meta, b"1"), self.directory(meta, b"2")
        below = self.directory(meta, b"d", one)
        self.directory(meta, b"d", two)

        def links() -> list[int]:
            found = [meta.inode(ino) for ino in (ROOT_INO, one, two)]
            return [inode.nlink for inode in found if inode is not None]

        assert links() == [4, 3, 3]
        renamed = meta.rename(one, b"d", two, b"d", T0)
        assert renamed.replaced is not None
        assert (renamed.replaced.nlink, meta.inode(renamed.replaced.ino)) == (0, None)
        assert links() == [4, 2, 3]
        assert meta.parent_of(below) == two
        self.file(meta, b"f", one)
        meta.rename(two, b"d", one, b"f", T0, RenameMode.EXCHANGE)
        assert links() == [4, 3, 2]
        meta.rename(one, b"f", ROOT_INO, b"up", T0)
        assert links() == [5, 2, 2]
        assert meta.parent_of(below) == ROOT_INO

    def test_rename_is_refused(self, meta: MetaEngine) -> None:
        self.file(meta, b"f")
        outer = self.directory(meta, b"d")
        inner = self.directory(meta, b"e", outer)
        self.directory(meta, b"empty")
        exchange, keep = RenameMode.EXCHANGE, RenameMode.NO_REPLACE
        rename = meta.rename
        refused(errno.EINVAL, rename, ROOT_INO, b"d", inner, b"x", T0)
        refused(errno.EINVAL, rename, ROOT_INO, b"d", outer, b"x", T0)
        refused(errno.ENOTEMPTY, rename, outer, b"e", ROOT_INO, b"d", T0)
        refused(errno.EINVAL, rename, outer, b"e", ROOT_INO, b"d", T0, exchange)
        refused(errno.ENOTEMPTY, rename, ROOT_INO, b"empty", ROOT_INO, b"d", T0)
        refused(errno.EISDIR, rename, ROOT_INO, b"f", ROOT_INO, b"empty", T0)
        refused(errno.ENOTDIR, rename, ROOT_INO, b"d", ROOT_INO, b"f", T0)
        refused(errno.ENOENT, rename, ROOT_INO, b"x", ROOT_INO, b"y", T0)
        refused(errno.ENOENT, rename, ROOT_INO, b"f", ROOT_INO, b"y", T0, exchange)
        refused(errno.EEXIST, rename, ROOT_INO, b"f", ROOT_INO, b"d", T0, keep)
        refused(errno.EEXIST, rename, ROOT_INO, b"f", ROOT_INO, b"f", T0, keep)
        refused(errno.EINVAL, rename, ROOT_INO, b"f", ROOT_INO, b"..", T0)
        refused(errno.ENAMETOOLONG, rename, ROOT_INO, b"f", ROOT_INO, b"n" * 256, T0)
        assert [e.name for e in meta.entries(ROOT_INO, b"", 9)] == [b"d", b"empty", b"f"]

    def test_rename_over_another_name_of_the_same_file_does_nothing(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        linked = meta.link(ino, ROOT_INO, b"g", T0)
        for new_name in (b"f", b"g"):
            renamed = meta.rename(ROOT_INO, b"f", ROOT_INO, new_name, T0 + 5)
            assert (renamed.moved, renamed.replaced) == (linked, None)
        assert sorted(meta.paths_of(ino)) == [b"f", b"g"]

    def test_rename_exchanges(self, meta: MetaEngine) -> None:
        file, below = self.file(meta, b"f"), self.directory(meta, b"d")
        inner = self.file(meta, b"inner", below)
        renamed = meta.rename(ROOT_INO, b"f", ROOT_INO, b"d", T0, RenameMode.EXCHANGE)
        assert renamed.replaced is not None
        assert (renamed.moved.ino, renamed.replaced.ino) == (file, below)
        assert (renamed.replaced.nlink, meta.paths_of(inner)) == (2, [b"f/inner"])

    # Attributes ----------------------------------------------------------------------------------
    def test_set_attributes(self, meta: MetaEngine) -> None:
        ino = self.file(meta, b"f")
        changes = Changes(0o4711, 3, 4, 55, T0 - 1, -T0)
        changed = meta.set_attributes(ino, changes, T0 + 1)
        mode = stat.S_IFREG | 0o4711
        assert changed == Inode(ino, mode, 3, 4, 1, 55, T0 - 1, -T0, T0 + 1) == meta.inode(ino)
        assert meta.set_attributes(ino, Changes(), T0 + 2) == changed
        assert meta.set_attributes(ino, Changes(uid=0), T0 + 3) == replace(
            changed, uid=0, ctime_ns=T0 + 3
        )
        far = meta.set_attributes(ino, Changes(mtime_ns=2**80, atime_ns=-(2**80)), T0)
        assert far.mtime_ns == -far.atime_ns == 2**63 - 1

    def test_set_attributes_is_refused(self, meta: MetaEngine) -> None:
        [published] = meta.publish([publication(1, b"f")], T0)
        refused(errno.EINVAL, meta.set_attributes, published.inode.ino, Changes(size_bytes=1), T0)
        refused(errno.EISDIR, meta.set_attributes, ROOT_INO, Changes(size_bytes=1), T0)
        refused(errno.ENOENT, meta.set_attributes, 999, Changes(), T0)
