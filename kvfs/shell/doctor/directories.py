"""The directories of a store beside its first one: whether each is there and takes files."""

from collections.abc import Iterator
from pathlib import Path

from kvfs.home import STORE_MARK
from kvfs.roster import ROSTER, read_roster
from kvfs.shell.doctor.disk import check_scratch_file
from kvfs.shell.doctor.finding import Finding, Level

_CHECK = "more directories"
_ADVICE = "new files go to the others; mount or repair its disk"


def check_directories(store: Path) -> Iterator[Finding]:
    """One finding for each that fails, or one for all. `store` has a roster that can be read."""
    others = [known.config.path for known in read_roster(store / ROSTER)[1:]]
    failed = [finding for path in others if (finding := _failure_of(path)) is not None]
    yield from failed
    if others and not failed:
        found = f"{len(others)} beside the first, {'all take' if others[1:] else 'takes'} files"
        yield Finding(_CHECK, Level.OK, found)


def _failure_of(directory: Path) -> Finding | None:
    if not (directory / STORE_MARK).exists():
        found = f"{directory} is not there, or empty: what lies in it is missing"
        return Finding(_CHECK, Level.FAIL, found, _ADVICE)
    writing = next(check_scratch_file(directory))
    if writing.level is Level.OK:
        return None
    return Finding(_CHECK, writing.level, writing.found, _ADVICE)
