"""Files that were closed and are yet to be published, and how the next start finds them.

A mount may put off the digest of a large file that its writers have closed (`mount.settling`), for
close() need not wait for that. Until the file is published its stage has a second name in
`staging`, a hard link that says what it is to become. A node that dies leaves it to the next one,
which publishes what was closed: `publish_kept`, before anything that is unpublished is dropped. A
file whose size or mtime is not what the name says was written to after its close, and is a miss.
So is one whose inode has other bytes by now than when it was closed: it was published, or lay in a
directory that was missing at a start. All are where the metadata was made anew.
"""

import errno
import logging
import os
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from kvfs.belonging import Belonging
from kvfs.blob_files import StagingFile, open_blob_file, remove_name
from kvfs.blobs import BlobDirectory
from kvfs.config import META_IDENTITY_BYTES
from kvfs.errors import InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.meta.contract import DIGEST_BYTES, Inode
from kvfs.node import Node
from kvfs.stage import Stage
from kvfs.stored import copy_bytes, may_have_writer

log = logging.getLogger(__name__)

_NOTE = struct.Struct(f">QQqq{DIGEST_BYTES}s{META_IDENTITY_BYTES}s")
# What a file system says that has no hard links, or no more of them for a file.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Kept:
    """A stage that is to become the content of an inode."""

    stage: str
    ino: int
    size_bytes: int
    changed_ns: int  # mtime of the stage, which each write moves
    mtime_ns: int  # what the inode is to show
    replaces: bytes  # the digest of what the inode showed, zeros for nothing
    metadata: bytes  # whose inode it is: `MetaEngine.identity`

    @property
    def name(self) -> str:
        """What the stage is also called, in `staging`."""
        times = self.changed_ns, self.mtime_ns
        note = _NOTE.pack(self.ino, self.size_bytes, *times, self.replaces, self.metadata)
        return f"{self.stage}.{note.hex()}"

    @classmethod
    def parse(cls, name: str) -> "Kept | None":
        """What `name` says; None for one that says nothing."""
        stage, _, note = name.rpartition(".")
        try:
            return cls(stage, *_NOTE.unpack(bytes.fromhex(note)))
        except (ValueError, struct.error):
            return None


def keep(directory: BlobDirectory, kept: Kept) -> bool:
    """Have the next start know of a closed file; False where the file system cannot. OSError."""
    try:
        os.link(directory.stage_path(kept.stage), directory.stage_path(kept.name))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def refuse_to_join(
    path: str, directories: Sequence[BlobDirectory | None], belonging: Belonging | None
) -> None:
    """Keep a store that was alone from a cluster while it has closed files that no node published:
    their inodes are those of the metadata that it had alone. Raises `InvalidInput`."""
    count = sum(len(d.kept_names()) for d in directories if d is not None)
    if count and belonging is None:
        raise InvalidInput(
            path,
            f"was killed with {count} closed files that are not stored yet, and would be lost in a"
            " cluster; start it once without one, stop it, then join",
        )


async def publish_kept(node: Node) -> list[Inode]:
    """Publish what was closed when a node died; these files. Tiers hear of none of them. Raises
    `OutOfSpace`, and loses nothing, where the disk is full."""
    published = []
    for index, directory in enumerate(node.directories):
        for name in directory.kept_names() if directory is not None else ():
            assert directory is not None
            kept = Kept.parse(name)
            try:
                if kept is not None:
                    inode = await _publish(node, index, directory, kept)
                    published += [] if inode is None else [inode]
            except (KvfsError, OSError) as error:
                if isinstance(error, OutOfSpace) or _is_full(error):
                    raise OutOfSpace(
                        f"{directory.path}: its disk is full, and files that were closed before a"
                        f" crash are still to be stored ({error}); free some room, then start again"
                    ) from error
                log.error("a file that was closed before a crash is lost: %s", error)
            remove_name(directory.stage_path(name))
    return published


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def shown_digest(inode: Inode) -> bytes:
    """Of what an inode shows, as a name says it."""
    return inode.digest or bytes(DIGEST_BYTES)


async def _publish(node: Node, index: int, directory: BlobDirectory, kept: Kept) -> Inode | None:
    """Give a file that was closed its bytes; None where it does not want them. KvfsError,
    OSError."""
    if kept.metadata != node.meta.identity:
        return None  # the metadata was made anew since: the number may be of another file
    inode = node.meta.inode(kept.ino)
    if inode is None or inode.nlink == 0 or not inode.is_regular:
        return None  # it was removed
    if shown_digest(inode) != kept.replaces:
        return None  # the node died when it was published, or this is from before a later start
    fd = open_blob_file(directory.stage_path(kept.name))
    try:
        async with _stage_of(node, index, directory, kept, fd) as stage:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (kept.size_bytes, kept.changed_ns):
                raise Unavailable(f"inode {kept.ino} was written to after its close")
            return await node.publish_stage(stage, kept.ino, kept.mtime_ns)
    finally:
        os.close(fd)


@asynccontextmanager
async def _stage_of(
    node: Node, index: int, directory: BlobDirectory, kept: Kept, fd: int
) -> AsyncIterator[Stage]:
    """A stage of this node with a kept file's bytes: the file itself, or a copy where a writer has
    outlived its node and still has it open."""
    has_writer = may_have_writer(fd)
    if has_writer:
        staged = directory.stage()
    else:
        staged = StagingFile(directory.link_stage(kept.name), os.dup(fd))
    stage = Stage(index, staged.name, staged.fd)
    node.space.begin_stage(stage)
    try:
        if has_writer:
            await trio.to_thread.run_sync(copy_bytes, fd, stage.fd, kept.size_bytes)
        yield stage
    finally:
        node.publisher.drop_stage(stage)
        os.close(stage.fd)
        # A rename over another name of the same file, which a crash in a publication leaves under
        # its digest, leaves both.
        remove_name(directory.stage_path(staged.name))
