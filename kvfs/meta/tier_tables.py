"""Which tiers hold what, and what is to be copied to them, as tables of this node: the rules of
`kvfs.meta.tier_contract`, in transactions of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from kvfs.config import TIERS_MAX
from kvfs.meta import content, records
from kvfs.meta.batch import Batch
from kvfs.meta.tier_contract import BlobUse, GivenUp, Holding, HoldingChange, TierLoad
from kvfs.meta.view import View

_TIER_KEYS = b"tier\0"  # in the table of the state
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Known:
    """A tier that has a number."""

    place: bytes
    load: TierLoad


class TierTables(ABC):
    """What the engines have in common; see `TierRecords` for what each method promises."""

    @abstractmethod
    def _reading_own(self) -> AbstractContextManager[View]:
        """A transaction that only reads this node's own tables."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[View]: ...

    @abstractmethod
    def _write(self, change: Callable[[Batch], _Result]) -> _Result: ...

    def tier_numbers(self, places: Sequence[bytes]) -> list[int]:
        assert len(set(places)) == len(places) <= TIERS_MAX
        return self._write(lambda batch: _number(batch, places))

    def tier_masks(self, digests: Sequence[bytes]) -> list[int]:
        with self._reading_own() as view:
            return [view.tier_mask(digest) for digest in digests]

    def note_holdings(self, changes: Sequence[HoldingChange]) -> None:
        self._write(lambda batch: _note(batch, changes))

    def holdings(self, after: bytes, limit: int) -> list[Holding]:
        with self._reading_own() as view:
            table = view.tables.holding
            keys = list(islice(view.keys(table, b"", after), limit))
            return [_decode(key, view.txn.get(key, db=table)) for key in keys]

    def tier_loads(self) -> dict[int, TierLoad]:
        with self._reading_own() as view:
            return {number: known.load for number, known in _known(view)}

    def uses_of(self, digests: Sequence[bytes]) -> list[BlobUse | None]:
        self.read_holders_ahead(digests)
        with self._reading() as view:
            holders = [view.holders(digest) for digest in digests]
            view.read_inodes_ahead(ino for inos in holders for ino in inos)
            return [_use_of(view, inos) for inos in holders]

    def read_holders_ahead(self, digests: Iterable[bytes]) -> None:  # noqa: B027  (LMDB asks nobody)
        """What holds these will be asked for: worth a word where each question is a round trip."""

    def give_up(self, digests: Sequence[bytes]) -> list[GivenUp]:
        return self._write(lambda batch: _give_up(batch, digests))

    def promise(self, digests: Sequence[bytes]) -> None:
        def change(batch: Batch) -> None:
            for digest in digests:
                content.check_digest(digest)
                batch.txn.put(digest, b"", db=batch.tables.promise)

        self._write(change)

    def promised(self, after: bytes, limit: int) -> list[bytes]:
        with self._reading_own() as view:
            return list(islice(view.keys(view.tables.promise, b"", after), limit))

    def fulfil(self, digests: Sequence[bytes]) -> None:
        def change(batch: Batch) -> None:
            for digest in digests:
                batch.txn.delete(digest, db=batch.tables.promise)

        self._write(change)


def _decode(digest: bytes, raw: bytes | None) -> Holding:
    assert raw is not None
    mask, size_bytes = records.decode_holding(raw)
    return Holding(digest, size_bytes, mask)


def _use_of(view: View, inos: Iterable[int]) -> BlobUse | None:
    inodes = [inode for inode in map(view.find, inos) if inode is not None]
    if not inodes:
        return None
    return BlobUse(max(i.used_ns for i in inodes), any(i.pinned for i in inodes))


def _note(batch: Batch, changes: Sequence[HoldingChange]) -> None:
    blobs, sizes = [0] * TIERS_MAX, [0] * TIERS_MAX
    table = batch.tables.holding
    for change in changes:
        content.check_digest(change.digest)
        raw = batch.txn.get(change.digest, db=table)
        old = (
            Holding(change.digest, change.size_bytes, 0)
            if raw is None
            else _decode(change.digest, raw)
        )
        mask = (old.mask | change.gained) & ~change.lost
        if mask == old.mask:
            continue
        if mask:
            batch.txn.put(change.digest, records.encode_holding(mask, old.size_bytes), db=table)
        else:
            batch.txn.delete(change.digest, db=table)
        for number in _numbers(mask ^ old.mask):
            sign = 1 if mask >> number & 1 else -1
            blobs[number] += sign
            sizes[number] += sign * old.size_bytes
    known = dict(_known(batch))
    for number in range(TIERS_MAX):
        if (blobs[number] or sizes[number]) and number in known:
            load = known[number].load
            now = TierLoad(load.blobs + blobs[number], load.size_bytes + sizes[number])
            _store(batch, number, replace(known[number], load=now))


def _numbers(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


# Numbers ------------------------------------------------------------------------------------------
def _number(batch: Batch, places: Sequence[bytes]) -> list[int]:
    known = dict(_known(batch))
    numbers = {tier.place: number for number, tier in known.items()}
    for place in places:
        if place in numbers:
            continue
        free = next((n for n in range(TIERS_MAX) if n not in known), None)
        if free is None:
            free = next(n for n, tier in known.items() if tier.place not in places)
            del numbers[known[free].place]
            _forget(batch, free)
        known[free] = _Known(place, TierLoad())
        numbers[place] = free
        _store(batch, free, known[free])
    return [numbers[place] for place in places]


def _forget(batch: Batch, number: int) -> None:
    """Nothing is known to lie in a tier."""
    table = batch.tables.holding
    for digest in list(batch.keys(table, b"")):
        if batch.tier_mask(digest) >> number & 1:
            _note(batch, [HoldingChange(digest, 0, lost=1 << number)])


def _known(view: View) -> Iterator[tuple[int, _Known]]:
    for key in view.keys(view.tables.state, _TIER_KEYS):
        raw = view.txn.get(key, db=view.tables.state)
        assert raw is not None
        blobs, size_bytes, place = records.decode_tier(raw)
        yield key[-1], _Known(place, TierLoad(blobs, size_bytes))


def _store(batch: Batch, number: int, tier: _Known) -> None:
    packed = records.encode_tier(tier.load.blobs, tier.load.size_bytes, tier.place)
    batch.txn.put(_TIER_KEYS + bytes((number,)), packed, db=batch.tables.state)


# Names without a copy here ------------------------------------------------------------------------
def _give_up(batch: Batch, digests: Sequence[bytes]) -> list[GivenUp]:
    given: list[GivenUp] = []
    for digest in digests:
        content.check_digest(digest)
        if batch.tier_mask(digest) and not content.is_pinned(batch, digest):
            given += content.give_up(batch, digest)
    return given
