"""A bucket as a tier, through obstore: S3's protocol, Google's, Azure's, or a directory (`file:`).

A blob is the object `blobs/<hh>/<hh>/<digest>` below the URL's path. Objects appear whole or not at
all, and a blob is put in one request, so nothing partial stays behind either. `tier.json` beside
them says that this is the tier (`kvfs.tiers.object_mark`).

Calls of all threads run on one event loop in a thread of the tier: one that is late is cancelled
there, which closes its connection, so nothing hangs and no thread is lost. Bytes arrive in memory
of obstore and are copied once, into the caller's buffer, as long as the caller is there.

Nothing is tried twice: who reads has other tiers. Credentials come from the provider's own
variables (as `AWS_ACCESS_KEY_ID`), never from the configuration; what obstore says of an error is
cut before parts that may show one.
"""

import asyncio
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import obstore
import xxhash
from obstore.exceptions import BaseError
from obstore.store import from_url

from kvfs.config import (
    OBJECT_CONNECT_S,
    OBJECT_HEADS_MAX,
    OBJECT_LIST_ITEMS,
    TIER_PIECE_BYTES,
    TIER_SHOWN_BYTES,
)
from kvfs.errors import InvalidInput, TierStalled, TierTrouble
from kvfs.file_io import allocate
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.settings.words import TierConfig
from kvfs.tiers.contract import Source, WritableTier
from kvfs.tiers.object_mark import ObjectMark
from kvfs.tiers.sources import check_source, read_whole
from kvfs.tiers.threads import Gate

_NAME = re.compile(f"blobs/[0-9a-f]{{2}}/[0-9a-f]{{2}}/([0-9a-f]{{{2 * DIGEST_BYTES}}})")
_QUERY = re.compile(r"\?[^\s)\"']*")
_BEHIND_END = re.compile(r"\b416\b|range", re.IGNORECASE)  # one more question then tells
_SHOWN_CHARACTERS = 300
_CLOSE_S = 5.0
_STATUS = re.compile(r"status code: \d+[A-Za-z ]*")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_RETRIES: Any = {"max_retries": 0}  # of a type that only checkers can import

Result = TypeVar("Result")


class ObjectTier(WritableTier):
    """Blobs in a bucket. Several nodes may use one, and put the same blob at the same time."""

    def __init__(self, config: TierConfig, *, must_exist: bool = False) -> None:
        """Nothing is asked of the store yet. `must_exist`: for who only reads. It makes no mark and
        asks for none: the node that it tells of a miss asks itself. Raises `InvalidInput` for a URL
        that obstore does not know, or options that the store lacks."""
        super().__init__(config.name, config.kind, config.limits)
        self._store = _open_store(config)
        self._mark = None if must_exist else ObjectMark(config.name, self._store)
        self._is_directory = config.url.startswith("file:")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"kvfs-tier-{config.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    # Reading --------------------------------------------------------------------------------------
    def _read_into(
        self, digest: bytes, offset_bytes: int, buffer: memoryview, end_s: float
    ) -> bool:
        gate = Gate(buffer)
        try:
            return self._run(self._fetch(digest, offset_bytes, len(buffer), gate), end_s)
        finally:
            gate.shut()

    async def _fetch(self, digest: bytes, offset: int, size_bytes: int, gate: Gate) -> bool:
        copy = self._copy_pieces if self._is_directory else self._copy_stream
        try:
            return await copy(_name_of(digest), offset, size_bytes, gate)
        except FileNotFoundError:
            await self._check_mark()
            return False
        except BaseError as error:
            if _BEHIND_END.search(str(error)):
                (size,) = await self._sizes([digest])
                if size is None or size < offset + size_bytes:
                    return False
            raise

    async def _copy_stream(self, name: str, offset: int, size_bytes: int, gate: Gate) -> bool:
        """With one request, whose answer is copied as it arrives."""
        wanted = (offset, offset + size_bytes)
        found = await obstore.get_async(self._store, name, options={"range": wanted})
        if tuple(found.range) != wanted:
            return False  # it is shorter
        done = 0
        async for piece in found.stream(min_chunk_size=TIER_SHOWN_BYTES):
            view = memoryview(piece)
            if done + len(view) > size_bytes:
                raise TierTrouble(self.name, "gives more bytes than it was asked for")
            gate.fill(done, view)
            done += len(view)
        if done < size_bytes:
            raise TierTrouble(self.name, f"gives {done} of {size_bytes} bytes")
        return True

    async def _copy_pieces(self, name: str, offset: int, size_bytes: int, gate: Gate) -> bool:
        """As what costs nothing to ask: obstore streams a file by 8 KiB, twenty times as slowly."""
        for done in range(0, size_bytes, TIER_PIECE_BYTES):
            length = min(TIER_PIECE_BYTES, size_bytes - done)
            piece = await obstore.get_range_async(
                self._store, name, start=offset + done, length=length
            )
            if len(piece) < length:
                return False  # it is shorter
            gate.fill(done, memoryview(piece))
        return True

    def _has(self, digests: Sequence[bytes], end_s: float) -> list[int | None]:
        return self._run(self._sizes(digests), end_s)

    async def _sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        """With few questions open at the same time, however many there are."""
        sizes: list[int | None] = [None] * len(digests)
        waiting = iter(enumerate(digests))

        async def ask() -> None:
            for index, digest in waiting:
                sizes[index] = await self._size(digest)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(OBJECT_HEADS_MAX, len(digests))):
                group.create_task(ask())
        if None in sizes:
            await self._check_mark()
        return sizes

    async def _size(self, digest: bytes) -> int | None:
        try:
            return int((await obstore.head_async(self._store, _name_of(digest)))["size"])
        except FileNotFoundError:
            return None

    async def _check_mark(self) -> None:
        """Before anything is called a miss."""
        if self._mark is not None:
            await self._mark.check()

    # Writing --------------------------------------------------------------------------------------
    def _put(self, digest: bytes, source: Source, size_bytes: int, end_s: float) -> None:
        """A blob is wholly in memory meanwhile: as many as the tier's `writes_max`."""
        # Of its own: obstore keeps it for a moment after a call was cancelled.
        data = allocate(size_bytes)[:size_bytes]
        if isinstance(source, int):
            read_whole(source, data, digest)
        else:
            for begin in range(0, size_bytes, TIER_SHOWN_BYTES):
                end = begin + TIER_SHOWN_BYTES
                data[begin:end] = source[begin:end]
        check_source(xxhash.xxh3_128_digest(data), digest)
        self._run(self._store_whole(digest, data), end_s)

    async def _store_whole(self, digest: bytes, data: memoryview) -> None:
        if self._mark is not None:
            await self._mark.prepare_put()
        await obstore.put_async(self._store, _name_of(digest), data, use_multipart=False)

    def _remove(self, digest: bytes, end_s: float) -> None:
        self._run(self._delete(digest), end_s)

    async def _delete(self, digest: bytes) -> None:
        try:
            await obstore.delete_async(self._store, _name_of(digest))
        except FileNotFoundError:  # as a directory says
            pass

    # All of it ------------------------------------------------------------------------------------
    def _begin_scan(self) -> Callable[[float], list[tuple[bytes, int]] | None]:
        batches = _batches(self._store)
        return lambda end_s: self._run(self._next(batches), end_s)

    async def _next(
        self, batches: AsyncIterator[list[tuple[bytes, int]]]
    ) -> list[tuple[bytes, int]] | None:
        batch = await anext(batches, None)
        if batch is None:  # what was not among them is missing
            await self._check_mark()
        return batch

    def _capacity(self, end_s: float) -> None:
        """A bucket has no end."""

    # The loop -------------------------------------------------------------------------------------
    def _run(self, work: Coroutine[Any, Any, Result], end_s: float) -> Result:
        """Wait for work on the loop, which is cancelled at the end."""
        ending = _ending(work)
        try:
            future = asyncio.run_coroutine_threadsafe(ending, self._loop)
        except RuntimeError as error:
            ending.close()
            work.close()
            raise TierTrouble(self.name, "is closed") from error
        try:
            result, failure = future.result(max(0.0, end_s - time.monotonic()))
        except TimeoutError:
            future.cancel()
            raise TierStalled(self.name, "did not answer in time") from None
        except CancelledError:
            raise TierTrouble(self.name, "is closed") from None
        if isinstance(failure, BaseError | OSError):
            raise TierTrouble(self.name, _shown(failure)) from failure
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  # there was no failure


async def _ending(
    work: Coroutine[Any, Any, Result],
) -> tuple[Result | None, Exception | None]:
    """What became of work; asyncio would log an error that came when the caller had gone."""
    try:
        return await work, None
    except ExceptionGroup as group:  # the first says what the others would
        return None, group.exceptions[0]
    except Exception as error:  # noqa: BLE001  (raised where the work was asked for)
        return None, error


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _batches(store: Any) -> AsyncIterator[list[tuple[bytes, int]]]:
    """What obstore lists, as blobs; objects of others are passed over."""
    async for items in obstore.list(store, "blobs", chunk_size=OBJECT_LIST_ITEMS):
        matches = [(_NAME.fullmatch(item["path"]), item["size"]) for item in items]
        yield [(bytes.fromhex(match[1]), int(size)) for match, size in matches if match]


def _name_of(digest: bytes) -> str:
    name = digest.hex()
    return f"blobs/{name[:2]}/{name[2:4]}/{name}"


def _open_store(config: TierConfig) -> Any:
    limits = config.limits
    longest_s = max(limits.read_deadline_s, limits.write_deadline_s)
    options: Any = {
        "timeout": f"{math.ceil(longest_s) + 1}s",  # after every caller has gone
        "connect_timeout": f"{math.ceil(1000 * min(OBJECT_CONNECT_S, limits.read_deadline_s))}ms",
        "allow_http": config.endpoint.startswith("http://"),
    }
    endpoint_key = "base_url" if config.url.startswith("gs:") else "endpoint"
    named: Any = {endpoint_key: config.endpoint, "region": config.region}
    named = {key: value for key, value in named.items() if value}
    try:
        if config.url.startswith("file:"):
            return from_url(config.url, mkdir=True)
        return from_url(config.url, config=named, client_options=options, retry_config=_NO_RETRIES)
    except (BaseError, OSError, ValueError, TypeError) as error:
        raise InvalidInput(f"tier {config.name}", f"cannot be opened: {_shown(error)}") from error


def _shown(error: BaseException) -> str:
    """An error without what servers and obstore add to it: signatures, keys, bodies."""
    text = str(error)
    head = text.split("\n", 1)[0]
    status = _STATUS.search(head)
    code = _CODE.search(text)
    if status is not None:
        head = head[: status.end()].rstrip() + (f" ({code[1]})" if code else "")
    return _QUERY.sub("?...", head)[:_SHOWN_CHARACTERS] or type(error).__name__
