"""Files on their way to be blobs, and what they are to become."""

from dataclasses import dataclass

from kvfs.config import whole_pages
from kvfs.meta.contract import ChunkInfo, Publication

_WASTED_SHARE = 8


@dataclass(slots=True, eq=False)
class Stage:
    """A private file on its way to be a blob. Whoever staged it owns it and its descriptor until it
    is published or discarded."""

    directory: int
    name: str
    fd: int
    reserved_bytes: int = 0
    on_disk_bytes: int = 0  # of those, what the disk's own figures count already
    is_open: bool = True
    adopted_as: bytes = b""  # the digest under which the file lies
    ahead_bytes: int = 0  # so many got their blocks before anything was written

    def wastes_blocks(self, size_bytes: int) -> bool:
        """Whether a file of this size would keep many more blocks than it needs."""
        needed_bytes = whole_pages(size_bytes)
        return self.ahead_bytes - needed_bytes > needed_bytes // _WASTED_SHARE


@dataclass(frozen=True, slots=True)
class Content:
    """A staged file with what it is to become: new content of an inode, or of a path."""

    stage: Stage
    digest: bytes
    size_bytes: int
    mtime_ns: int
    ino: int = 0
    path: bytes = b""
    uid: int = 0
    gid: int = 0
    chunk: ChunkInfo | None = None
    ctime_ns: int = 0  # when its bytes came; 0: now
    is_hashed: bool = False  # by the node, from the staged file
    is_writable: bool = False  # somebody can still write to the file: see `kvfs.open_blobs`

    def publication(self, directory: int, allocated_bytes: int) -> Publication:
        """The same for the metadata, with where the bytes lie and what they take there."""
        return Publication(
            digest=self.digest,
            size_bytes=self.size_bytes,
            allocated_bytes=allocated_bytes,
            directory=directory,
            mtime_ns=self.mtime_ns,
            ino=self.ino,
            path=self.path,
            uid=self.uid,
            gid=self.gid,
            chunk=self.chunk,
            ctime_ns=self.ctime_ns,
            is_open=self.is_writable and bool(self.stage.adopted_as),
        )
