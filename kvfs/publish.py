"""Making staged files visible: their bytes under their digest, their names in one transaction.

Sync code from the intent to the transaction, so that no one sees a record without its file. Crash
cases are in `docs/concurrency.md`: a file that was brought into place for nothing is found by its
intent.
"""

import os
from collections.abc import Callable, Sequence

import trio

from kvfs.blobs import BlobDirectory
from kvfs.checks import Checks
from kvfs.counters import Counters
from kvfs.meta.contract import Inode, MetaEngine, Published
from kvfs.reclaim import Reclaim
from kvfs.space import Space
from kvfs.stage import Content, Stage
from kvfs.stored import allocated_bytes


class Publisher:
    """Publications of one node. `next_stamp(count)` gives the newest of so many stamps in the order
    of use; `tell(published)` hears of each name that came and of what it replaced; `lose(digest)`
    drops the names of a blob whose file is gone."""

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
        lose: Callable[[bytes], None],
    ) -> None:
        self._directories = directories
        self._meta = engine
        self._space = space
        self._reclaim = reclaim
        self._checks = checks
        self._counters = counters
        self._next_stamp = next_stamp
        self._tell = tell
        self._lose = lose

    async def prepare(self, contents: Sequence[Content]) -> None:
        """Do what is slow in a publication and may be done before it."""
        for index, directory in enumerate(self._directories):
            digests = [c.digest for c in contents if c.stage.directory == index]
            if directory is not None and any(map(directory.lacks_leaf, digests)):
                await trio.to_thread.run_sync(directory.make_leaves, digests)

    def publish(self, contents: Sequence[Content]) -> list[Inode]:
        """Publish staged files, all in one transaction; descriptors stay open. Raises
        `NamespaceError`; the stages are used up all the same."""
        for content in contents:
            assert content.stage.is_open
        places: dict[bytes, int] = {}
        try:
            return self._publish(contents, places)
        except BaseException:
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
        self._reclaim.reap()
        return [result.inode for result in published]

    def _place(self, contents: Sequence[Content], places: dict[bytes, int]) -> None:
        """Bring each staged file under its digest, or drop it where equal bytes lie already; notes
        the directory of each digest. Intents first: a crash from here to the end of the publication
        is recovered."""
        known = self._meta.blobs([content.digest for content in contents])
        for content, blob in zip(contents, known, strict=True):
            if blob is not None and self._is_present(
                content.digest, blob.directory, blob.size_bytes
            ):
                places[content.digest] = blob.directory
            elif blob is not None:
                self._lose(content.digest)
        fresh = {}
        for content in contents:
            if content.digest not in places and content.digest not in fresh:
                fresh[content.digest] = content.stage
        self._meta.intend([(digest, stage.directory) for digest, stage in fresh.items()])
        for content in contents:
            stage = content.stage
            directory = self._directories[stage.directory]
            assert directory is not None
            if fresh.get(content.digest) is stage:
                directory.adopt(stage.name, content.digest)
                places[content.digest] = stage.directory
                self._checks.forget(content.digest)
            else:
                self._counters.deduplicated_bytes += content.size_bytes
                directory.discard(stage.name)
            self._end_stage(stage)

    def _displace(self, places: dict[bytes, int]) -> None:
        """Nothing was published: take away the files that nothing points to."""
        known = self._meta.blobs(list(places))
        orphans = [d for d, blob in zip(places, known, strict=True) if blob is None]
        for digest in orphans:
            directory = self._directories[places[digest]]
            path = directory.trash(digest) if directory is not None else None
            if path is not None:
                self._reclaim.remove(places[digest], path, allocated_bytes(os.stat(path)))
        self._meta.bury(orphans)

    def _is_present(self, digest: bytes, index: int, size_bytes: int) -> bool:
        directory = self._directories[index]
        try:
            return directory is not None and (
                os.stat(directory.blob_path(digest)).st_size == size_bytes
            )
        except FileNotFoundError:
            return False

    def _end_stage(self, stage: Stage) -> None:
        stage.is_open = False
        self._space.end_stage(stage.directory, stage.reserved_bytes)
