"""Threads for the bridge's work: what one of them did not foresee is logged, and ends nothing."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger(__name__)


class Workers:
    """A number of threads that take work in its order."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(count, name)
        self._is_closed = False

    def start(self, work: Callable[..., None], *arguments: object) -> bool:
        """Hand work to a thread; False after `close`."""
        try:
            self._pool.submit(work, *arguments).add_done_callback(self._log_surprise)
        except RuntimeError:  # the pool takes nothing more
            if not self._is_closed:
                raise
            return False
        return True

    def close(self) -> None:
        """Take nothing more. What was taken is still done, and should see that it is not wanted: it
        may hold what must be let go."""
        self._is_closed = True
        self._pool.shutdown(wait=False)

    def _log_surprise(self, future: "Future[None]") -> None:
        if (error := future.exception()) is not None:
            log.error("kvfs: work on %s failed in an unforeseen way", self._name, exc_info=error)
