"""One blob from this node to tiers, each blob once at a time."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto

import trio

from kvfs.blobs import BlobDirectory
from kvfs.config import BEHIND_PUTS_MAX, TIER_FULL_S
from kvfs.errors import Corrupt, OutOfSpace, Unavailable
from kvfs.node import Node
from kvfs.tiering.holdings import Holdings
from kvfs.tiering.opening import FILLED_BY_OTHERS, ConfiguredTier
from kvfs.tiering.policy import missing_tiers, wanted_more
from kvfs.tiering.room import Room
from kvfs.tiers.contract import WritableTier

log = logging.getLogger(__name__)


class _Outcome(Enum):
    DONE = auto()
    FULL = auto()  # the tier, as it says
    FAILED = auto()  # the tier: another may take it
    LOST = auto()  # the blob: there is nothing to copy


class Copier:
    """In the node's thread."""

    def __init__(self, node: Node, holdings: Holdings, room: Room) -> None:
        self._node = node
        self._holdings = holdings
        self._room = room
        self._under_way: dict[bytes, trio.Event] = {}
        self._limiter = trio.CapacityLimiter(BEHIND_PUTS_MAX)
        self.copied_files = 0
        self.copied_bytes = 0

    @property
    def under_way(self) -> int:
        """How many blobs are copied now."""
        return len(self._under_way)

    async def copy(self, digest: bytes, copies: int, deadline_s: float | None = None) -> bool:
        """Have a blob that is here on so many tiers; False when it is not, and may be later. Each
        put may take so long, or as long as its tier lets it."""
        async with self._turn(digest):
            return await self._copy_once(digest, copies, deadline_s)

    async def keep(self, digest: bytes, deadline_s: float) -> bool:
        """Have the last copy of a blob, which is here, in a tier where it is likely to stay: if one
        takes it without giving up another last copy, then in that. As `copy` else."""
        async with self._turn(digest):
            return await self._keep_once(digest, deadline_s)

    @asynccontextmanager
    async def _turn(self, digest: bytes) -> AsyncIterator[None]:
        while (other := self._under_way.get(digest)) is not None:
            await other.wait()
        done = self._under_way[digest] = trio.Event()
        try:
            yield
        finally:
            del self._under_way[digest]
            done.set()

    async def _keep_once(self, digest: bytes, deadline_s: float) -> bool:
        (blob,) = self._node.meta.blobs([digest])
        if blob is None or self._holdings.held([digest]):
            return True
        for spares_last in (True, False):
            for one in self._room.by_room(blob.size_bytes):
                outcome = await self._try(one, digest, blob.size_bytes, deadline_s, spares_last)
                if outcome in (_Outcome.DONE, _Outcome.LOST):
                    return True
        return False

    async def _copy_once(self, digest: bytes, copies: int, deadline_s: float | None) -> bool:
        (blob,) = self._node.meta.blobs([digest])
        if blob is None:
            return True  # it is not here any more: nothing can be copied, or need be
        order = self._holdings.numbers
        for number in missing_tiers(copies, order, *self._holdings.masks([digest])):
            if not wanted_more(copies, order, *self._holdings.masks([digest])):
                break
            one = self._holdings.tier(number)
            outcome = await self._try(one, digest, blob.size_bytes, deadline_s)
            if outcome is _Outcome.LOST:
                return True
        return not wanted_more(copies, order, *self._holdings.masks([digest]))

    async def _try(
        self,
        one: ConfiguredTier,
        digest: bytes,
        size_bytes: int,
        deadline_s: float | None,
        spares_last: bool = False,
    ) -> _Outcome:
        if not one.is_usable or one.full_until_s > trio.current_time():
            return _Outcome.FAILED
        outcome = await self._put(one, digest, size_bytes, deadline_s, spares_last)
        if outcome is not _Outcome.FULL or spares_last:
            return outcome
        if await self._room.note_full(one, size_bytes):
            outcome = await self._put(one, digest, size_bytes, deadline_s, spares_last)
        return outcome

    async def _put(
        self,
        one: ConfiguredTier,
        digest: bytes,
        size_bytes: int,
        deadline_s: float | None,
        spares_last: bool,
    ) -> _Outcome:
        async with self._room.granted(one, size_bytes, spares_last) as is_granted:
            if is_granted:
                return await self._put_there(one, digest, size_bytes, deadline_s)
        limit_bytes = one.config.max_bytes
        if not spares_last and limit_bytes is not None and size_bytes <= limit_bytes:
            one.full_until_s = trio.current_time() + TIER_FULL_S
        return _Outcome.FAILED

    async def _put_there(
        self, one: ConfiguredTier, digest: bytes, size_bytes: int, deadline_s: float | None
    ) -> _Outcome:
        contents = self._node.contents
        directory, tier = contents.directory_of(digest), one.tier
        if directory is None:
            return _Outcome.LOST
        if tier is None or digest in self._node.open_blobs:
            return _Outcome.FAILED
        try:
            is_new = await trio.to_thread.run_sync(
                _put_blob, tier, directory, digest, size_bytes, deadline_s,
                limiter=self._limiter, abandon_on_cancel=True,
            )  # fmt: skip
        except Corrupt:
            return await self._look_at(digest)
        except FileNotFoundError:
            fd = contents.open_blob(digest)  # which sees what has become of it
            if fd is None:
                return _Outcome.LOST
            os.close(fd)
            return _Outcome.FAILED
        except OSError as error:
            contents.note_unreadable(digest, error)
            return _Outcome.FAILED
        except OutOfSpace as error:
            log.info("%s", error)
            return _Outcome.FULL
        except Unavailable as error:
            log.info("blob %s: %s", digest.hex(), error)
            return _Outcome.FAILED
        self._holdings.note_held(digest, size_bytes, one.number)
        if is_new:
            self.copied_files += 1
            self.copied_bytes += size_bytes
        return _Outcome.DONE

    async def _look_at(self, digest: bytes) -> _Outcome:
        """A blob could not be read, or has other bytes than its digest says."""
        contents = self._node.contents
        try:
            await contents.check(digest, again=True)
        except Corrupt:
            return _Outcome.LOST
        except OSError as error:
            contents.note_unreadable(digest, error)
        return _Outcome.FAILED


def _put_blob(
    tier: WritableTier,
    directory: BlobDirectory,
    digest: bytes,
    size_bytes: int,
    deadline_s: float | None,
) -> bool:
    """In a worker thread, which may go on when nobody waits for it: so it has a descriptor of its
    own. False when another node has put the same already."""
    if tier.kind in FILLED_BY_OTHERS and tier.has([digest], deadline_s) == [size_bytes]:
        return False
    fd = directory.open_blob(digest)
    try:
        tier.put(digest, fd, size_bytes, deadline_s)
    finally:
        os.close(fd)
    return True
