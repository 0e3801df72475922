"""A directory seen through FUSE, by Python: what rigs build file systems on that are slow, or hang.

Files are read and written as in the directory, without the kernel's cache.
"""

import errno
import os
from typing import Any

import pyfuse3
import trio


class Passing(pyfuse3.Operations):
    """Inode numbers are those of paths that were looked up, for ever: it lives shortly."""

    def __init__(self, root: str, read_s: float = 0.0) -> None:
        super().__init__()
        self._read_s = read_s
        self._paths = {pyfuse3.ROOT_INODE: root}
        self._numbers = {root: pyfuse3.ROOT_INODE}

    def _child(self, parent: int, name: bytes) -> str:
        return os.path.join(self._paths[parent], os.fsdecode(name))

    def _attributes(self, path: str) -> Any:
        try:
            found = os.lstat(path)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        if path not in self._numbers:
            number = len(self._numbers) + 1
            self._numbers[path], self._paths[number] = number, path
        entry = pyfuse3.EntryAttributes()
        for name in (
            "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_atime_ns",
            "st_mtime_ns", "st_ctime_ns", "st_blocks",
        ):  # fmt: skip
            setattr(entry, name, getattr(found, name))
        entry.st_ino = self._numbers[path]
        entry.st_blksize = 4096
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        return self._attributes(self._child(parent, name))

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        return self._attributes(self._paths[inode])

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> Any:
        if fields.update_size:
            os.truncate(self._paths[inode], attr.st_size)
        return self._attributes(self._paths[inode])

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        kept = flags & ~(os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        return pyfuse3.FileInfo(fh=os.open(self._paths[inode], kept), direct_io=True)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        path = self._child(parent, name)
        fd = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT, mode)
        return pyfuse3.FileInfo(fh=fd, direct_io=True), self._attributes(path)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        await trio.sleep(self._read_s)
        return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        os.fsync(fh)

    async def release(self, fh: int) -> None:
        os.close(fh)

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
        path = self._child(parent, name)
        try:
            os.mkdir(path, mode)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        return self._attributes(path)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        path = self._child(parent, name)
        os.unlink(path)
        self._numbers.pop(path, None)

    async def rename(
        self, old_parent: int, old: bytes, new_parent: int, new: bytes, flags: int, ctx: Any
    ) -> None:
        source, target = self._child(old_parent, old), self._child(new_parent, new)
        try:
            os.rename(source, target)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        if (number := self._numbers.pop(source, None)) is not None:
            self._numbers[target], self._paths[number] = number, target

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        path = self._paths[fh]
        for index, name in enumerate(sorted(os.listdir(path))):
            if index < start_id:
                continue
            entry = self._attributes(os.path.join(path, name))
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, index + 1):
                return

    async def statfs(self, ctx: Any) -> Any:
        found = os.statvfs(self._paths[pyfuse3.ROOT_INODE])
        answer = pyfuse3.StatvfsData()
        for name in (
            "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree",
        ):  # fmt: skip
            setattr(answer, name, getattr(found, name))
        return answer
