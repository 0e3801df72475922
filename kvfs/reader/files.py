"""Whole files, many at a time, from every place that has them, for programs that are no engines.

    with FileReader(Path("/var/lib/kvfs")) as reader:
        first, second = reader.read([b"kv/some/file", b"other"])

The store's directories, the node's tiers and other nodes are read at the same time, with the pull
scheduler (`kvfs.schedule`): whichever is free reads the next file, and what one of them lacks, or
has wrong, another gives. Every file is compared with its digest. Nothing goes through a mount.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvfs.client import Client
from kvfs.config import (
    CLIENT_DEADLINE_S,
    READER_BATCH_BYTES,
    READER_BATCH_FILES,
    READER_DEADLINE_S,
    READER_TICKET_DEADLINE_S,
)
from kvfs.errors import InvalidInput, Unavailable
from kvfs.file_io import allocate
from kvfs.names import escape
from kvfs.reader.complaints import Complaints
from kvfs.reader.places import Placed, Places
from kvfs.transfer.job import Job, Landed
from kvfs.transfer.runner import Transfer
from kvfs.transfer.words import TransferView, WantedChunk

log = logging.getLogger(__name__)

_BATCHES_AT_ONCE = 2
_TAKEN_S = 5.0

Take = Callable[[int, Landed | None], None]  # gets a file's place in the list; None: it is empty
Find = Callable[[Sequence[int]], Sequence[Placed | None]]


class FileReader:
    """Reads files of one store. Thread-safe; one for a process is enough.

    Paths are bytes from the root of the namespace. A file that is not there, or that no place gives
    in time, is None. Every call raises `Unavailable` when the node does not answer, and
    `InvalidInput` for what could never be asked.
    """

    def __init__(
        self, store: Path, *, start: bool = False, deadline_s: float = CLIENT_DEADLINE_S
    ) -> None:
        """`store`: its first directory. `start`: a node where there is none. `deadline_s`: for
        each word to the node."""
        self._client = Client(store, start=start, deadline_s=deadline_s)
        self._beside = partial(Client, store, deadline_s=deadline_s)
        self._complaints = Complaints(Client(store), deadline_s)
        self._transfer = Transfer(on_gone=self._complaints.note_gone)
        self._places = Places(
            self._transfer,
            self._client.tiers,
            Client(store, deadline_s=READER_TICKET_DEADLINE_S),
            self._complaints.complain,
        )

    def read(
        self, paths: Sequence[bytes], deadline_s: float = READER_DEADLINE_S
    ) -> list[memoryview | None]:
        """The bytes of files, each in memory of its own."""
        found: list[memoryview | None] = [None] * len(paths)

        def take(number: int, landed: Landed | None) -> None:
            found[number] = memoryview(b"") if landed is None else _own(landed)

        self._reading(paths, None, deadline_s).run(take)
        return found

    def read_into(
        self,
        paths: Sequence[bytes],
        buffers: Sequence[memoryview],
        deadline_s: float = READER_DEADLINE_S,
    ) -> list[int | None]:
        """Put each file into the start of its buffer; how many bytes it has. Nobody writes to a
        buffer after this returned; one whose file is None may hold anything. It may end
        later than its deadline by as long as a copy that has begun takes. Raises `InvalidInput` for
        a buffer that is too small."""
        if len(buffers) != len(paths):
            raise InvalidInput("buffers", f"are {len(buffers)}, for {len(paths)} paths")
        targets = [np.frombuffer(_checked(buffer), np.uint8) for buffer in buffers]
        sizes: list[int | None] = [None] * len(paths)

        def take(number: int, landed: Landed | None) -> None:
            data = b"" if landed is None else landed.memory
            np.copyto(targets[number][: len(data)], np.frombuffer(data, np.uint8))
            sizes[number] = len(data)

        self._reading(paths, [len(target) for target in targets], deadline_s).run(take)
        return sizes

    def view(self) -> TransferView:
        """What each place gave until now, and how it is."""
        return self._transfer.view()

    def close(self) -> None:
        """Give up what is under way in other threads, and let all go."""
        self._transfer.close(0.0)
        self._places.close()
        self._complaints.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reading(
        self, paths: Sequence[bytes], rooms: Sequence[int] | None, deadline_s: float
    ) -> "_Reading":
        return _Reading(
            self._client, self._beside, self._transfer, self._places, paths, rooms, deadline_s
        )


class _Batch:
    """Files that one job reads: their numbers, and where each is."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.places: list[Placed] = []
        self.size_bytes = 0
        self.job: Job | None = None  # None also when there was no time for it

    def add(self, number: int, place: Placed) -> None:
        self.numbers.append(number)
        self.places.append(place)
        self.size_bytes += place.file.size_bytes

    def release(self) -> None:
        for place in self.places:
            place.release()


class _Reading:
    """One call: batches of files, of which two are read at the same time."""

    def __init__(
        self,
        client: Client,
        beside: Callable[[], Client],
        transfer: Transfer,
        places: Places,
        paths: Sequence[bytes],
        rooms: Sequence[int] | None,
        deadline_s: float,
    ) -> None:
        """`beside`: another client, since the word of one that brings takes long."""
        if not deadline_s > 0:
            raise InvalidInput("deadline", f"{deadline_s!r} leaves no time")
        self._client = client
        self._beside = beside
        self._transfer = transfer
        self._places = places
        self._paths = paths
        self._rooms = rooms
        self._end_s = time.monotonic() + deadline_s

    def run(self, take: Take) -> None:
        """Have every file taken that is got in time. When this returns or raises, no call of `take`
        is under way."""
        left = self._read(range(len(self._paths)), self._locate, take)
        if left:
            with self._beside() as client:
                while left and time.monotonic() < self._end_s:
                    left = self._read_brought(client, left, take)

    def _read_brought(self, client: Client, numbers: Sequence[int], take: Take) -> list[int]:
        """Have the node bring files, and read those that come soon; those that it still brings."""
        coming: list[int] = []

        def bring(group: Sequence[int]) -> list[Placed | None]:
            left_s = max(0.0, self._end_s - time.monotonic())
            try:
                opened, places = client.bring([self._paths[number] for number in group], left_s)
            except Unavailable as error:
                log.warning("kvfs: %d files are not brought: %s", len(group), error)
                return [None] * len(group)
            coming.extend(group[place] for place in places)
            return [None if file is None else self._places.place_here(file) for file in opened]

        self._read(numbers, bring, take)
        return coming

    def _read(self, numbers: Sequence[int], find: Find, take: Take) -> list[int]:
        """Read some files; those that the node may still bring."""
        under_way: deque[_Batch] = deque()
        left: list[int] = []
        try:
            for first in range(0, len(numbers), READER_BATCH_FILES):
                group = numbers[first : first + READER_BATCH_FILES]
                for batch in self._batches(group, find(group), take):
                    under_way.append(batch)
                    self._begin(batch, take)
                    if len(under_way) == _BATCHES_AT_ONCE:
                        left += self._end(under_way.popleft())
            while under_way:
                left += self._end(under_way.popleft())
        finally:
            for batch in under_way:
                self._give_up(batch)
        return left

    def _batches(
        self, numbers: Sequence[int], places: Sequence[Placed | None], take: Take
    ) -> Iterator[_Batch]:
        """Found files in batches that memory holds."""
        waiting = deque(place for place in places if place is not None)
        batch = _Batch()
        try:
            for number, place in zip(numbers, places, strict=True):
                if place is None:
                    continue
                size_bytes = place.file.size_bytes
                self._check_room(number, size_bytes)
                if size_bytes == 0:
                    waiting.popleft().release()
                    take(number, None)
                    continue
                if batch.numbers and batch.size_bytes + size_bytes > READER_BATCH_BYTES:
                    full, batch = batch, _Batch()
                    yield full
                batch.add(number, waiting.popleft())
            full, batch = batch, _Batch()
            if full.numbers:
                yield full
        finally:
            for place in (*waiting, *batch.places):
                place.release()

    def _check_room(self, number: int, size_bytes: int) -> None:
        if self._rooms is not None and size_bytes > self._rooms[number]:
            raise InvalidInput(
                "buffer",
                f"has {self._rooms[number]} bytes, and {escape(self._paths[number])} {size_bytes}",
            )

    def _locate(self, numbers: Sequence[int]) -> list[Placed | None]:
        located = self._client.locate([self._paths[number] for number in numbers])
        return self._places.place(located, self._end_s)

    def _begin(self, batch: _Batch, take: Take) -> None:
        chunks = [
            WantedChunk(
                place.file.digest,
                place.file.size_bytes,
                place.tiers,
                allocate(place.file.size_bytes)[: place.file.size_bytes],
            )
            for place in batch.places
        ]

        def landed(one: Landed) -> None:
            with one:
                take(batch.numbers[one.chunk], one)

        left_s = self._end_s - time.monotonic()
        if left_s > 0:
            batch.job = self._transfer.start(chunks, landed, deadline_s=left_s, in_place=False)

    def _end(self, batch: _Batch) -> list[int]:
        """Wait for a batch; those of its files that the node may still bring."""
        job = batch.job
        if job is None:
            batch.release()
            return []
        end = job.wait(max(0.0, self._end_s - time.monotonic()))
        if end is None:
            self._give_up(batch)
            return []
        batch.release()
        return [batch.numbers[lost] for lost in end.lost if not batch.places[lost].is_here]

    def _give_up(self, batch: _Batch) -> None:
        """Let a batch go. What has begun to be taken is waited for, which takes no time."""
        if batch.job is not None:
            batch.job.cancel()
            while batch.job.wait(_TAKEN_S) is None:
                log.warning("a file that was read takes long to be copied")
        batch.release()


def _own(landed: Landed) -> memoryview:
    """The bytes of a file in memory that nobody else writes to."""
    if landed.is_in_place:
        return landed.memory
    memory = allocate(len(landed.memory))[: len(landed.memory)]
    np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(landed.memory, np.uint8))
    return memory


def _checked(buffer: memoryview) -> memoryview:
    if buffer.readonly or not buffer.c_contiguous:
        raise InvalidInput("buffer", "must be writable, and in one piece")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())
