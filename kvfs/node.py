"""The node: the one owner of a store's metadata and directories.

Everything runs in one trio thread, so a function without `await` is atomic against all others;
`await` stands only where bytes are hashed or removed, in worker threads. What must not interleave:

- A blob's file and its record change in one piece of sync code (`Publisher.publish`,
  `Reclaim.reap`, `Contents`), so no one sees a record without its file. Intents and dooms are for a
  crash in between.
- `Reclaim.make_room` holds a lock, since two writers would count the same freed bytes.

Bytes do not pass through here: readers and writers get descriptors.
"""

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvfs.arriving import Arriving
from kvfs.blobs import BlobDirectory
from kvfs.checks import Checks
from kvfs.chunk_files import ChunkFiles
from kvfs.config import TIER_OPEN_TRIES, whole_pages
from kvfs.contents import Contents
from kvfs.counters import Counters
from kvfs.errors import Corrupt, NamespaceError, OutOfSpace, Unavailable
from kvfs.fetching import Fetching
from kvfs.leaving import Leaving
from kvfs.meta.contract import Inode, MetaEngine, Published, Renamed, RenameMode
from kvfs.neighbours import Neighbours, Referral
from kvfs.open_blobs import OpenBlobs
from kvfs.orphans import Orphans
from kvfs.prefetch.ahead import Ahead
from kvfs.publish import Publisher
from kvfs.reclaim import Reclaim
from kvfs.settings.words import Config
from kvfs.space import Space
from kvfs.stage import Content, Stage
from kvfs.stored import allocated_bytes, copy_bytes
from kvfs.uses import Uses

if TYPE_CHECKING:
    from kvfs.tiering.tiering import Tiering  # which is built on a node

log = logging.getLogger(__name__)

_NOT_OF_THE_DISK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Change:
    """A name that came, went or changed other than by the mount itself. Without a name: only what
    an inode shows changed. An `ino` of 0 is not known."""

    parent: int
    name: bytes | None
    ino: int
    moves_directories: bool = False  # other paths may lead elsewhere as well


# Hears which files are in use now, and by which reader, if that is known; in the node's thread.
UseWatcher = Callable[[Sequence[int], int | None], None]


class Node:
    """See the module's docstring. `kvfs.life.running` makes, recovers and closes it."""

    def __init__(
        self,
        config: Config,
        directories: Sequence[BlobDirectory | None],
        engine: MetaEngine,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        assert directories[0] is not None
        self.config = config
        self.meta = engine
        self.directories = directories
        self.store_id = directories[0].store_id
        self.now_ns = now_ns
        self.started_ns = now_ns()
        self.counters = Counters()
        self.space = Space(directories, engine.usage, config.home / "meta" / "data.mdb")
        self._held: dict[int, int] = {}
        self._checks = Checks()
        self.fetching = Fetching(self)
        self._leaving = Leaving(self, self._held, self._checks.forget)
        self.open_blobs = OpenBlobs(engine)
        self.reclaim = Reclaim(
            directories,
            engine,
            self.space,
            self._release_spare,
            self.settle,
            self._leaving.evict,
            self._leaving.demote,
            self.open_blobs,
        )
        self.orphans = Orphans(engine, self.reclaim.reap, self._held, self.drop_files)
        self.clients: set[object] = set()
        self.absent: Sequence[str] = ()  # what is to be said of directories that are missing
        self.notices: list[str] = []  # and of what this start, or a join, found lost; a few
        self.neighbours: Neighbours | None = None
        self.tiering: Tiering | None = None
        self.ahead: Ahead | None = None
        self.mountpoint: str | None = None
        self.describe_mount: Callable[[], dict[str, object]] | None = None
        self._watchers: list[Callable[[Change], None]] = []
        self._use_watchers: list[UseWatcher] = []
        self._releasers: list[Callable[[], None]] = []
        self._nameless_watchers: list[Callable[[int], None]] = []
        self._settlers: list[Callable[[], Awaitable[None]]] = []
        self.uses = Uses(engine)
        self._stamp_ns = 0
        self.upkeep_lock = trio.Lock()  # gc would take what a rebuild is about to name
        self.has_lost_names = False  # when it started, but for those of chunk files
        self.is_searching = False  # for its own files, as long as it may take
        self.publisher = Publisher(
            directories,
            engine,
            self.space,
            self.reclaim,
            self._checks,
            self.counters,
            self._next_stamp,
            self._tell_published,
            self._settle_published,
            self.open_blobs,
        )
        self.contents = Contents(
            directories,
            engine,
            self._checks,
            self.counters,
            self.open_blobs,
            now_ns,
            self.publisher.take_away,
            self.drop_lost,
        )
        self.chunk_files = ChunkFiles(engine, self.contents.open_inode, self.reclaim.close)

    # Names ---------------------------------------------------------------------------------------
    def unlink(self, parent: int, name: bytes, keep: Callable[[int], None] | None = None) -> Inode:
        """Remove a name; the inode afterwards. Its blob goes with the last name and handle. `keep`
        hears of a file that has just lost its last name, before it goes: it may `hold` it."""
        inode = self.meta.unlink(parent, name, self.now_ns())
        self._drop_unnamed(inode, keep)
        return inode

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        mode: RenameMode = RenameMode.REPLACE,
        keep: Callable[[int], None] | None = None,
    ) -> Renamed:
        """As `MetaEngine.rename`; what was replaced goes with its last handle, `keep` as for
        `unlink`. A file that may be a chunk by its new name is for `chunk_files`."""
        renamed = self.meta.rename(parent, name, new_parent, new_name, self.now_ns(), mode)
        if renamed.replaced is not None:
            self._drop_unnamed(renamed.replaced, keep)
        return renamed

    def _drop_unnamed(self, inode: Inode, keep: Callable[[int], None] | None) -> None:
        if keep is not None and inode.is_regular and inode.nlink == 0:
            keep(inode.ino)
        self.drop_orphan(inode)

    def hold(self, ino: int) -> None:
        """Keep an inode past its last unlink, and from eviction, until `release`."""
        self._held[ino] = self._held.get(ino, 0) + 1

    def release(self, ino: int) -> None:
        """Pairs with `hold`; the last one lets an orphan go, later if it can't be now."""
        count = self._held[ino] - 1
        if count:
            self._held[ino] = count
            return
        del self._held[ino]
        self.orphans.release(ino)

    def watch(self, callback: Callable[[Change], None]) -> None:
        """Call back, in the node's thread, on every change that the mount did not make itself."""
        self._watchers.append(callback)

    def notify(self, parent: int, name: bytes, ino: int) -> None:
        """Tell the watchers; for changes that clients, eviction or quarantine make."""
        self.tell(Change(parent, name, ino))

    def tell(self, change: Change) -> None:
        """Tell the watchers of a change."""
        for callback in self._watchers:
            callback(change)

    def on_nameless(self, callback: Callable[[int], None]) -> None:
        """Call back, in the node's thread, with an inode that is held and has lost its last name:
        a hold that is only kept for convenience is to be released then."""
        self._nameless_watchers.append(callback)

    def drop_orphan(self, inode: Inode) -> None:
        """Let go of a file that has no name and no open handle, later if it can't be now."""
        if inode.nlink:
            return
        if inode.ino not in self._held:
            self.orphans.drop([inode.ino])
            return
        for callback in self._nameless_watchers:
            callback(inode.ino)

    def abandon(self, ino: int) -> None:
        """Remove the names of a file that was never published, later if it can't be now."""
        self.orphans.abandon(ino)

    # Other nodes ---------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Know what other nodes did until now: before an answer that must be fresh."""
        if self.neighbours is not None:
            self.neighbours.refresh()

    async def bring(self, inodes: Iterable[Inode]) -> None:
        """Have the bytes of these files here, where a tier or another node has them. Tiers are
        asked first, and other nodes as well when these take long. In a cluster, what nobody is
        known to have is looked for in tiers that others fill; a node alone knows what its tiers
        have."""
        if self.tiering is None and self.neighbours is None:
            return
        inodes = list(inodes)
        if self.ahead is not None:
            self.ahead.note_awaited(inodes)
        await self.fetching.fetch(inodes)

    async def refer(self, inodes: Iterable[Inode]) -> dict[bytes, Referral]:
        """Where a client gets what is not here, by digest; for one ticket each, which is used up by
        the first read. What is not among them may still be brought."""
        return {} if self.neighbours is None else await self.neighbours.refer(inodes)

    def stop_fetching(self) -> None:
        """The node is about to end: what comes from tiers and other nodes is not waited for."""
        if self.tiering is not None:
            self.tiering.bringer.stop()
        if self.neighbours is not None:
            self.neighbours.stop_fetching()

    # Reading -------------------------------------------------------------------------------------
    def is_here(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether this node can open each blob: what lies on a directory that is missing it has,
        and cannot."""
        return [
            blob is not None and self.directories[blob.directory] is not None
            for blob in self.meta.blobs(digests)
        ]

    async def open_content(self, ino: int) -> int:
        """A new read-only descriptor of a published file, for the caller to close; after all of it
        was fetched, where only tiers or other nodes have it.

        The first open of a blob since the node started reads it whole and checks its digest, as
        does one that finds its file changed.
        Raises `Corrupt` (quarantined, its names are gone), `NamespaceError` ENOENT, and OSError
        where the disk cannot read it.
        """
        inode = self._published(ino)
        await self.bring([inode])
        return await self._open_brought(inode, None)

    async def _open_brought(self, inode: Inode, reader: int | None) -> int:
        """As `_open_checked`. What has left this node meanwhile, or turned out to have wrong bytes
        here, comes once more where tiers have it."""
        for _ in range(TIER_OPEN_TRIES):
            try:
                return await self._open_checked(inode, reader)
            except (NamespaceError, Corrupt):
                if self.tiering is None or not self.tiering.is_away(inode):
                    raise
            await self.bring([inode])
        return await self._open_checked(inode, reader)

    async def begin_content(self, ino: int, reader: int | None = None) -> int | Arriving:
        """As `open_content`, but a large file that only other nodes have is still on its way."""
        inode = self._published(ino)
        if self.ahead is not None:
            self.ahead.note_awaited([inode])
        arriving = await self.fetching.begin(inode)
        if arriving is not None:
            self.touch([ino], reader)
            return arriving
        return await self._open_brought(inode, reader)

    async def _open_checked(self, inode: Inode, reader: int | None) -> int:
        fd = await self.contents.open_checked(inode)
        self.touch([inode.ino], reader)
        return fd

    def _published(self, ino: int) -> Inode:
        inode = self.meta.inode(ino)
        if inode is None or not inode.is_published:
            raise NamespaceError(errno.ENOENT)
        return inode

    def drop_lost(self, lost: Sequence[tuple[int, bytes, Inode]]) -> None:
        """These names have gone, since nobody has the bytes."""
        for parent, name, inode in lost:
            self.notify(parent, name, inode.ino)
        self.orphans.drop([inode.ino for _, _, inode in lost])

    def touch(self, inos: Sequence[int], reader: int | None = None) -> None:
        """Note a use, the first as the most recent. `reader`: a number for who reads them."""
        self.renew(inos)
        self.note_read(inos, reader)

    def renew(self, inos: Sequence[int]) -> None:
        """Put files behind all others in the order of eviction, though nobody reads them."""
        self.uses.note(inos, self._next_stamp(len(inos)))

    def note_read(self, inos: Sequence[int], reader: int | None) -> None:
        """Somebody reads files, perhaps elsewhere."""
        if self.tiering is not None:
            self.tiering.used(inos)
        for callback in self._use_watchers:
            callback(inos, reader)

    def watch_uses(self, callback: UseWatcher) -> None:
        """Call back at each use; shortly, for a reader waits."""
        self._use_watchers.append(callback)

    @property
    def hears_uses(self) -> bool:
        """Whether it is of any use to find out who reads."""
        return bool(self._use_watchers)

    def _next_stamp(self, count: int) -> int:
        """The newest of so many stamps, all of them newer than any before."""
        self._stamp_ns = max(self._stamp_ns + count, self.now_ns())
        return self._stamp_ns

    # Writing -------------------------------------------------------------------------------------
    def stage(self, size_bytes: int = 0) -> Stage:
        """A new private file in the least busy directory where one can be made. It may not grow
        before `reserve`. Raises `OutOfSpace`, and what the last directory says where none takes
        it."""
        failure: OSError | Unavailable | None = None
        tried: set[int] = set()
        while (index := self.space.pick(size_bytes, tried)) is not None:
            directory = self.directories[index]
            assert directory is not None
            try:
                staged = directory.stage()
            except (OSError, Unavailable) as error:
                if isinstance(error, OSError) and error.errno in _NOT_OF_THE_DISK:
                    raise
                if self.space.avoid(index):
                    log.warning("no file can be made in %s: %s", directory.path, error)
                tried.add(index)
                failure = error
                continue
            stage = Stage(index, staged.name, staged.fd)
            self.space.begin_stage(stage)
            return stage
        raise failure or OutOfSpace(
            f"{size_bytes} bytes are more than any directory of the store may hold"
        )

    async def stage_copy(self, ino: int) -> Stage:
        """A stage that holds a published file's bytes, for copy on write."""
        source = await self.open_content(ino)
        try:
            return await self.stage_copy_of(source)
        finally:
            os.close(source)

    async def stage_copy_of(self, source: int) -> Stage:
        """As `stage_copy`, of the bytes of a descriptor that was opened for its reading."""
        size_bytes = os.fstat(source).st_size
        stage = self.stage(size_bytes)
        try:
            await self.reserve(stage, size_bytes)
            await trio.to_thread.run_sync(copy_bytes, source, stage.fd, size_bytes)
        except BaseException:
            self.discard(stage)
            raise
        return stage

    async def reserve(self, stage: Stage, size_bytes: int) -> None:
        """Make sure a stage may grow to a size, evicting what is coldest. Raises `OutOfSpace`."""
        extra = whole_pages(size_bytes) - stage.reserved_bytes
        if extra > 0:
            await self.reclaim.make_room(stage.directory, extra)
            if not stage.is_open:
                return  # it ended meanwhile
            self.space.reserve(stage, extra)

    def discard(self, stage: Stage) -> None:
        """Close and remove a stage; one that was used up is left alone."""
        if stage.is_open:
            allocated = allocated_bytes(os.fstat(stage.fd))
            stage.is_open = False
            self.space.end_stage(stage)
            os.close(stage.fd)
            directory = self.directories[stage.directory]
            assert directory is not None
            self.reclaim.remove(stage.directory, directory.stage_path(stage.name), allocated)

    async def publish_stage(
        self,
        stage: Stage,
        ino: int,
        mtime_ns: int,
        digest: bytes | None = None,
        *,
        ctime_ns: int = 0,
        writable_bytes: int | None = None,
    ) -> Inode:
        """Make a stage the content of an inode. The stage is used up; its descriptor stays open,
        belongs to the caller and must not be written any more. `digest`: of its bytes, where the
        caller has hashed them. `ctime_ns`: when they came, if not now. `writable_bytes`: so many
        were, and somebody may still write to the file, which the caller has synced if
        `config.fsync`; where it is `adopted_as` a blob then, `open_blobs.end` is the caller's to
        call."""
        directory = self.directories[stage.directory]
        assert directory is not None
        if digest is None:
            own_fd = os.dup(stage.fd)
            digest = await trio.to_thread.run_sync(
                _prepare_and_close, directory, own_fd, abandon_on_cancel=True
            )
        elif directory.lacks_leaf(digest):
            await trio.to_thread.run_sync(directory.make_leaves, [digest], abandon_on_cancel=True)
        size_bytes = os.fstat(stage.fd).st_size if writable_bytes is None else writable_bytes
        if self.config.fsync and writable_bytes is None:
            await trio.to_thread.run_sync(os.fsync, stage.fd, abandon_on_cancel=True)
        content = Content(
            stage,
            digest,
            size_bytes,
            mtime_ns,
            ino=ino,
            ctime_ns=ctime_ns,
            is_hashed=True,
            is_writable=writable_bytes is not None,
        )
        inode = self.publisher.publish([content])[0]
        await self.chunk_files.index(inode)
        return inode

    def _tell_published(self, published: Published) -> None:
        self.uses.forget(published.inode.ino)
        if self.neighbours is not None:
            self.neighbours.published(published.inode)
        if self.tiering is not None:
            self.tiering.behind.published(published.inode)
        if published.parent:
            self.notify(published.parent, published.name, published.inode.ino)
        if published.replaced is not None:
            self.drop_orphan(published.replaced)

    def _settle_published(self) -> None:
        if self.tiering is not None:
            self.tiering.behind.settle()
        self.orphans.reap()

    # Room ----------------------------------------------------------------------------------------
    def drop_files(self, inos: Sequence[int]) -> int:
        """Remove every name of these files, as eviction does. Raises when their room stays taken,
        with or without the names. What tiers or other nodes have as well keeps its names: how many
        do."""
        going = self._leaving.keep_named(inos)
        for parent, name, inode in self.meta.unlink_all(going, self.now_ns()):
            self.notify(parent, name, inode.ino)
        self.orphans.drop_now(going)
        return len(inos) - len(going)

    def on_settle(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await a callback in `settle`."""
        self._settlers.append(callback)

    async def settle(self) -> None:
        """Have published what was closed until now, where that was put off: before an answer that
        must show it."""
        for callback in self._settlers:
            await callback()

    def on_shortage(self, callback: Callable[[], None]) -> None:
        """Call back, in the node's thread, when room is needed: holds that are only kept for
        convenience are to be released then, before anything is evicted."""
        self._releasers.append(callback)

    def _release_spare(self) -> None:
        self.uses.write()  # before it is asked which was the last: all of them may go
        for callback in self._releasers:
            callback()


def _prepare_and_close(directory: BlobDirectory, fd: int) -> bytes:
    """As `prepare`. Who waited for it may have gone."""
    try:
        return directory.prepare(fd)
    finally:
        os.close(fd)
