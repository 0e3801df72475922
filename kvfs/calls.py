"""A client's calls to its node: one at a time, each with a deadline of its own.

The connection is made at the first call and again after a failure. A node that is away costs
`Unavailable`, at once while it backs off, until the node is there again.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs.connection import Connection
from kvfs.errors import Unavailable
from kvfs.start import NodeStarter
from kvfs.wire import Reply

_BACKOFF_S = (0.05, 2.0)  # first, longest
_OF_STAGES = frozenset({"publish", "discard"})  # which go with the connection: who asks is told


class Calls:
    """Thread-safe: who calls while another thread does waits its turn."""

    def __init__(self, store: Path, *, start: bool, deadline_s: float) -> None:
        """`start`: a node where there is none. `deadline_s`: of a call that names none."""
        self._store = store
        self._starter = NodeStarter(store) if start else None
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._backoff_s = 0.0
        self.retry_at_s = 0.0  # by `time.monotonic`; until then nobody is asked

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, so that what was staged on it is still there."""
        return self._connection is not None

    def close(self) -> None:
        """End the connection; staged files that were not published go. A call that another thread
        has under way for too long fails."""
        if self._lock.acquire(timeout=self._deadline_s / 2):
            try:
                self._drop()
                if self._starter is not None:
                    self._starter.close()
            finally:
                self._lock.release()
        elif (connection := self._connection) is not None:
            connection.abort()  # whose call it is drops it

    def call(
        self, operation: str, *arguments: Any, deadline_s: float | None = None
    ) -> tuple[Any, Sequence[int]]:
        """The result of a request, and the descriptors that came with it, which are the caller's.
        Raises `Unavailable`, and what the node answers."""
        # Half for the turn, so that a request never goes out with too little time for its answer: a
        # connection that fails to answer is dropped, with the stages of other threads.
        turn_s = (deadline_s or self._deadline_s) / 2
        end_s = time.monotonic() + 2 * turn_s
        if not self._lock.acquire(timeout=turn_s):
            raise Unavailable(
                f"{self._store}: another thread's call takes longer than {turn_s:g} s"
            )
        try:
            reply, descriptors = self._exchange(operation, arguments, end_s)
        finally:
            self._lock.release()
        if reply.error is not None:
            raise reply.error
        return reply.result, descriptors

    def _exchange(
        self, operation: str, arguments: Sequence[Any], end_s: float
    ) -> tuple[Reply, list[int]]:
        """One request and its reply, by who holds the lock."""
        connection = self._connect(operation, end_s)
        frame = connection.encode(operation, arguments)  # one that is refused costs only its caller
        try:
            return connection.exchange(frame, end_s)
        except (OSError, Unavailable) as error:
            self._drop()
            raise Unavailable(f"{self._store}: the node does not answer ({error})") from error
        except BaseException:
            self._drop()  # its reply would be taken for that to the next request
            raise

    def _connect(self, operation: str, end_s: float) -> Connection:
        if self._connection is not None:
            if operation in _OF_STAGES or not self._connection.has_ended:
                return self._connection
            self._drop()  # the node was restarted since: another one may be there
        if time.monotonic() < self.retry_at_s:
            raise Unavailable(f"{self._store}: no node answers; trying again shortly")
        try:
            self._connection = self._dial(end_s)
        except Unavailable:
            self._back_off()
            raise
        except OSError as error:
            self._back_off()
            raise Unavailable(
                f"{self._store}: no node answers ({error.strerror or error}); {_advice(error)}"
            ) from error
        self._backoff_s = 0.0
        return self._connection

    def _back_off(self) -> None:
        first_s, longest_s = _BACKOFF_S
        self._backoff_s = min(max(first_s, self._backoff_s * 2), longest_s)
        self.retry_at_s = time.monotonic() + self._backoff_s

    def _dial(self, end_s: float) -> Connection:
        """Connect, and start a node where none is. Takes no longer than the call that needs it:
        those of other threads wait behind it."""
        try:
            return self._greet(end_s)
        except (FileNotFoundError, ConnectionRefusedError):
            if self._starter is None:
                raise
        return self._starter.connect(lambda: self._greet(end_s), end_s)

    def _greet(self, end_s: float) -> Connection:
        """However long the call may take, a node greets at once or hangs."""
        return Connection(self._store, min(end_s, time.monotonic() + self._deadline_s))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _advice(error: OSError) -> str:
    """What to do about a node that cannot be spoken to."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return "start one with kvfs mount or kvfs serve"
    if isinstance(error, PermissionError):
        return "run as its user, or let others in with socket_mode in kvfs.toml"
    return "there is one, which is stopped, stuck or has too many clients; see node.log"
