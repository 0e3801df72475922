"""What can go wrong, as few classes as callers tell apart.

A miss is a value (`None`), never an exception. Absent, corrupt and unavailable are all a miss to an
engine; only logs, counters and the mount's errno tell them apart.
"""

import errno
import os
from typing import TypeVar


class KvfsError(Exception):
    """Base of every error that kvfs raises on purpose; its text says what to do."""


class InvalidInput(KvfsError):
    """Bytes or words from outside that break a rule: a name, a header, a frame, a config key.

    Nothing was changed. `subject` is the offending thing, as short text.
    """

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason


class NamespaceError(KvfsError):
    """A namespace operation that POSIX refuses; `code` is the errno it names."""

    def __init__(self, code: int, path: bytes | str = b"") -> None:
        shown = os.fsdecode(path)
        super().__init__(f"{shown}: {os.strerror(code)}" if shown else os.strerror(code))
        self.code = code
        self.path = os.fsencode(path)


class OutOfSpace(KvfsError):
    """No directory of the store has room, even after eviction."""

    code = errno.ENOSPC


class QueueFull(KvfsError):
    """A bounded queue has no room for what was to be queued; none of it was."""

    def __init__(self, subject: str, asked: int, room: int) -> None:
        super().__init__(f"{subject}: no room for {asked} more, only for {room}; ask again later")
        self.subject = subject


class Corrupt(KvfsError):
    """Stored bytes are not the bytes that were stored; the copy has been or must be quarantined."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason


class Unavailable(KvfsError):
    """The other side does not answer: no node, a deadline passed, a store in use already."""


class TierTrouble(Unavailable):
    """A tier failed by a fault of its own: another may have the blob. `tier` is its name."""

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(f"tier {tier}: {reason}")
        self.tier = tier
        self.reason = reason


class TierStalled(TierTrouble):
    """A tier did not end a call by its deadline."""


class TierBusy(Unavailable):
    """As much is asked of a tier already as its limits admit, and that did not end in time. Says
    nothing of the tier's health."""

    def __init__(self, tier: str, what: str) -> None:
        super().__init__(f"tier {tier}: as many {what} as it may have are under way")
        self.tier = tier


class OwnedElsewhere(Unavailable):
    """Another node owns the store: its lock is taken."""

    words = "another node owns this store"  # who starts a node looks for them in what it said

    def __init__(self, path: object, holder: str = "") -> None:
        super().__init__(f"{path}: {self.words}{holder}")


_Error = TypeVar("_Error", bound=BaseException)


def first_of(group: BaseExceptionGroup[_Error]) -> _Error:
    """An error of a group, as trio raises them; it has at least one."""
    error: _Error | BaseExceptionGroup[_Error] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
