"""A file system of one file, served by passthrough only: its Python can neither read nor write, and
a close() that asked it would fail.

    passthrough_probe.py MOUNTPOINT BACKING_FILE

Says why not, on standard output, and exits with 3 when passthrough cannot be had; else says "ready"
and serves until unmounted.
"""

import errno
import os
import stat
import sys

import pyfuse3
import trio

from mount.passthrough import BackingIds, find_obstacle, find_obstacle_in_mount

FILE_INODE = 2
CANNOT = 3


class OneFile(pyfuse3.Operations):
    enable_passthrough = True

    def __init__(self, backing: str) -> None:
        super().__init__()
        self.backing = backing
        self.ids: BackingIds | None = None
        self.is_ready = trio.Event()

    def init(self) -> None:
        self.ids = BackingIds(pyfuse3.get_session_fd(), find_obstacle_in_mount())
        self.is_ready.set()

    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_nlink = 1
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
        else:
            entry.st_mode = stat.S_IFREG | 0o644
            entry.st_size = os.stat(self.backing).st_size
        return entry

    async def lookup(self, parent_inode, name, ctx=None):
        if name != b"file":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(FILE_INODE)

    async def open(self, inode, flags, ctx):
        fd = os.open(self.backing, os.O_RDONLY)
        try:
            backing_id = self.ids.enter(inode, fd)
        finally:
            os.close(fd)
        if backing_id == 0:
            self.ids.leave(inode)
            print(self.ids.why_not, flush=True)
            raise pyfuse3.FUSEError(errno.ENOTSUP)
        return pyfuse3.FileInfo(fh=inode, backing_id=backing_id, noflush=True)

    async def release(self, fh):
        self.ids.leave(fh)

    async def flush(self, fh):
        raise pyfuse3.FUSEError(errno.EIO)


async def serve(operations: OneFile) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        await operations.is_ready.wait()
        why_not = operations.ids.why_not
        print(why_not or "ready", flush=True)
        if why_not:
            pyfuse3.terminate()
    assert operations.ids.count() == (0, 0), operations.ids.count()
    return CANNOT if why_not else 0


def main(mountpoint: str, backing: str) -> int:
    obstacle = find_obstacle()
    if obstacle:
        print(obstacle)
        return CANNOT
    operations = OneFile(backing)
    pyfuse3.init(operations, mountpoint, {"default_permissions", "fsname=passthrough_probe"})
    try:
        return trio.run(serve, operations)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
