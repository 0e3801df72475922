"""A file system that answers no creation, and tells the kernel of a change while one waits: killed
then, its process cannot go.

    stuck_probe.py MOUNTPOINT STORE (guarded | alone)

Says "ready" when it serves, and "stuck" when a creation has come and the notice waits for it. It
listens as the node of STORE would.
"""

import contextlib
import errno
import socket
import stat
import sys
import threading

import pyfuse3
import trio

from mount.guard import guarded
from mount.point import find_mount, source_of

SETTLED_S = 0.3  # for the notice to come to where it waits


class Stuck(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_nlink = 2
        entry.st_mode = stat.S_IFDIR | 0o755
        return entry

    async def lookup(self, parent_inode, name, ctx=None):
        raise pyfuse3.FUSEError(errno.ENOENT)

    async def create(self, parent_inode, name, mode, flags, ctx):
        notice = threading.Thread(
            target=pyfuse3.invalidate_entry, args=(pyfuse3.ROOT_INODE, b"other"), daemon=True
        )
        notice.start()
        await trio.sleep(SETTLED_S)
        assert notice.is_alive(), "it was to wait"
        print("stuck", flush=True)
        await trio.sleep_forever()


async def serve(guard: contextlib.AbstractContextManager[None]) -> None:
    with guard:
        print("ready", flush=True)
        await pyfuse3.main()


def main(mountpoint: str, store: str, mode: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{store}/node.sock")
    listener.listen()
    options = {"subtype=kvfs", f"fsname={source_of(store)}"}
    pyfuse3.init(Stuck(), mountpoint, options)
    entry = find_mount(mountpoint)
    assert entry is not None
    device = entry.device if mode == "guarded" else None
    trio.run(serve, guarded(device))
    pyfuse3.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
