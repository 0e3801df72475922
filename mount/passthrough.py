"""Files that the kernel serves by itself, from a backing file: FUSE passthrough.

Once the kernel has a backing file for an open, its reads, writes and mappings never reach this
process, but for reads and writes of one that writes with O_DIRECT (`mount.kernel`). The kernel has
one rule, and answers EIO to an open that breaks it: while an inode is open in passthrough, every
open of it is, with the same backing id; while it is open through the page cache, none is. So how an
inode is served is settled by its first open, until its last release:

| the inode is           | an open with local bytes      | an open while they are fetched  |
|------------------------|-------------------------------|---------------------------------|
| not open               | PASSTHROUGH, by a new id      | PYTHON                          |
| open in PASSTHROUGH    | the same id                   | the same id                     |
| open from PYTHON       | PYTHON                        | PYTHON                          |

When the kernel refuses an id, the inode is served from Python, and `why_not` says what is wrong.
An inode number here stands for one run of bytes (`mount.states`): who wants other bytes, or
passthrough for a file that was opened while it was fetched, takes a new number.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyfuse3

# From linux/fuse.h; Python's own fcntl module does not name them.
BACKING_OPEN = 0x4010E501  # struct fuse_backing_map { int32 fd; uint32 flags; uint64 padding; }
BACKING_CLOSE = 0x4004E502  # uint32
_BACKING_MAP = struct.Struct("=iIQ")
_BACKING_ID = struct.Struct("=I")
_CAP_SYS_ADMIN = 21

# Whether this pyfuse3 has our patches; the stock one has no such attribute, nor do its types.
IS_PATCHED = hasattr(pyfuse3, "passthrough_enabled")
HAS_NOFLUSH = hasattr(pyfuse3.FileInfo, "noflush")  # an older patched one, left by set-up, has not

Ioctl = Callable[[int, int, bytearray], int]


def _ioctl(fd: int, request: int, argument: bytearray) -> int:
    # A bytearray, changed in place: with bytes, the returned id is lost.
    result: int = fcntl.ioctl(fd, request, argument, True)
    return result


# Whether a mount can do it ------------------------------------------------------------------------
def find_obstacle() -> str | None:
    """Why no mount of this process can do passthrough, in words for people; None if it may."""
    return judge_before_mount(
        is_patched=IS_PATCHED,
        status=Path("/proc/self/status").read_text(encoding="ascii", errors="replace"),
    )


def judge_before_mount(*, is_patched: bool, status: str) -> str | None:
    """`find_obstacle` on given facts; `status` is the text of /proc/self/status."""
    if not is_patched:
        return "this pyfuse3 cannot do it: run scripts/setup passthrough"
    if not has_capability(status, _CAP_SYS_ADMIN):
        return "it needs CAP_SYS_ADMIN: mount as root"
    return None


def has_capability(status: str, capability: int) -> bool:
    """Whether a /proc/PID/status says that a capability is in effect."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> capability & 1)
    return False


def find_obstacle_in_mount() -> str | None:
    """Why the mount that `pyfuse3.init` made, and the kernel has answered, cannot do it."""
    obstacle = find_obstacle()
    if obstacle is None and not getattr(pyfuse3, "passthrough_enabled", False):
        return (
            "the kernel did not offer it: Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH is"
            f" needed, and libfuse 3.17 or newer; this is Linux {os.uname().release}"
        )
    return obstacle


_REFUSALS = {
    errno.EPERM: "the kernel wants CAP_SYS_ADMIN outside of any user namespace",
    errno.ELOOP: "the store lies on a stacked file system, such as overlayfs; put it on a disk",
    errno.EOPNOTSUPP: "the store's file system is none that can back a file",
    errno.ENOTTY: "the kernel does not know backing files: Linux 6.9 or newer is needed",
}


def explain_refusal(error: OSError) -> str:
    """Why the kernel takes no backing file, in words for people."""
    return _REFUSALS.get(error.errno or 0, f"the kernel refuses a backing file: {error.strerror}")


# Backing ids --------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Served:
    """How an open inode is served. `backing_id` 0: from Python."""

    backing_id: int
    content: tuple[int, int]  # device and inode of the backing file
    opens: int = 1


class BackingIds:
    """How each open inode of one mount is served; see the module's docstring for the rule.

    `why_not`: why opens are served from Python, as far as known; None while passthrough works.
    """

    def __init__(self, session_fd: int, why_not: str | None, ioctl: Ioctl = _ioctl) -> None:
        """`session_fd`: the FUSE descriptor, which stays pyfuse3's. With `why_not`, every open is
        served from Python."""
        self.why_not = why_not
        self._is_possible = why_not is None
        self._session_fd = session_fd
        self._ioctl = ioctl
        self._served: dict[int, _Served] = {}
        self._in_python = 0  # of those

    def enter(self, number: int, fd: int | None) -> int:
        """Count one more open of an inode: its backing id, 0 to serve the open from Python.

        `fd`: the inode's bytes, whole and local, else None. It stays the caller's, who may close
        it at once. Each `enter` is paired with a `leave`, also when the open then fails.
        """
        served = self._served.get(number)
        if served is not None:
            if served.backing_id and fd is not None:
                assert _content_of(fd) == served.content, "one inode number, one run of bytes"
            served.opens += 1
            return served.backing_id
        backing_id, content = 0, (0, 0)
        if self._is_possible and fd is not None:
            content = _content_of(fd)
            backing_id = self._open(fd)
        self._served[number] = _Served(backing_id, content)
        self._in_python += not backing_id
        return backing_id

    def leave(self, number: int) -> None:
        """An open of an inode was released, or failed after `enter`."""
        served = self._served[number]
        served.opens -= 1
        if served.opens == 0:
            del self._served[number]
            self._in_python -= not served.backing_id
            self._close(served.backing_id)

    def is_passthrough(self, number: int) -> bool:
        """Whether the inode's opens are served by the kernel, so that its writes are not seen."""
        served = self._served.get(number)
        return served is not None and served.backing_id != 0

    def count(self) -> tuple[int, int]:
        """How many open inodes the kernel serves, and how many Python does."""
        return len(self._served) - self._in_python, self._in_python

    def close(self) -> None:
        """Give back every id. Files that are open keep their backing files."""
        for served in self._served.values():
            self._close(served.backing_id)
        self._served.clear()
        self._in_python = 0

    def _open(self, fd: int) -> int:
        try:
            backing_id = self._ioctl(
                self._session_fd, BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0))
            )
        except OSError as error:
            self.why_not = explain_refusal(error)
            return 0
        assert backing_id > 0
        return backing_id

    def _close(self, backing_id: int) -> None:
        if backing_id:
            argument = bytearray(_BACKING_ID.pack(backing_id))
            self._ioctl(self._session_fd, BACKING_CLOSE, argument)


def _content_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
