"""Making staged files visible: their bytes under their digest, their names in one transaction.

Sync code from the intent to the transaction, so that no one sees a record without its file. Crash
cases are in `docs/concurrency.md`: a file that was brought into place for nothing is found by its
intent.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence

import trio

from kvfs.blobs import BlobDirectory
from kvfs.checks import Checks
from kvfs.counters import Counters
from kvfs.errors import NamespaceError
from kvfs.meta.contract import Blob, Inode, MetaEngine, Publication, Published
from kvfs.open_blobs import OpenBlobs
from kvfs.reclaim import Reclaim
from kvfs.space import Space
from kvfs.stage import Content, Stage
from kvfs.stored import allocated_bytes

log = logging.getLogger(__name__)


class InUse(Exception):
    """A file that somebody can write to must not take the place of bytes that others' names have.
    Nothing has moved; a copy of it may."""


class Publisher:
    """Publications of one node. `next_stamp(count)` gives the newest of so many stamps in the order
    of use; `tell(published)` hears of each name that came and of what it replaced; `reap` removes
    the files of doomed blobs and never raises: what was published is, whatever comes after it."""

    def __init__(
        self,
        directories: Sequence[BlobDirectory | None],
        engine: MetaEngine,
        space: Space,
        reclaim: Reclaim,
        checks: Checks,
        counters: Counters,
        next_stamp: Callable[[int], int],
        tell: Callable[[Published], None],
        reap: Callable[[], None],
        open_blobs: OpenBlobs,
    ) -> None:
        self._directories = directories
        self._meta = engine
        self._space = space
        self._reclaim = reclaim
        self._checks = checks
        self._counters = counters
        self._next_stamp = next_stamp
        self._tell = tell
        self._reap = reap
        self._open_blobs = open_blobs

    async def prepare(self, contents: Sequence[Content]) -> None:
        """Do what is slow in a publication and may be done before it."""
        for index, directory in enumerate(self._directories):
            digests = [c.digest for c in contents if c.stage.directory == index]
            if directory is not None and any(map(directory.lacks_leaf, digests)):
                await trio.to_thread.run_sync(directory.make_leaves, digests)

    def publish(self, contents: Sequence[Content]) -> list[Inode]:
        """Publish staged files, all in one transaction; descriptors stay open. Raises
        `NamespaceError`, `OutOfSpace`, `InUse` and OSError. The stages are used up then as well,
        unless nothing had moved: who has but one may try again."""
        for content in contents:
            assert content.stage.is_open
        places: dict[bytes, int] = {}
        try:
            return self._publish(contents, places)
        except BaseException:
            if not all(content.stage.is_open for content in contents):
                for content in contents:
                    self.drop_stage(content.stage)
            if places:
                self._displace(places)
            raise

    def _publish(self, contents: Sequence[Content], places: dict[bytes, int]) -> list[Inode]:
        self._place(contents, places)
        publications = [
            content.publication(places[content.digest], allocated_bytes(os.fstat(content.stage.fd)))
            for content in contents
        ]
        published = self._meta.publish(publications, self._next_stamp(len(contents)))
        for content, result in zip(contents, published, strict=True):
            self._counters.published_files += 1
            self._counters.published_bytes += content.size_bytes
            self._tell(result)
        self._reap()
        return [result.inode for result in published]

    def publish_found(self, publication: Publication) -> bool:
        """Give a blob that lies where the publication says a name that was lost; False when the
        name exists, or the blob has gone meanwhile. Raises `NamespaceError`."""
        digest = publication.digest
        found = Blob(digest, publication.size_bytes, 0, publication.directory)
        if (
            self._meta.resolve([publication.path])[0] is not None
            or digest in self._open_blobs
            or not self._is_present(found)
        ):
            return False
        if self._meta.blobs([digest])[0] is None:
            self._checks.forget(digest)
        (published,) = self._meta.publish([publication], self._next_stamp(1))
        self._tell(published)
        return True

    def _place(self, contents: Sequence[Content], places: dict[bytes, int]) -> None:
        """Bring each staged file under its digest, or drop it where equal bytes lie already; notes
        the directory of each digest. Intents first: a crash from here to the end of the publication
        is recovered."""
        known = self._meta.blobs([content.digest for content in contents])
        lost: dict[bytes, Blob] = {}  # in use, but their bytes are not where they should be
        open_blobs: dict[bytes, Blob] = {}  # in use, and theirs may not be those bytes for long
        for content, blob in zip(contents, known, strict=True):
            if blob is None:
                continue
            if blob.size_bytes != content.size_bytes:  # not those bytes: no name may show them
                raise NamespaceError(errno.EINVAL, content.path)
            if content.digest in self._open_blobs:
                open_blobs[content.digest] = blob
            elif not self._is_present(blob):
                lost[content.digest] = blob
            else:
                places[content.digest] = blob.directory
                continue
            if content.is_writable:
                raise InUse(content.digest)
        fresh = {}
        for content in contents:
            if content.digest not in places and content.digest not in fresh:
                fresh[content.digest] = content.stage
        self._meta.intend([(digest, stage.directory) for digest, stage in fresh.items()])
        places.update((digest, stage.directory) for digest, stage in fresh.items())
        for content in contents:
            stage = content.stage
            directory = self._directories[stage.directory]
            assert directory is not None
            if fresh.get(content.digest) is stage:
                directory.adopt(stage.name, content.digest)
                stage.adopted_as = content.digest
                if content.is_writable:
                    self._open_blobs.begin(content.digest)
                if content.is_hashed:  # these bytes, not those of a copy that lay there already
                    changed_ns = os.fstat(stage.fd).st_mtime_ns
                    self._checks.note(content.digest, changed_ns)
                else:
                    self._checks.forget(content.digest)
                if content.digest in lost:
                    self._note_lost(lost[content.digest])
                    self._replace(lost[content.digest], stage)
                elif content.digest in open_blobs:
                    self._replace(open_blobs[content.digest], stage)
            else:
                self._counters.deduplicated_bytes += content.size_bytes
                directory.discard(stage.name)
            self._end_stage(stage)

    def _note_lost(self, blob: Blob) -> None:
        if self._directories[blob.directory] is not None:
            self._counters.missing_blobs += 1
            log.warning("blob %s had lost its file; a new copy takes its place", blob.digest.hex())

    def _replace(self, blob: Blob, stage: Stage) -> None:
        """The names of a blob live on by the copy that has just come into place."""
        self._meta.relocate(blob.digest, stage.directory, allocated_bytes(os.fstat(stage.fd)))
        if blob.directory != stage.directory:
            self.take_away(blob.digest, blob.directory)

    def _displace(self, places: dict[bytes, int]) -> None:
        """Nothing was published: take away the files that nothing points to, and the intents."""
        known = self._meta.blobs(list(places))
        orphans = [
            digest
            for (digest, index), blob in zip(places.items(), known, strict=True)
            if blob is None or blob.directory != index
        ]
        for digest in orphans:
            self.take_away(digest, places[digest])
        self._meta.bury(list(places))

    def take_away(self, digest: bytes, index: int) -> None:
        """Remove what lies at a blob's place."""
        directory = self._directories[index]
        try:
            path = directory.trash(digest) if directory is not None else None
            if path is not None:
                self._reclaim.remove(index, path, allocated_bytes(os.stat(path)))
        except OSError as error:
            log.warning("blob %s cannot be removed, gc will: %s", digest.hex(), error)

    def _is_present(self, blob: Blob) -> bool:
        directory = self._directories[blob.directory]
        return directory is not None and directory.has_blob(blob.digest, blob.size_bytes)

    async def adopt_copy(
        self,
        stage: Stage,
        digest: bytes,
        size_bytes: int,
        note: Callable[[Publication], bool],
    ) -> None:
        """Make a stage that holds a blob's bytes, as they came from another node and were checked,
        this node's copy; `note` has the metadata know. One that is not wanted is left to the
        caller, as is the descriptor."""
        directory = self._directories[stage.directory]
        assert directory is not None
        if directory.lacks_leaf(digest):
            await trio.to_thread.run_sync(directory.make_leaves, [digest])
        known = self._meta.blobs([digest])[0]
        if known is not None and self._directories[known.directory] is not None:
            return  # somebody has stored the same here meanwhile
        allocated = allocated_bytes(os.fstat(stage.fd))
        self._meta.intend([(digest, stage.directory)])
        directory.adopt(stage.name, digest)
        stage.adopted_as = digest
        self._checks.note(digest, os.fstat(stage.fd).st_mtime_ns)
        self._end_stage(stage)
        copy = Publication(digest, size_bytes, allocated, stage.directory, self._next_stamp(1))
        is_noted = False
        try:
            is_noted = note(copy)
        finally:
            if not is_noted:
                self.take_away(digest, stage.directory)
                self._meta.bury([digest])

    def drop_stage(self, stage: Stage) -> None:
        """Remove a stage's file unless it was used up; the descriptor is the caller's."""
        directory = self._directories[stage.directory]
        assert directory is not None
        if stage.is_open:
            self._end_stage(stage)
            written_bytes = allocated_bytes(os.fstat(stage.fd))
            self._reclaim.remove(stage.directory, directory.stage_path(stage.name), written_bytes)

    def _end_stage(self, stage: Stage) -> None:
        stage.is_open = False
        self._space.end_stage(stage)
