"""The rules of POSIX for names, as functions on one write transaction of the embedded engine.

Every check comes before the first write of its function where that is free; where it is not, the
transaction is aborted by the error.
"""

import errno
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvfs.config import PATH_BYTES_MAX
from kvfs.errors import NamespaceError
from kvfs.meta import records
from kvfs.meta.batch import Batch
from kvfs.meta.contract import (
    ROOT_INO,
    Changes,
    Inode,
    Renamed,
    RenameMode,
)
from kvfs.meta.view import View, check_name

_TYPES = {
    stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR,
    stat.S_IFBLK,
}  # fmt: skip


def check_path(path: bytes) -> None:
    """Refuse a path that is too long."""
    if len(path) > PATH_BYTES_MAX:
        raise NamespaceError(errno.ENAMETOOLONG, path)


def split_path(path: bytes) -> list[bytes]:
    """The names of a path from the root, checked; empty parts count for nothing."""
    check_path(path)
    names = [name for name in path.split(b"/") if name]
    for name in names:
        check_name(name)
    return names


def new_inode(batch: Batch, directory: Inode, mode: int, uid: int, gid: int, now_ns: int) -> Inode:
    """An inode that is about to get a name in `directory`, not stored yet."""
    is_directory = stat.S_ISDIR(mode)
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        mode |= stat.S_ISGID if is_directory else 0
    now_ns = records.clamp_time(now_ns)
    return Inode(
        ino=batch.take_ino(),
        mode=mode,
        uid=uid,
        gid=gid,
        nlink=2 if is_directory else 1,
        size_bytes=0,
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
    )


def change_directory(batch: Batch, directory: Inode, now_ns: int, links: int = 0) -> Inode:
    """Note that a directory's entries changed, and how many more subdirectories it has."""
    now_ns = records.clamp_time(now_ns)
    changed = replace(
        directory, mtime_ns=now_ns, ctime_ns=now_ns, nlink=max(2, directory.nlink + links)
    )
    return batch.store(changed, directory)


def make(
    batch: Batch, parent: int, name: bytes, mode: int, uid: int, gid: int, now_ns: int,
    rdev: int = 0, target: bytes = b"",
) -> Inode:  # fmt: skip
    """As `MetaEngine.make`."""
    check_name(name)
    directory = batch.directory(parent)
    if batch.entry(parent, name) is not None:
        raise NamespaceError(errno.EEXIST, name)
    mode = mode if stat.S_IFMT(mode) else mode | stat.S_IFREG
    if stat.S_IFMT(mode) not in _TYPES:
        raise NamespaceError(errno.EINVAL, name)
    if stat.S_ISLNK(mode) and not target:
        raise NamespaceError(errno.ENOENT, name)
    if len(target) > PATH_BYTES_MAX:
        raise NamespaceError(errno.ENAMETOOLONG, name)
    inode = new_inode(batch, directory, mode, uid, gid, now_ns)
    if stat.S_ISLNK(mode):
        inode = replace(inode, target=target, size_bytes=len(target))
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        inode = replace(inode, rdev=rdev)
    batch.store(inode, None)
    batch.add_name(parent, name, inode)
    change_directory(batch, directory, now_ns, links=int(inode.is_directory))
    return inode


def make_directories(
    batch: Batch, names: list[bytes], mode: int, uid: int, gid: int, now_ns: int
) -> Inode:
    """Walk from the root, making what is missing: ENOTDIR when a file is in the way."""
    directory = batch.directory(ROOT_INO)
    for name in names:
        found = batch.entry(directory.ino, name)
        if found is None:
            kind = stat.S_IFDIR | stat.S_IMODE(mode)
            found = make(batch, directory.ino, name, kind, uid, gid, now_ns)
        if not found.is_directory:
            raise NamespaceError(errno.ENOTDIR, b"/".join(names))
        directory = found
    return directory


def link(batch: Batch, ino: int, parent: int, name: bytes, now_ns: int) -> Inode:
    """As `MetaEngine.link`."""
    check_name(name)
    inode = batch.inode(ino)
    directory = batch.directory(parent)
    if batch.entry(parent, name) is not None:
        raise NamespaceError(errno.EEXIST, name)
    if inode.is_directory:
        raise NamespaceError(errno.EPERM, name)
    if inode.nlink == 0:
        raise NamespaceError(errno.ENOENT, name)
    linked = replace(inode, nlink=inode.nlink + 1, ctime_ns=records.clamp_time(now_ns))
    batch.store(linked, inode)
    batch.add_name(parent, name, linked)
    change_directory(batch, directory, now_ns)
    return linked


def release_name(batch: Batch, parent: int, name: bytes, inode: Inode, now_ns: int) -> Inode:
    """Take a name from what it stands for, leaving the parent's times and links to the caller. A
    directory is gone at once, a file without names is an orphan."""
    batch.remove_name(parent, name, inode.ino)
    now_ns = records.clamp_time(now_ns)
    if inode.is_directory:
        batch.drop(inode)
        return replace(inode, nlink=0, ctime_ns=now_ns)
    return batch.store(replace(inode, nlink=max(0, inode.nlink - 1), ctime_ns=now_ns), inode)


def unlink(batch: Batch, parent: int, name: bytes, now_ns: int) -> Inode:
    """As `MetaEngine.unlink`."""
    directory, inode = _existing(batch, parent, name)
    if inode.is_directory:
        raise NamespaceError(errno.EISDIR, name)
    after = release_name(batch, parent, name, inode, now_ns)
    change_directory(batch, directory, now_ns)
    return after


def unlink_files(batch: Batch, inos: Iterable[int], now_ns: int) -> list[tuple[int, bytes, Inode]]:
    """As `MetaEngine.unlink_all`."""
    gone: list[tuple[int, bytes, Inode]] = []
    for ino in inos:
        inode = batch.find(ino)
        if inode is not None and not inode.is_directory:
            gone += unlink_all(batch, inode, now_ns)
    return gone


def unlink_all(batch: Batch, inode: Inode, now_ns: int) -> list[tuple[int, bytes, Inode]]:
    """Remove all names of a file: (parent, name, inode afterwards) for each."""
    names = batch.names(inode.ino)
    for parent, name in names:
        inode = release_name(batch, parent, name, inode, now_ns)
        change_directory(batch, batch.directory(parent), now_ns)
    if inode.nlink:  # a cluster's server lost names of it: it is an orphan all the same
        inode = batch.store(replace(inode, nlink=0), inode)
    return [(parent, name, inode) for parent, name in names]


def rmdir(batch: Batch, parent: int, name: bytes, now_ns: int) -> Inode:
    """As `MetaEngine.rmdir`."""
    directory, inode = _existing(batch, parent, name)
    if not inode.is_directory:
        raise NamespaceError(errno.ENOTDIR, name)
    if not batch.is_empty(inode.ino):
        raise NamespaceError(errno.ENOTEMPTY, name)
    after = release_name(batch, parent, name, inode, now_ns)
    change_directory(batch, directory, now_ns, links=-1)
    return after


def rename(
    batch: Batch, parent: int, name: bytes, new_parent: int, new_name: bytes, now_ns: int,
    mode: RenameMode,
) -> Renamed:  # fmt: skip
    """As `MetaEngine.rename`; the checks are in the order of Linux."""
    check_name(new_name)
    source, moved = _existing(batch, parent, name)
    directory = batch.directory(new_parent)
    found = batch.entry(new_parent, new_name)
    if mode is RenameMode.NO_REPLACE and found is not None:
        raise NamespaceError(errno.EEXIST, new_name)
    if mode is RenameMode.EXCHANGE and found is None:
        raise NamespaceError(errno.ENOENT, new_name)
    if moved.is_directory and moved.ino in _lineage(batch, new_parent):
        raise NamespaceError(errno.EINVAL, new_name)
    if found is not None and found.is_directory and found.ino in _lineage(batch, parent):
        code = errno.EINVAL if mode is RenameMode.EXCHANGE else errno.ENOTEMPTY
        raise NamespaceError(code, new_name)
    if found is not None and found.ino == moved.ino:
        return Renamed(moved, None)
    if found is not None and mode is RenameMode.EXCHANGE:
        return _exchange(batch, source, name, moved, directory, new_name, found, now_ns)
    replaced = None
    if found is not None:
        _check_replaceable(batch, moved, found, new_name)
        replaced = release_name(batch, new_parent, new_name, found, now_ns)
    batch.remove_name(parent, name, moved.ino)
    moved = _place(batch, new_parent, new_name, moved, now_ns)
    leaves = -int(moved.is_directory)
    arrives = int(moved.is_directory) - int(found is not None and found.is_directory)
    _change_two(batch, source.ino, leaves, new_parent, arrives, now_ns)
    return Renamed(moved, replaced)


def set_attributes(batch: Batch, ino: int, changes: Changes, now_ns: int) -> Inode:
    """As `MetaEngine.set_attributes`."""
    old = batch.inode(ino)
    if changes == Changes():
        return old
    if changes.size_bytes is not None and (not old.is_regular or old.digest):
        raise NamespaceError(errno.EISDIR if old.is_directory else errno.EINVAL)

    def chosen(value: int | None, kept: int) -> int:
        return kept if value is None else value

    new = replace(
        old,
        mode=stat.S_IFMT(old.mode) | stat.S_IMODE(chosen(changes.mode, old.mode)),
        uid=chosen(changes.uid, old.uid),
        gid=chosen(changes.gid, old.gid),
        size_bytes=chosen(changes.size_bytes, old.size_bytes),
        atime_ns=records.clamp_time(chosen(changes.atime_ns, old.atime_ns)),
        mtime_ns=records.clamp_time(chosen(changes.mtime_ns, old.mtime_ns)),
        ctime_ns=records.clamp_time(now_ns),
    )
    return batch.store(new, old)


def _existing(batch: Batch, parent: int, name: bytes) -> tuple[Inode, Inode]:
    check_name(name)
    directory = batch.directory(parent)
    found = batch.entry(parent, name)
    if found is None:
        raise NamespaceError(errno.ENOENT, name)
    return directory, found


def _lineage(view: View, ino: int) -> Iterator[int]:
    """A directory and those above it, up to the root."""
    yield ino
    for _ in range(PATH_BYTES_MAX):
        if ino == ROOT_INO:
            return
        parent = view.first_parent(ino)
        if parent is None:
            raise NamespaceError(errno.ENOENT)
        ino = parent
        yield ino
    raise NamespaceError(errno.ELOOP)


def _check_replaceable(batch: Batch, moved: Inode, found: Inode, new_name: bytes) -> None:
    if moved.is_directory and not found.is_directory:
        raise NamespaceError(errno.ENOTDIR, new_name)
    if found.is_directory and not moved.is_directory:
        raise NamespaceError(errno.EISDIR, new_name)
    if found.is_directory and not batch.is_empty(found.ino):
        raise NamespaceError(errno.ENOTEMPTY, new_name)


def _exchange(
    batch: Batch, source: Inode, name: bytes, moved: Inode,
    directory: Inode, new_name: bytes, found: Inode, now_ns: int,
) -> Renamed:  # fmt: skip
    batch.remove_name(source.ino, name, moved.ino)
    batch.remove_name(directory.ino, new_name, found.ino)
    moved = _place(batch, directory.ino, new_name, moved, now_ns)
    found = _place(batch, source.ino, name, found, now_ns)
    arrives = int(moved.is_directory) - int(found.is_directory)
    _change_two(batch, source.ino, -arrives, directory.ino, arrives, now_ns)
    return Renamed(moved, found)


def _place(batch: Batch, parent: int, name: bytes, inode: Inode, now_ns: int) -> Inode:
    """Give an inode that just lost a name another one; a chunk joins its new namespace."""
    changed = batch.store(replace(inode, ctime_ns=records.clamp_time(now_ns)), inode)
    batch.add_name(parent, name, changed)
    record = batch.chunk(inode.ino) if inode.is_published else None
    if record is not None:
        batch.put_chunk(inode.ino, record.info)
    return changed


def _change_two(
    batch: Batch, first: int, first_links: int, second: int, second_links: int, now_ns: int
) -> None:
    """Change one or two directories, which may be the same and may have changed since read."""
    if first == second:
        change_directory(batch, batch.directory(first), now_ns, first_links + second_links)
        return
    change_directory(batch, batch.directory(first), now_ns, first_links)
    change_directory(batch, batch.directory(second), now_ns, second_links)
