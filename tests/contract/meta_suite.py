"""What every metadata engine must do: subclass `MetaSuite`, give it `reopen`, and run it."""

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvfs.errors import NamespaceError
from kvfs.meta.contract import (
    ROOT_INO,
    Blob,
    Changes,
    ChunkInfo,
    Inode,
    MetaEngine,
    Publication,
    RenameMode,
    Usage,
)
from kvfs.names import ChunkKeys, chunk_key, chunk_path

DIRECTORY = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644
T0 = 1_000_000_000_000_000_000


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def publication(number: int, path: bytes = b"", **fields: object) -> Publication:
    base = Publication(digest(number), 100 + number, 4096, 0, T0, path=path)
    return replace(base, **fields)  # type: ignore[arg-type]  # a test's own words


def chunk(key: bytes, parent: bytes = b"", start: int = 0) -> ChunkInfo:
    return ChunkInfo(key, parent, start, start + 256, 0, 0, b"\1" * 8)


def refused(code: int, call: Callable[..., object], *arguments: object) -> None:
    """The call must fail with this errno."""
    with pytest.raises(NamespaceError) as caught:
        call(*arguments)
    assert errno.errorcode[caught.value.code] == errno.errorcode[code]


class MetaSuite:
    """Subclasses give `reopen`: a function that closes the engine and opens it again, as a restart
    does, and that opens a new one at first."""

    @pytest.fixture
    def reopen(self) -> Callable[[], MetaEngine]:
        raise NotImplementedError

    @pytest.fixture
    def meta(self, reopen: Callable[[], MetaEngine]) -> MetaEngine:
        return reopen()

    def directory(self, meta: MetaEngine, name: bytes, parent: int = ROOT_INO) -> int:
        return meta.make(parent, name, DIRECTORY, 0, 0, T0).ino

    def file(self, meta: MetaEngine, name: bytes, parent: int = ROOT_INO) -> int:
        return meta.make(parent, name, FILE, 0, 0, T0).ino

    # Names ---------------------------------------------------------------------------------------
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

    # Content -------------------------------------------------------------------------------------
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

    # Chunks --------------------------------------------------------------------------------------
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
