"""Open files: who has which version open, where its bytes are, and when they are published.

`mount.states` says what an open means; this module does it. `mount.stages` has the bytes that
change. Each open version has at most one stage, shared by all its writers, and is published when a
writer closes (FLUSH, so that every client sees the file whole when close() returns; it may be put
off, see `mount.settling`) or, for pages that a mapping wrote after that, when the last writer is
released. A file without a name is never published.

What must not interleave, in the one trio thread:

- *Write against publication.* Hashing takes a thread and time; a write into the stage meanwhile
  would be published under the wrong digest. `Version.lock` is held by both. A write that waited
  finds the bytes published, and starts a new stage with a copy.
- *Open against open.* A version is entered in the table, with its reader or writer counted, before
  anything is awaited, so that the second open sees the first.
- *Open against publication.* Opening may check a digest, which takes time. If its blob has gone for
  a newer one when that is done, the open fails with ESTALE, and the kernel looks again.
- *Read against a change of descriptors.* `OpenBytes` closes when its last read is done.
- *Release against open.* A release with nothing to publish awaits nothing, so that an open that
  comes after it never meets a writer that has gone.

Published bytes are served by the kernel itself where it can (`mount.passthrough`): a version that
is opened for reading while nobody has it open, and whose file did not change a moment ago. Such a
version never changes, since a writer gets a new one. A writer that comes back and finds readers
served by the kernel is sent back once more. Only a race of a rename, a reader and a writer within
`UNCHANGED_S` could bring that about, and those files are served from Python.
"""

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pyfuse3
import trio

from kvfs.config import UNCHANGED_S
from kvfs.errors import KvfsError, NamespaceError, Unavailable
from kvfs.meta.contract import Inode
from kvfs.node import Change, Node
from mount.kernel import is_synchronous, writes_direct
from mount.locks import Held
from mount.pages import CachedPages
from mount.passthrough import BackingIds
from mount.privileges import drop_privileges
from mount.published import PublishedBytes
from mount.retries import SentBack
from mount.reuse import IS_POSSIBLE as REUSE_IS_POSSIBLE
from mount.reuse import Answers, ReusedOpens
from mount.settling import Settling
from mount.stages import Stages, Version
from mount.states import Access, Opening, State, access_of, decide_open, keeps_cache
from mount.through import goes_through
from mount.versions import Versions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handle:
    """One open() of a version."""

    version: Version
    is_writer: bool
    is_direct: bool  # its writes come past the kernel's page cache
    is_synchronous: bool  # and are to be on the disk when they return
    is_root: bool  # who opened it


@dataclass(frozen=True, slots=True)
class Opened:
    """What the kernel is told of an open."""

    fh: int
    keep_cache: bool
    is_writer: bool  # a close must be told of
    is_direct: bool  # past the kernel's page cache
    backing_id: int = 0  # 0: served from Python


class OpenFiles:
    """All open regular files of a mount. A file that was closed and is published later counts as
    open for writing until then."""

    def __init__(
        self,
        node: Node,
        expire_pages: Callable[[int], None],
        is_untold: Callable[[int], bool],
        is_view_open: Callable[[], bool],
        *,
        may_put_off: bool = True,
    ) -> None:
        """`expire_pages` has the kernel drop the pages of a number, some time soon; `is_untold`
        tells whether it may still find a number by a name that another node took away, and
        `is_view_open` whether somebody has a file of `.kvfs` open. `may_put_off`: large files may
        be published a little after their close."""
        self._node = node
        self._expire_pages = expire_pages
        self._may_put_off = may_put_off
        self._is_untold = is_untold
        self._is_view_open = is_view_open
        self._stages = Stages(node, self._serves_bytes)
        self.versions = Versions(node, expire_pages)
        self.numbers = self.versions.numbers
        self.pages = CachedPages()
        self._handles: dict[int, Handle] = {}
        self._last_fh = 0
        self._sent_back = SentBack()
        self.published = PublishedBytes(node)
        self.backing = BackingIds(-1, "the kernel has not been asked yet")
        self.settling = Settling(self._settle, self._note_settled)
        node.on_nameless(self.settling.forget)
        node.on_settle(self.settling.settle_seen)
        self.reuse = ReusedOpens(
            cast(Answers, pyfuse3), self._let_go, node.touch, self._is_as_opened
        )

    def _serves_bytes(self) -> bool:
        """Whether somebody has a file open that Python serves."""
        return self.backing.count()[1] > 0 or self._is_view_open()

    # Opening --------------------------------------------------------------------------------------
    async def open(self, number: int, flags: int, thread: int, *, is_root: bool) -> Opened:
        """Open a version; ESTALE sends the kernel to look the name up again."""
        self._node.refresh()
        access = access_of(flags)
        is_writer = access is not Access.READ
        if is_writer:
            await self.settle(number)
        version, opening = self._decide(number, access, thread)
        self.versions.enter(version, is_writer)
        # At once: the last other open of it may end while this one waits.
        backing_id = self.backing.enter(number, None) if version.through is not None else None
        try:
            keep = keeps_cache(opening, is_same_digest=self.pages.are_of(version))
            if opening is Opening.EMPTY:
                async with Held(version.lock):
                    await self._stages.truncate(version, 0)
            elif not is_writer:
                await self.published.open(version, thread)
            if version.through is not None and flags & os.O_ACCMODE == os.O_RDWR:
                async with Held(version.lock):
                    await self._stages.through.note_mapped(version.through, version.ino)
        except BaseException as error:
            self._leave(version, is_writer, is_backed=backing_id is not None)
            if isinstance(error, NamespaceError) and error.code == errno.ESTALE:
                raise self._send_back(thread, version.ino) from error
            raise
        if backing_id is None:
            backing_id = self._back(version, opening, flags)
        if opening is Opening.OPEN:
            self.pages.note_opened(version)
        return self._add(version, flags, backing_id, is_writer, keep_cache=keep, is_root=is_root)

    def _back(self, version: Version, opening: Opening, flags: int) -> int:
        """Count an open for the kernel's rule on backing files; the id it is served by, or 0."""
        if opening is Opening.EMPTY:
            return self._back_new(version, flags)
        fd = None
        if opening in (Opening.OPEN, Opening.JOIN) and version.stage is None:
            inode = self._node.meta.inode(version.ino)
            age_ns = 0 if inode is None else abs(self._node.now_ns() - inode.ctime_ns)
            is_here = version.content is not None and version.content.is_whole
            if version.content is not None and is_here and age_ns > UNCHANGED_S * 1e9:
                fd = version.content.fd
        return self.backing.enter(version.number, fd)

    def _back_new(self, version: Version, flags: int) -> int:
        """As `_back`, for an open of a version that is empty."""
        assert version.stage is not None
        fd = None
        if version.through is None and goes_through(flags):
            fd = version.stage.fd if self._stages.through.may_begin(version.stage) else None
        backing_id = self.backing.enter(version.number, fd)
        if backing_id and version.through is None:
            self._stages.write_through(version)
            self.settling.note_writer()
        return backing_id

    def reuses(self, number: int, opened: Opened) -> bool:
        """Whether the answer that the kernel is now given to an open stands for later ones too. In
        a cluster each open asks what other nodes did."""
        if not REUSE_IS_POSSIBLE or not opened.backing_id or self._node.neighbours is not None:
            return False
        version = self.versions.get(number)
        assert version is not None, "it was just opened"
        if version.state is not State.READ or self._sent_back.awaits(version.ino):
            return False
        return self.reuse.keep(number, version.ino, opened.fh)

    def note_found(self, thread: int, ino: int) -> None:
        """A thread looked a file up, perhaps because an open of it was sent back."""
        if self._sent_back.note_found(thread, ino):
            self.reuse.withdraw(self.numbers.current(ino))

    def note_end(self, thread: int) -> None:
        """A thread has found nothing, or has what it wanted: if it was sent back, it does not come
        again."""
        self._sent_back.take(thread)

    def note_gone(self, thread: int, number: int) -> None:
        """A thread asked for what shows nothing any more, and is told so by ESTALE."""
        self._sent_back.note(thread, self.numbers.ino(number))

    def create(
        self, make: Callable[[], Inode], flags: int, *, is_root: bool
    ) -> tuple[Opened, Inode]:
        """Make a file and open it for writing. Nothing is left when there is no room for it."""
        stage = self._stages.spares.take()
        try:
            inode = make()
        except BaseException:
            self._node.discard(stage)
            raise
        version = Version(inode.ino, inode.ino, shown=inode)
        self._stages.adopt(version, stage, 0)
        version.is_dirty = True
        self.versions.enter(version, is_writer=True)
        backing_id = self._back_new(version, flags)
        opened = self._add(version, flags, backing_id, True, keep_cache=False, is_root=is_root)
        return opened, inode

    def _decide(self, number: int, access: Access, thread: int) -> tuple[Version, Opening]:
        """The version that an open gets, not yet entered in the table. ESTALE."""
        if access is not Access.READ:
            self.reuse.withdraw(number)
        ino = self.numbers.ino(number)
        repeated_for = self._sent_back.take(thread)
        is_repeated = repeated_for == ino
        version = self.versions.get(number)
        if version is not None:
            self.versions.follow(version)
        is_shared = self._node.neighbours is not None
        is_untold = is_shared and not is_repeated and self._is_untold(number)
        is_open = version is not None
        if version is None:
            current = self.numbers.is_current(number) and not is_untold
            inode = self._node.meta.inode(ino) if current else None
            if inode is None or (inode.nlink == 0 and is_shared and not is_repeated):
                raise self._send_back(thread, ino)  # what it is called by now is looked up
            version = Version(number, ino, inode.digest, shown=inode)
        opening = decide_open(
            version.state,
            access,
            is_open=is_open,
            is_repeated=is_repeated,
            is_awaited=self._sent_back.awaits(ino),
        )
        is_writer = access is not Access.READ
        is_read_only = version.frozen is None and version.through is None
        if is_writer and is_read_only and self.backing.is_passthrough(number):
            opening = Opening.MOVE
        if opening is Opening.MOVE:  # at once also where it is untold: it is sent back only once
            self.versions.move(version)
        if is_untold or opening in (Opening.MOVE, Opening.STALE):
            raise self._send_back(thread, ino)
        return version, opening

    def _send_back(self, thread: int, ino: int) -> NamespaceError:
        """The error that makes the kernel look again, which is noted."""
        self._sent_back.note(thread, ino)
        self.reuse.withdraw(self.numbers.current(ino))
        return NamespaceError(errno.ESTALE)

    def _leave(self, version: Version, is_writer: bool, *, is_backed: bool = True) -> None:
        """End one open of a version. `is_backed`: it counts for the kernel's rule as well."""
        if is_backed:
            self.backing.leave(version.number)
        if is_writer:
            version.writers -= 1
            if version.writers == 0:
                self._stages.end_through(version)
        else:
            version.readers -= 1
        if version.opens == 0:
            self._end(version)
        self._node.release(version.ino)

    def _end(self, version: Version) -> None:
        """Nobody has the version open any more."""
        self.versions.end(version)
        if version.stage is not None:
            self.pages.forget(version.number)
            self._stages.drop(version, is_only=not self.versions.has_other(version.ino))
        elif version.content is not None:
            if version.was_arriving and not version.is_mixed:
                self.pages.note_opened(version)
            version.content.retire()
        version.content = None
        self.numbers.settle(version.ino)

    def _add(
        self,
        version: Version,
        flags: int,
        backing_id: int,
        is_writer: bool,
        *,
        keep_cache: bool,
        is_root: bool,
    ) -> Opened:
        """Give a handle to an open that was entered in the tables."""
        is_direct = writes_direct(flags, is_root=is_root, is_backed=backing_id != 0)
        self._last_fh += 1
        handle = Handle(version, is_writer, is_direct, is_synchronous(flags), is_root)
        self._handles[self._last_fh] = handle
        return Opened(self._last_fh, keep_cache, is_writer, is_direct, backing_id)

    # Bytes ----------------------------------------------------------------------------------------
    async def read(self, fh: int, offset: int, size_bytes: int) -> bytes | memoryview:
        """Bytes of a handle's version, fewer than asked for only at its end."""
        version = self._handles[fh].version
        content = version.content or await self.published.open(version)
        try:
            return await content.read(offset, size_bytes)
        except Unavailable:
            self._expire_pages(version.number)  # those that came before are of no use
            raise

    async def write(self, fh: int, offset: int, data: bytes) -> None:
        """Write all of `data`, or raise and count nothing as written."""
        handle = self._handles[fh]
        version = handle.version
        async with Held(version.lock):
            await self._stages.write(version, offset, data)
        if handle.is_direct:
            await self._end_direct_write(handle)

    async def _end_direct_write(self, handle: Handle) -> None:
        """What the kernel does itself for a write that it has in its page cache."""
        version = handle.version
        if not handle.is_root:
            drop_privileges(self._node, version.ino)
        if handle.is_synchronous:
            await _sync(version, data_only=False)
        if version.is_mixed and version.through is None:
            # The kernel dropped the pages before the write; a read may have brought them back.
            self._expire_pages(version.number)

    async def truncate(self, number: int, fh: int | None, size_bytes: int, thread: int) -> None:
        """Set a size: of an open handle's version, or of a file by its name, published at once."""
        if fh is not None and fh in self._handles:
            version = self._handles[fh].version
            async with Held(version.lock):
                await self._stages.truncate(version, size_bytes)
            return
        access = Access.TRUNCATE if size_bytes == 0 else Access.WRITE
        await self.settle(number)
        version, _ = self._decide(number, access, thread)
        self.versions.enter(version, is_writer=True)
        is_backed = version.through is not None  # so that it stays what it is until the end of this
        if is_backed:
            self.backing.enter(number, None)
        try:
            async with Held(version.lock):
                await self._stages.truncate(version, size_bytes)
                if version.writers == 1 or version.ino in self.settling:
                    await self._publish(version)
        finally:
            self._leave(version, is_writer=True, is_backed=is_backed)

    def set_mtime(self, number: int, mtime_ns: int) -> None:
        """A time that a person set stays until the next write, published or not."""
        version = self.versions.get(number)
        if version is not None and version.through is not None:
            version.through.set_mtime = mtime_ns, version.through.mark()
        elif version is not None and version.stage is not None:
            version.mtime_ns = mtime_ns

    # Closing --------------------------------------------------------------------------------------
    async def flush(self, fh: int) -> None:
        """A descriptor is being closed: publish what its writers changed, or see to it that it will
        be."""
        handle = self._handles[fh]
        version = handle.version
        if handle.is_writer and version.has_news:
            async with Held(version.lock):
                if not await self._keep(version):
                    await self._publish(version, is_flush=True)
                self._stages.note_closed(version)

    async def _keep(self, version: Version) -> bool:
        """Whether what was closed may be published later, and survives a crash until then."""
        through = version.through
        if through is None or not self._may_put_off:
            return False
        room_bytes = self.settling.room_bytes(version.ino)
        size_bytes = await self._stages.through.keep(
            through, version.ino, room_bytes, lambda: self._is_shared(version)
        )
        if size_bytes is None or size_bytes > self.settling.room_bytes(version.ino):
            return False  # or others took the room meanwhile
        if version.ino not in self.settling:  # from now on it counts as open for writing
            self.versions.enter(version, is_writer=True)
            self.backing.enter(version.number, None)
        self.settling.put_off(version.ino, size_bytes)
        return True

    async def sync(self, fh: int, *, data_only: bool) -> None:
        """Put a version's bytes on the disk, also those that a close of another descriptor has
        published. Nothing, where nobody has read or written any."""
        await _sync(self._handles[fh].version, data_only=data_only)

    async def release(self, fh: int) -> None:
        """The last descriptor of an open has gone."""
        if not self.reuse.is_last(fh):
            return
        handle = self._handles[fh]
        version = handle.version
        try:
            if handle.is_writer and version.writers == 1 and version.has_news:
                async with Held(version.lock):
                    await self._publish(version)
        except (KvfsError, OSError) as error:
            # Nobody waits for this request's answer; the flush before it has told whoever closed.
            log.error("inode %d cannot be published: %s", version.ino, error)
        finally:
            self._let_go(fh)

    async def settle(self, number: int) -> None:
        """Have a file published that was closed and is not yet; then it is as all others. Raises
        what keeps it from that."""
        ino = self.numbers.ino(number)
        if ino in self.settling:
            await self.settling.settle(ino)

    async def _settle(self, ino: int) -> None:
        version = self._unsettled(ino)
        async with Held(version.lock):
            await self._publish(version, is_late=True)

    def _note_settled(self, ino: int) -> None:
        """A file waits no more, and does not count as open for that."""
        self._leave(self._unsettled(ino), is_writer=True)

    def _unsettled(self, ino: int) -> Version:
        """The version that a file has which waits."""
        version = self.versions.get(self.numbers.current(ino))
        assert version is not None, "it counts as open for writing"
        return version

    def _let_go(self, fh: int) -> None:
        """Nobody has a handle any more."""
        handle = self._handles.pop(fh)
        self._leave(handle.version, handle.is_writer)

    def _is_as_opened(self, fh: int) -> bool:
        """Whether a new open would find a reader's bytes as they were found."""
        handle = self._handles.get(fh)  # None: pyfuse3 had no memory for the answer
        version = None if handle is None else handle.version
        if version is None or version.content is None or version.shown is None:
            return False
        return self._node.contents.is_as_checked(version.shown, version.content.fd)

    async def _publish(
        self, version: Version, *, is_late: bool = False, is_flush: bool = False
    ) -> None:
        """Publish the stage if it has news and the file a name. Holds the lock. `is_late`: it was
        closed before, and has waited. `is_flush`: who closes may have another descriptor."""

        def is_shared() -> bool:
            through = version.through
            has_written_on = through is not None and through.published is not None
            return self._is_shared(version, is_late=is_late) or (is_flush and has_written_on)

        if await self._stages.publish(version, is_shared):
            version.shown = self._node.meta.inode(version.ino)
            if version.frozen is not None and version.shown is not None:
                # Another node had overwritten the file: this close came last.
                version.frozen = replace(version.shown, nlink=0)
                self._node.tell(Change(0, None, version.ino))
            if version.is_mixed or version.through is not None:
                self.pages.forget(version.number)
            else:
                self.pages.note(version)

    def _is_shared(self, version: Version, *, is_late: bool = False) -> bool:
        """Whether there are writers besides who closes a version, or closed it (`is_late`)."""
        has_waited_too = not is_late and version.ino in self.settling
        return version.writers > 1 + has_waited_too

    async def run(self) -> None:
        """What is done beside the requests, for ever: room for files that the kernel writes,
        publications that were put off, the end of answers to opens."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stages.spares.run)
            nursery.start_soon(self._stages.through.watch)
            nursery.start_soon(self.settling.run)
            nursery.start_soon(self.reuse.run)

    def describe(self) -> dict[str, object]:
        """For `kvfs status`: who serves reads, why not the kernel, and how many files are open."""
        kernel, python = self.backing.count()
        why_not = self.backing.why_not
        closed = sum(self._unsettled(ino).opens == 1 for ino in self.settling)
        return {
            "reads": "python" if why_not else "passthrough",
            "why_not_passthrough": why_not,
            "open_in_passthrough": kernel - self.reuse.count_idle() - closed,
            "open_in_python": python,
            **self.settling.describe(),
        }

    def close(self) -> None:
        """The mount has ended: drop what was not published and let everything go."""
        self.reuse.withdraw_all()
        for ino in self.settling:
            log.warning("inode %d is left to the next start to publish", ino)
        for handle in list(self._handles.values()):
            # A writer may outlive the mount: what it wrote to stays on record as open.
            handle.version.through = None
            self._leave(handle.version, handle.is_writer, is_backed=False)
        self._handles.clear()
        self._stages.spares.discard()
        self.backing.close()


async def _sync(version: Version, *, data_only: bool) -> None:
    content = version.content  # of the stage, where there is one
    if content is not None:
        own_fd = os.dup(content.fd)  # a writer that comes meanwhile has that one closed
        await trio.to_thread.run_sync(_sync_and_close, own_fd, data_only, abandon_on_cancel=True)


def _sync_and_close(fd: int, data_only: bool) -> None:
    try:
        (os.fdatasync if data_only else os.fsync)(fd)
    finally:
        os.close(fd)
