"""The embedded engine against the contract, and what only it promises."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Never

import lmdb
import pytest

from kvfs.errors import Corrupt, InvalidInput, NamespaceError, OutOfSpace, Unavailable
from kvfs.meta.contract import ROOT_INO, MetaEngine
from kvfs.meta.lmdb import LmdbEngine
from tests.contract.meta_suite import MetaSuite
from tests.contract.meta_tiers import MetaTiersSuite
from tests.contract.meta_words import FILE, T0, publication
from tests.disks import small_disk


class TestLmdb(MetaSuite, MetaTiersSuite):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Iterator[Callable[[], MetaEngine]]:
        opened: list[LmdbEngine] = []

        def open_again() -> MetaEngine:
            for engine in opened:
                engine.close()
            opened[:] = [LmdbEngine.open(tmp_path / "meta", now_ns=T0)]
            return opened[0]

        yield open_again
        for engine in opened:
            engine.close()


def test_the_root_belongs_to_whom_it_is_told(tmp_path: Path) -> None:
    engine = LmdbEngine.open(tmp_path, root_uid=3, root_gid=4, now_ns=T0)
    root = engine.inode(ROOT_INO)
    engine.close()
    assert root is not None
    assert (root.uid, root.gid, root.ctime_ns) == (3, 4, T0)


def test_another_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    LmdbEngine.open(tmp_path).close()
    with lmdb.open(str(tmp_path), max_dbs=20) as env, env.begin(write=True) as txn:
        table = env.open_db(b"state", txn=txn)
        txn.put(b"version", (77).to_bytes(4, "little"), db=table)
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(InvalidInput, match=r"layout 77, this kvfs knows 1; .*rebuild"):
        LmdbEngine.open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(Corrupt, match="no metadata database"):
        LmdbEngine.open(tmp_path)


def test_a_full_database_is_out_of_space_and_stays_whole(tmp_path: Path) -> None:
    engine = LmdbEngine.open(tmp_path, map_bytes=1024 * 1024)
    count = 0
    with pytest.raises(OutOfSpace):
        for count in range(100_000):
            engine.publish([publication(count, b"d/%d" % count)], T0)
    assert engine.usage().blobs == count
    assert engine.sizes([b"d/%d" % count, b"d/0"]) == [None, 100]
    assert engine.inode(ROOT_INO) is not None
    engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_out_of_space_and_changes_nothing(disk: Path) -> None:
    engine = LmdbEngine.open(disk)
    count = 0
    with pytest.raises(OutOfSpace, match="the disk has no room for metadata"):
        for count in range(100_000):
            engine.publish([publication(count, b"d/%d" % count)], T0)
    assert engine.usage().blobs == count
    assert engine.sizes([b"d/%d" % count, b"d/0"]) == [None, 100]
    engine.close()
    (disk / "new").mkdir()
    with pytest.raises(OutOfSpace, match="the disk has no room for metadata"):
        LmdbEngine.open(disk / "new")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as path:
        yield path


class _BadDisk:
    """Stands in for an environment whose disk fails."""

    def begin(self, *args: object, **options: object) -> Never:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    sync = begin


def test_a_failing_disk_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LmdbEngine.open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_env", _BadDisk())
        for call in (lambda: engine.publish([publication(1, b"f")], T0), engine.sync):
            with pytest.raises(Unavailable, match="Input/output error"):
                call()
    assert engine.sizes([b"f"]) == [None]
    engine.close()


def test_an_abandoned_change_leaves_no_trace_in_memory(tmp_path: Path) -> None:
    engine = LmdbEngine.open(tmp_path)
    root = engine.inode(ROOT_INO)
    with pytest.raises(NamespaceError):
        engine.publish([publication(1, b"a/f"), publication(2, b"a")], T0)
    assert engine.inode(ROOT_INO) == root
    assert engine.resolve([b"a", b"a/f"]) == [None, None]
    assert engine.make(ROOT_INO, b"a", FILE, 0, 0, T0).nlink == 1
    engine.close()
