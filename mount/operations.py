"""Kernel requests to calls of the node. Open files are in `mount.handles`, `.kvfs` is in
`mount.view`, files that show as links are in `mount.links`.

The requests of one mount run as tasks of one trio thread. Those on names await nothing, so each is
atomic.
"""

import errno
import functools
import logging
import os
import stat
from collections.abc import Sequence

import pyfuse3
import trio

from kvfs.config import KERNEL_CACHE_S, NAME_BYTES_MAX, PAGE_BYTES, REQUEST_WAIT_US
from kvfs.errors import NamespaceError, Unavailable
from kvfs.meta.contract import ROOT_INO, Changes, Entry, Inode, RenameMode
from kvfs.node import Change, Node
from mount.answers import request
from mount.attributes import ABSENT, attributes
from mount.directories import Listed, OpenDirectory
from mount.freshness import Freshness
from mount.handles import Opened, OpenFiles
from mount.lingering import Lingering
from mount.links import Links
from mount.numbers import VIEW_BASE, is_link
from mount.passthrough import HAS_NOFLUSH, IS_PATCHED, BackingIds, find_obstacle_in_mount
from mount.privileges import drop_privileges
from mount.removed import RemovedDirectories
from mount.reuse import KEEPS_ATTRIBUTES, keep_attributes, mark_reusable
from mount.through import goes_through
from mount.view import VIEW_NAME, View

log = logging.getLogger(__name__)

_RENAME_MODES = {
    0: RenameMode.REPLACE,
    pyfuse3.RENAME_NOREPLACE: RenameMode.NO_REPLACE,
    pyfuse3.RENAME_EXCHANGE: RenameMode.EXCHANGE,
}
Context = pyfuse3.RequestContext

_SWITCHED_OFF = "passthrough is switched off, by -o no_passthrough or in kvfs.toml"
_VIEWED_AT_ONCE = 32  # names of `.kvfs` listed before everyone else has a turn: 5 ms


class Operations(pyfuse3.Operations):
    """The file system as pyfuse3 calls it. `is_ready` is set when the kernel has said hello."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False
    request_wait_us = REQUEST_WAIT_US  # the stock pyfuse3 does not look at it

    def __init__(
        self, node: Node, view: View, *, passthrough: bool = True, symlink: bool = False
    ) -> None:
        super().__init__()
        self.enable_passthrough = passthrough
        # A name is a link from its close on.
        self.files = OpenFiles(
            node,
            self._expire_pages,
            self._is_untold,
            lambda: view.has_open,
            may_put_off=not symlink,
        )
        node.watch(self._keep_for_readers)  # first: the kernel is told of the new number then
        self.freshness = Freshness(node, self.files.numbers.current)
        self.lingering = Lingering(node)
        self.links = Links(node, self.files, is_on=symlink)
        node.on_shortage(self.files.reuse.withdraw_all)
        node.on_nameless(self._end_reuse)
        self.is_ready = trio.Event()
        self._node = node
        self._view = view
        self._removed = RemovedDirectories()
        self._directories: dict[int, OpenDirectory] = {}
        self._last_directory = 0

    def init(self) -> None:
        why_not = find_obstacle_in_mount() if self.enable_passthrough else _SWITCHED_OFF
        session_fd = -1 if why_not else pyfuse3.get_session_fd()
        self.files.backing = BackingIds(session_fd, why_not)
        self.is_ready.set()

    def _expire_pages(self, number: int) -> None:
        self.freshness.expire_pages(number)

    def _is_untold(self, number: int) -> bool:
        return self.freshness.is_untold(number)

    def _keep_for_readers(self, change: Change) -> None:
        """A file was changed other than through the mount. Who has it open keeps its bytes, and its
        names are looked up again."""
        if change.ino:
            self._end_reuse(change.ino)
        else:  # it is not known what has changed
            self.files.reuse.withdraw_all()
        try:
            if change.ino and self.files.versions.note_changed(change.ino):
                for parent, name in self._node.meta.names_of(change.ino):
                    self.freshness.expire_name(parent, name)
        except (NamespaceError, Unavailable):
            pass  # it has gone, or it is not known what it is now: the next open asks

    def _end_reuse(self, ino: int) -> None:
        self.files.reuse.withdraw(self.files.numbers.current(ino))

    def stop_waiting(self) -> None:
        """The mount is about to end: no request waits for other nodes any more."""
        self._node.stop_fetching()

    def describe(self) -> dict[str, object]:
        """For `kvfs status`: who serves reads, and how many files are open."""
        found = self.files.describe()
        return {**found, "reads": "symlink"} if self.links.is_on else found

    # Names ----------------------------------------------------------------------------------------
    @request
    async def lookup(self, parent: int, name: bytes, ctx: Context) -> pyfuse3.EntryAttributes:
        if parent >= VIEW_BASE:
            return await self._view.lookup(parent, name)
        if parent == ROOT_INO and name == VIEW_NAME:
            return self._view.root()
        try:
            inode = self._find(parent, name)
        except NamespaceError:
            self.files.note_end(ctx.pid)
            raise
        if inode is None:
            self.files.note_end(ctx.pid)
            return ABSENT
        self.files.note_found(ctx.pid, inode.ino)
        return self._entry(inode)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for number, lookups in inode_list:
            try:
                self._forget(number, lookups)
            except Exception:  # pyfuse3 catches nothing here: it would be the end of the mount
                log.exception("forget of inode %d failed", number)

    def _forget(self, number: int, lookups: int) -> None:
        if number >= VIEW_BASE:
            self._view.forget(number, lookups)
        else:
            self._removed.forget(number)
            # Who read a link is yet to open what it leads to; and other nodes may be on their way.
            if not self.links.is_on and self._node.neighbours is None:
                self.lingering.drop(self.files.numbers.ino(number))
            self.files.numbers.forget(number, lookups)
            self.files.pages.forget(number)

    @request
    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: Context
    ) -> pyfuse3.EntryAttributes:
        if stat.S_ISREG(mode):
            opened, inode = self._create(parent, name, mode, os.O_WRONLY, ctx)
            try:
                await self.files.flush(opened.fh)
            finally:  # the kernel will not: it knows of no open file
                await self.files.release(opened.fh)
        else:
            inode = self._make(parent, name, mode, ctx, rdev=rdev)
        return self._entry(self._node.meta.inode(inode.ino) or inode, as_link=False)

    @request
    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: Context
    ) -> pyfuse3.EntryAttributes:
        return self._entry(self._make(parent, name, mode, ctx))

    @request
    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: Context
    ) -> pyfuse3.EntryAttributes:
        return self._entry(self._make(parent, name, stat.S_IFLNK | 0o777, ctx, target=target))

    @request
    async def readlink(self, number: int, ctx: Context) -> bytes:
        file = self.links.find(number)
        if file is not None:
            return await self.links.read(file, ctx.pid)
        inode, _ = self._inode(number)
        if not stat.S_ISLNK(inode.mode):
            raise NamespaceError(errno.EINVAL)
        return inode.target

    @request
    async def link(
        self, number: int, new_parent: int, new_name: bytes, ctx: Context
    ) -> pyfuse3.EntryAttributes:
        self._check_place(number)
        self._check_place(new_parent, new_name)
        if not (is_link(number) or self.files.numbers.is_current(number)):
            raise NamespaceError(errno.ESTALE)
        meta = self._node.meta
        ino = self.files.numbers.ino(number)
        for parent, name in meta.names_of(ino):  # from now on it is looked up each time
            self.freshness.expire_name(parent, name)
        inode = meta.link(ino, new_parent, new_name, self._node.now_ns())
        return self._entry(inode, as_link=is_link(number))  # the kernel takes no other type

    @request
    async def unlink(self, parent: int, name: bytes, ctx: Context) -> None:
        self._check_place(parent, name)
        self._expire_other_names(self._node.unlink(parent, name, self.lingering.keep))
        self._keep_directories(parent)

    @request
    async def rmdir(self, parent: int, name: bytes, ctx: Context) -> None:
        self._check_place(parent, name)
        self._removed.note(self._node.meta.rmdir(parent, name, self._node.now_ns()))

    @request
    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: Context
    ) -> None:
        self._check_place(parent, name)
        self._check_place(new_parent, new_name)
        mode = _RENAME_MODES.get(flags)
        if mode is None:
            raise NamespaceError(errno.EINVAL)
        renamed = self._node.rename(parent, name, new_parent, new_name, mode, self.lingering.keep)
        if renamed.replaced is not None and mode is RenameMode.REPLACE:
            if renamed.replaced.is_directory:
                self._removed.note(renamed.replaced)
            self._expire_other_names(renamed.replaced)
        await self._node.chunk_files.index(renamed.moved)
        if mode is RenameMode.EXCHANGE and renamed.replaced is not None:
            await self._node.chunk_files.index(renamed.replaced)
        self._keep_directories(parent, new_parent)

    def _expire_other_names(self, inode: Inode) -> None:
        """A name of a file has gone: the kernel sees that, but not the count under others."""
        if inode.nlink:
            self.freshness.expire_attributes(self.files.numbers.current(inode.ino))

    def _keep_directories(self, *numbers: int) -> None:
        """Names in directories have changed through the mount: the kernel asks for their attributes
        next, and is told what they are now. In a cluster others may change them meanwhile."""
        if KEEPS_ATTRIBUTES and self._node.neighbours is None:
            for number in set(numbers):
                keep_attributes(self._attributes(number))

    def _make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        ctx: Context,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Inode:
        self._check_place(parent, name)
        return self._node.meta.make(
            parent, name, mode, ctx.uid, ctx.gid, self._node.now_ns(), rdev=rdev, target=target
        )

    def _check_place(self, number: int, name: bytes = b"") -> None:
        """The view is not for changes."""
        if number >= VIEW_BASE or (number == ROOT_INO and name == VIEW_NAME):
            raise NamespaceError(errno.EPERM)

    def _find(self, parent: int, name: bytes) -> Inode | None:
        inode = self._node.meta.lookup(parent, name)
        if inode is None and self._node.neighbours is not None:  # perhaps just made elsewhere
            self._node.refresh()
            inode = self._node.meta.lookup(parent, name)
        return inode

    # Attributes -----------------------------------------------------------------------------------
    @request
    async def getattr(self, number: int, ctx: Context) -> pyfuse3.EntryAttributes:
        if number >= VIEW_BASE:
            return await self._view.getattr(number)
        try:
            return self._attributes(number)
        except NamespaceError as error:
            if error.code == errno.ESTALE and self._node.neighbours is not None:
                self.files.note_gone(ctx.pid, number)
            raise

    @request
    async def setattr(
        self,
        number: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: Context,
    ) -> pyfuse3.EntryAttributes:
        self._check_place(number)
        if fields.update_mtime:
            await self.files.settle(number)
        inode, _ = self._inode(number)
        if fields.update_size:
            if not inode.is_regular or is_link(number):
                raise NamespaceError(errno.EINVAL)
            await self.files.truncate(number, fh, attr.st_size, ctx.pid)
        changes = Changes(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        if changes != Changes():
            inode = self._node.meta.set_attributes(inode.ino, changes, self._node.now_ns())
        if changes.mtime_ns is not None:
            self.files.set_mtime(number, inode.mtime_ns)  # as far as a record can hold it
        return self._attributes(number)

    @request
    async def statfs(self, ctx: Context) -> pyfuse3.StatvfsData:
        room = self._node.space.statfs()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = PAGE_BYTES
        data.f_blocks = room.capacity_bytes // PAGE_BYTES
        data.f_bfree = data.f_bavail = room.free_bytes // PAGE_BYTES
        data.f_files = room.files
        data.f_ffree = data.f_favail = room.files_free
        data.f_namemax = NAME_BYTES_MAX
        return data

    def _inode(self, number: int) -> tuple[Inode, bool]:
        file = self.links.find(number)
        if file is not None:
            return file, True
        found = self.files.versions.inode(number)
        if found is not None:
            return found
        removed = self._removed.find(number)
        if removed is None:
            raise NamespaceError(errno.ESTALE)
        return removed, False

    def _attributes(self, number: int) -> pyfuse3.EntryAttributes:
        inode, is_changing = self._inode(number)
        if is_link(number):
            return self.links.attributes(inode)
        return attributes(inode, number, is_changing=is_changing)

    def _entry(self, inode: Inode, *, as_link: bool | None = None) -> pyfuse3.EntryAttributes:
        """What a reply says that names an inode; it counts as a look-up. `as_link`: where the
        kernel expects one type."""
        entry = self._named(inode, self.links.shows(inode) if as_link is None else as_link)
        self.files.numbers.count(entry.st_ino)
        return entry

    def _named(self, inode: Inode, as_link: bool) -> pyfuse3.EntryAttributes:
        """What a name shows of an inode."""
        if as_link:
            return self.links.attributes(inode)
        shown, is_changing = self.files.versions.overlay(inode)
        number = self.files.numbers.current(inode.ino)
        entry = attributes(shown, number, is_changing=is_changing)
        if self.links.is_on and inode.is_regular:
            entry.entry_timeout = 0.0  # it may become a link at any time
        return entry

    # Files ----------------------------------------------------------------------------------------
    @request
    async def open(self, number: int, flags: int, ctx: Context) -> pyfuse3.FileInfo:
        if number >= VIEW_BASE:
            return await self._view.open(number, flags)
        opened = await self._open(number, flags, ctx)
        if opened.backing_id and opened.is_writer and not goes_through(flags):
            self.freshness.expire_attributes(number)  # it may be mapped: nobody sees those stores
        info = _file_info(opened)
        if not self.links.is_on and self.files.reuses(number, opened):
            mark_reusable(info)
        return info

    async def _open(self, number: int, flags: int, ctx: Context) -> Opened:
        if flags & os.O_TRUNC and ctx.uid != 0:
            drop_privileges(self._node, self.files.numbers.ino(number))
        return await self.files.open(number, flags, ctx.pid, is_root=ctx.uid == 0)

    @request
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Context
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        self._check_place(parent, name)
        self._node.refresh()
        try:
            opened, inode = self._create(parent, name, mode, flags, ctx)
        except NamespaceError as error:
            if error.code != errno.EEXIST or flags & os.O_EXCL:
                raise
            opened, inode = await self._open_made(parent, name, flags, ctx)
            return _file_info(opened), self._entry(inode, as_link=False)
        self.files.note_end(ctx.pid)
        self._keep_directories(parent)
        entry = self._entry(inode, as_link=False)
        if self._node.neighbours is None:  # nobody else changes it, and the kernel sees its own do
            entry.attr_timeout = KERNEL_CACHE_S
        return _file_info(opened), entry

    async def _open_made(
        self, parent: int, name: bytes, flags: int, ctx: Context
    ) -> tuple[Opened, Inode]:
        """Open what somebody has made since the kernel looked: it takes that as an open."""
        inode = self._find(parent, name)
        if inode is None or not inode.is_regular:
            raise NamespaceError(errno.ESTALE)  # the kernel looks, and sees what it is
        opened = await self._open(self.files.numbers.current(inode.ino), flags, ctx)
        return opened, self._node.meta.inode(inode.ino) or inode

    def _create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Context
    ) -> tuple[Opened, Inode]:
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        return self.files.create(
            lambda: self._make(parent, name, mode, ctx), flags, is_root=ctx.uid == 0
        )

    @request
    async def read(  # type: ignore[override]  # pyfuse3 takes any buffer, its types say bytes
        self, fh: int, off: int, size: int
    ) -> bytes | memoryview:
        if fh >= VIEW_BASE:
            return self._view.read(fh, off, size)
        return await self.files.read(fh, off, size)

    @request
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        await self.files.write(fh, off, buf)
        return len(buf)

    @request
    async def flush(self, fh: int) -> None:
        if fh < VIEW_BASE:
            await self.files.flush(fh)

    @request
    async def release(self, fh: int) -> None:
        if fh >= VIEW_BASE:
            self._view.release(fh)
        else:
            await self.files.release(fh)

    @request
    async def fsync(self, fh: int, datasync: bool) -> None:
        if fh < VIEW_BASE:
            await self.files.sync(fh, data_only=datasync)

    # Directories ----------------------------------------------------------------------------------
    @request
    async def opendir(self, number: int, ctx: Context) -> int:
        if number >= VIEW_BASE:
            directory = await self._view.opendir(number)
        elif self._removed.find(number) is not None:
            directory = OpenDirectory(number, number, lambda cursor, limit: [])
        else:
            parent = self._node.meta.parent_of(number)
            directory = OpenDirectory(number, parent, functools.partial(self._list, number))
        self._last_directory += 1
        self._directories[self._last_directory] = directory
        return self._last_directory

    def _list(self, number: int, cursor: bytes, limit: int) -> Sequence[Listed]:
        page: Sequence[Entry] = self._node.meta.entries(number, cursor, limit)
        if number == ROOT_INO:
            page = self._view.with_root(cursor, page, limit)
        return [Listed(entry.name, entry) for entry in page]

    @request
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._directories[fh]
        for position, name, number in directory.dots(start_id):
            dot = pyfuse3.EntryAttributes()
            dot.st_ino = number
            dot.st_mode = stat.S_IFDIR
            if not pyfuse3.readdir_reply(token, name, dot, position):
                return
        position = start_id
        while page := directory.after(position):
            for position, listed in page:
                if not self._reply(token, directory.number, listed.entry, position):
                    return
                directory.note(position, listed.cursor)
                if directory.number >= VIEW_BASE and position % _VIEWED_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()

    def _reply(self, token: pyfuse3.ReaddirToken, parent: int, entry: Entry, position: int) -> bool:
        """Give the kernel one listed entry, which counts as a look-up; False when it is full."""
        inode = entry.inode
        if inode.ino >= VIEW_BASE:
            return self._view.reply(token, parent, entry.name, position)
        attr = self._named(inode, self.links.shows(inode))
        if not pyfuse3.readdir_reply(token, entry.name, attr, position):
            return False
        self.files.numbers.count(attr.st_ino)
        return True

    @request
    async def releasedir(self, fh: int) -> None:
        del self._directories[fh]

    @request
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await trio.to_thread.run_sync(self._node.meta.sync)


def _file_info(opened: Opened) -> pyfuse3.FileInfo:
    info = pyfuse3.FileInfo(fh=opened.fh, keep_cache=opened.keep_cache, direct_io=opened.is_direct)
    if IS_PATCHED:
        info.backing_id = opened.backing_id
    if HAS_NOFLUSH:
        info.noflush = not opened.is_writer
    return info
