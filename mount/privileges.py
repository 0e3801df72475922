"""Set-user-ID and set-group-ID bits go when somebody else than root changes a file's bytes.

The kernel sees to it where it writes, or has the pages; this is for what it leaves to the mount.
"""

import stat

from kvfs.meta.contract import Changes
from kvfs.node import Node


def drop_privileges(node: Node, ino: int) -> None:
    """Take the bits from a file, if it has them."""
    inode = node.meta.inode(ino)
    if inode is None:
        return
    mode = stat.S_IMODE(inode.mode) & ~stat.S_ISUID
    if mode & stat.S_IXGRP:
        mode &= ~stat.S_ISGID
    if mode != stat.S_IMODE(inode.mode):
        node.meta.set_attributes(ino, Changes(mode=mode), node.now_ns())
