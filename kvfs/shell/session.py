"""What every command gets that looks at a store.

It writes to `out` and returns the exit code: 0, or 1 when it found a problem. What cannot run
raises a `KvfsError`.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from kvfs.client import Client
from kvfs.meta.contract import Inode
from kvfs.names import escape
from kvfs.shell.locate import Place
from kvfs.shell.progress import ShowProgress, no_progress
from kvfs.shell.render import age_text, time_text


@dataclass(frozen=True, slots=True)
class Session:
    """What every command gets."""

    client: Client
    place: Place
    out: IO[str]
    is_json: bool
    now_ns: int
    progress: ShowProgress = no_progress

    def lines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.out.write(line + "\n")

    def ago(self, time_ns: int) -> str:
        return f"{age_text(self.now_ns - time_ns)} ago" if time_ns else "never"


_TYPES = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def inode_document(path: bytes, inode: Inode) -> dict[str, Any]:
    """What every JSON document says of a file."""
    return {
        "path": "/" + escape(path),
        "type": _TYPES.get(stat.S_IFMT(inode.mode), "unknown"),
        "inode": inode.ino,
        "mode": f"{stat.S_IMODE(inode.mode):04o}",
        "links": inode.nlink,
        "uid": inode.uid,
        "gid": inode.gid,
        "size_bytes": inode.size_bytes,
        "digest": inode.digest.hex() or None,
        "pinned": inode.pinned,
        "modified": time_text(inode.mtime_ns),
        "last_used": time_text(inode.used_ns),
        "target": escape(inode.target) or None,
    }
