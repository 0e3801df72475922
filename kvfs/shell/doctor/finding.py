"""What a check says: how much it matters, what was found, what to do."""

import enum
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
