"""What a start makes of files that were closed when their node died (`kvfs.kept`): each way in
which the disk and the metadata may have gone on since."""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from kvfs.blobs import BlobDirectory
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, OutOfSpace, Unavailable
from kvfs.kept import Kept, keep, publish_kept, shown_digest
from kvfs.life import recover, running
from kvfs.meta.contract import ROOT_INO, Inode, Publication
from kvfs.meta.lmdb import LmdbEngine
from kvfs.node import Node
from kvfs.settings.words import (
    TIER_LIMITS,
    ClusterConfig,
    Config,
    DirectoryConfig,
    TierConfig,
    TierKind,
)
from tests.own_node import load, store

DATA = b"closed" * (MIB // 2)
LATER_NS = 1_500_000_000_123_456_789
DEADLINE_S = 20.0
LOST = "a file that was closed before a crash is lost: "


class Store:
    """A store of two directories whose node may die. `node` is the one that lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start()

    def start(self, *, is_second_there: bool = True) -> None:
        configs = DirectoryConfig(self._path / "one"), DirectoryConfig(self._path / "two")
        self.directories = [BlobDirectory.open(config) for config in configs]
        self._engine = LmdbEngine.open(self._path / "one" / "meta")
        seen = [self.directories[0], self.directories[1] if is_second_there else None]
        self.node = Node(Config(configs), seen, self._engine)

    def die(self) -> None:
        self._engine.close()
        for directory in self.directories:
            directory.close()

    async def restart(self, *, is_second_there: bool = True) -> int:
        """Die and start again, as far as files are concerned; how many were published."""
        self.die()
        self.start(is_second_there=is_second_there)
        published = await publish_kept(self.node)
        recover(self.node)
        return len(published)

    def inode(self, name: bytes) -> Inode | None:
        return self.node.meta.resolve([name])[0]

    def load(self, name: bytes) -> bytes | None:
        return load(self.node, name)

    def staged(self) -> list[str]:
        return [name for d in self.directories for name in os.listdir(d.path / "staging")]

    def close_file(self, name: bytes, data: bytes = DATA, index: int = 0) -> tuple[Kept, int]:
        """A file, new or emptied, that a mount has closed and not published; its descriptor, which
        a dead node would not have."""
        node, directory = self.node, self.directories[index]
        inode = self.inode(name) or node.meta.make(
            ROOT_INO, name, stat.S_IFREG | 0o600, 0, 0, node.now_ns()
        )
        staged = directory.stage()
        os.write(staged.fd, data)
        changed_ns = os.fstat(staged.fd).st_mtime_ns
        replaces = shown_digest(inode)
        fields = staged.name, inode.ino, len(data), changed_ns, LATER_NS, replaces
        kept = Kept(*fields, node.meta.identity)
        assert keep(directory, kept)
        return kept, staged.fd


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.die()


async def test_it_is_published_with_its_time(dying: Store) -> None:
    for index, name in enumerate((b"a", b"b")):
        _, fd = dying.close_file(name, DATA[index:], index)
        os.close(fd)
    assert await dying.restart() == 2
    assert (dying.load(b"a"), dying.load(b"b")) == (DATA, DATA[1:])
    inode = dying.inode(b"a")
    assert inode is not None and inode.mtime_ns == LATER_NS
    assert dying.staged() == []
    assert await dying.restart() == 0


async def test_what_was_removed_stays_removed(dying: Store) -> None:
    _, fd = dying.close_file(b"a")
    os.close(fd)
    dying.node.unlink(ROOT_INO, b"a")
    assert await dying.restart() == 0
    assert dying.inode(b"a") is None
    assert dying.staged() == []


@pytest.mark.parametrize("index", [0, 1])
async def test_inodes_of_other_metadata_get_nothing(dying: Store, index: int) -> None:
    """The second directory was missing when the metadata was made anew, and its names stay."""
    _, fd = dying.close_file(b"a", index=index)
    os.close(fd)
    dying.die()
    os.unlink(dying.directories[0].path / "meta" / "data.mdb")
    dying.start(is_second_there=False)
    other = dying.node.meta.make(ROOT_INO, b"other", stat.S_IFREG | 0o600, 0, 0, 0)
    assert await dying.restart() == 0
    assert (other.ino, dying.load(b"other")) == (2, None)
    assert dying.staged() == []


async def test_a_full_disk_loses_nothing(dying: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _, fd = dying.close_file(b"a")
    os.close(fd)
    with monkeypatch.context() as full:
        full.setattr(os, "mkdir", refuse)
        with pytest.raises(OutOfSpace, match="free some room, then start again"):
            await dying.restart()
    assert await dying.restart() == 1
    assert dying.load(b"a") == DATA


async def test_what_is_published_already_stays_as_it_is(dying: Store) -> None:
    kept, fd = dying.close_file(b"a")
    os.close(fd)
    os.unlink(dying.directories[0].stage_path(kept.stage))
    name = dying.directories[0].link_stage(kept.name)
    dying.directories[0].adopt(name, digest_of(DATA))
    publication = Publication(digest_of(DATA), len(DATA), len(DATA), 0, 1, ino=kept.ino)
    dying.node.meta.publish([publication], dying.node.now_ns())
    before = dying.inode(b"a")
    assert await dying.restart() == 0
    assert dying.inode(b"a") == before
    assert dying.load(b"a") == DATA
    assert dying.staged() == []


async def test_a_death_between_its_place_and_its_name(dying: Store) -> None:
    kept, fd = dying.close_file(b"a")
    os.close(fd)
    dying.node.meta.intend([(digest_of(DATA), 0)])
    dying.directories[0].make_leaves([digest_of(DATA)])
    dying.directories[0].adopt(kept.stage, digest_of(DATA))
    assert await dying.restart() == 1
    assert dying.load(b"a") == DATA
    assert dying.staged() == []
    assert os.stat(dying.directories[0].blob_path(digest_of(DATA))).st_nlink == 1


async def test_what_was_written_to_after_its_close_is_a_miss(
    dying: Store, allow_warnings: list[str]
) -> None:
    allow_warnings.append(f"{LOST}.*was written to after its close")
    _, fd = dying.close_file(b"a")
    os.write(fd, b"more")
    os.close(fd)
    assert await dying.restart() == 0
    assert dying.inode(b"a") is None
    assert dying.staged() == []


async def test_a_writer_that_lives_does_not_reach_it(dying: Store) -> None:
    _, fd = dying.close_file(b"a")
    assert await dying.restart() == 1
    os.pwrite(fd, b"survivor", 0)
    os.close(fd)
    assert dying.load(b"a") == DATA
    assert dying.staged() == []


async def test_what_cannot_be_read_ends_no_start(
    dying: Store, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append(f"{LOST}.*Input/output error")
    for name in (b"bad", b"good"):
        _, fd = dying.close_file(name, DATA + name)
        os.close(fd)
    prepare = BlobDirectory.prepare
    failed: list[int] = []

    def fail_once(directory: BlobDirectory, fd: int) -> bytes:
        if not failed:
            failed.append(fd)
            raise OSError(5, os.strerror(5))
        return prepare(directory, fd)

    monkeypatch.setattr(BlobDirectory, "prepare", fail_once)
    assert await dying.restart() == 1
    found = {name: dying.load(name) for name in (b"bad", b"good")}
    assert [data for name, data in found.items() if data == DATA + name] != []
    assert list(found.values()).count(None) == 1
    assert dying.staged() == []


async def test_rubbish_of_such_a_name_ends_no_start(dying: Store) -> None:
    kept, fd = dying.close_file(b"a")
    os.close(fd)
    staging = dying.directories[0].path / "staging"
    store_id = dying.directories[0].store_id
    (staging / f"{store_id}.run.1.zz").write_bytes(b"rubbish")
    # Of runs that come before that of the file. What is no file is not ours.
    names = [replace(kept, stage=f"{store_id}.0.{number}").name for number in (2, 3, 4)]
    (staging / names[0]).mkdir()
    os.mkfifo(staging / names[1])
    os.symlink("/etc/passwd", staging / names[2])
    assert await dying.restart() == 1
    assert dying.load(b"a") == DATA
    assert sorted(dying.staged()) == names


async def test_a_directory_that_comes_back_brings_nothing_old(dying: Store) -> None:
    first, second, third = (DATA + name for name in (b"1", b"2", b"3"))
    store(dying.node, b"a", first)
    _, fd = dying.close_file(b"a", second, index=1)
    os.close(fd)
    assert await dying.restart(is_second_there=False) == 0
    inode = dying.inode(b"a")
    assert inode is not None
    stage = dying.node.stage()
    os.write(stage.fd, third)
    await dying.node.publish_stage(stage, inode.ino, LATER_NS)
    os.close(stage.fd)
    assert await dying.restart() == 0
    assert dying.load(b"a") == third
    assert dying.staged() == []


async def test_bytes_that_are_there_already_are_shared(dying: Store) -> None:
    store(dying.node, b"same", DATA)
    _, fd = dying.close_file(b"a")
    os.close(fd)
    assert await dying.restart() == 1
    assert dying.load(b"a") == dying.load(b"same") == DATA
    assert dying.staged() == []


async def test_a_store_joins_no_cluster_before_it_is_published(tmp_path: Path) -> None:
    dying = Store(tmp_path)
    _, fd = dying.close_file(b"a", index=1)
    os.close(fd)
    dying.die()
    alone = Config(tuple(directory.config for directory in dying.directories))
    joining = replace(alone, cluster=ClusterConfig("redis://127.0.0.1:1"))
    with pytest.raises(InvalidInput, match="1 closed files that are not stored yet"):
        async with running(joining):
            pass
    async with running(alone) as node:
        (inode,) = node.meta.resolve([b"a"])
        assert inode is not None and inode.size_bytes == len(DATA)
    with pytest.raises(Unavailable, match="see that a server runs"):
        async with running(joining):
            pass


async def test_it_is_copied_to_tiers_as_all_others(tmp_path: Path) -> None:
    dying = Store(tmp_path)
    _, fd = dying.close_file(b"a")
    os.close(fd)
    dying.die()
    limits = TIER_LIMITS[TierKind.NVME]
    tier = TierConfig("disk", TierKind.NVME, limits, path=tmp_path / "tier", min_free=0)
    config = Config(tuple(d.config for d in dying.directories), tiers=(tier,))
    async with running(config) as node:
        with trio.fail_after(DEADLINE_S):
            while not node.meta.tier_masks([digest_of(DATA)])[0]:
                await trio.sleep(0.01)
