"""What a check says: how much it matters, what was found, what to do."""

import enum
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"  # works, but slower or not everything
    FAIL = "fail"  # kvfs, or this store, does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One point: what was found and, unless it is fine, what to do. `store`: whose it is, where it
    is a store's."""

    check: str
    level: Level
    found: str
    advice: str = ""
    store: Path | None = None


def go_on(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """What a check finds, and where it may not look, or cannot, that: other checks go on."""
    try:
        yield from findings
    except OSError as error:
        yield trouble(check, error)


def trouble(check: str, error: OSError) -> Finding:
    """A check that could not look."""
    subject = f"{error.filename}: " if error.filename else ""
    found = f"{subject}{error.strerror or error}"
    advice = _ADVICE.get(error.errno or 0, "look at its disk, and at what is mounted there")
    return Finding(check, Level.FAIL, found, advice)


_OWNER_ONLY = "run as the store's owner, or give yourself rights to it"
_ADVICE = {
    errno.EACCES: _OWNER_ONLY,
    errno.EPERM: _OWNER_ONLY,
    errno.ENOTCONN: "it lies in a mount whose process has died: take that away with umount",
}
