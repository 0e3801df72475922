"""The object that says that a place in a bucket is a tier, as `tier.json` says it of a directory.

A 404 is not yet a miss: it may come of another bucket, another server behind the same address, or a
prefix that was moved. The mark is made where there is none when a tier is first used. Once it was
seen, a place without it is another one: nothing there is a miss, and nothing is put there."""

import json
import time
from typing import Any

import obstore

from kvfs.config import OBJECT_MARK_OLD_S, OBJECT_MARK_S
from kvfs.errors import TierTrouble
from kvfs.home import TIER_MARK

_CONTENT = json.dumps({"version": 1}).encode() + b"\n"


class ObjectMark:
    """Of one store, on its event loop. Calls raise what obstore does besides."""

    def __init__(self, tier: str, store: Any) -> None:
        self._tier = tier
        self._store = store
        self._was_seen = False
        self._seen_s = float("-inf")

    async def check(self) -> None:
        """After a 404, and before it is a miss. Raises `TierTrouble` where the mark is gone."""
        if await self._age_s() is None:
            await self._make()

    async def prepare_put(self) -> None:
        """Before a blob is put; the store is asked every few seconds. The mark is made anew when it
        is old, since rules of a bucket may remove what is. Raises `TierTrouble` as `check`."""
        if time.monotonic() - self._seen_s < OBJECT_MARK_S:
            return
        age_s = await self._age_s()
        if age_s is None:
            await self._make()
        elif age_s > OBJECT_MARK_OLD_S:
            await self._put()

    async def _age_s(self) -> float | None:
        """Since it was made, by the clocks of here and there; None when it is not there."""
        try:
            found = await obstore.head_async(self._store, TIER_MARK)
        except FileNotFoundError:
            return None
        self._note_seen()
        return time.time() - found["last_modified"].timestamp()

    async def _make(self) -> None:
        if self._was_seen:
            raise TierTrouble(
                self._tier,
                f"{TIER_MARK} is gone from it; is it the same bucket and server? If it is, write"
                f" {_CONTENT.decode().strip()} there",
            )
        await self._put()

    async def _put(self) -> None:
        await obstore.put_async(self._store, TIER_MARK, _CONTENT, use_multipart=False)
        self._note_seen()

    def _note_seen(self) -> None:
        self._was_seen = True
        self._seen_s = time.monotonic()
