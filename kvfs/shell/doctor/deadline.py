"""A bound for what has none of its own: a name that is looked up, a server that says one byte a
second."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Found = TypeVar("_Found")


def within(deadline_s: float, look: Callable[[], _Found]) -> _Found:
    """What `look` finds or raises; TimeoutError when that takes longer. It goes on in its thread
    then, which holds up nothing, also not the end of the process."""
    found: Future[_Found] = Future()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # noqa: BLE001  it is the caller's
            found.set_exception(error)

    threading.Thread(target=run, name="kvfs-doctor", daemon=True).start()
    return found.result(deadline_s)
