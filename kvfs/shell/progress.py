"""A progress bar on a terminal's standard error, and silence elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Progress(Protocol):
    """Long work in bytes, shown within a `with` block and gone without a trace at its end."""

    @property
    def is_shown(self) -> bool: ...

    def set_total(self, total_bytes: int) -> None: ...

    def advance(self, done_bytes: int) -> None: ...


class _Silent:
    """Shows nothing."""

    is_shown = False

    def set_total(self, total_bytes: int) -> None:
        pass

    def advance(self, done_bytes: int) -> None:
        pass


class _Bar:
    """A spinner, and a bar once the total is known."""

    is_shown = True

    def __init__(self, rich_progress: Any, description: str) -> None:
        self._progress = rich_progress
        self._task = rich_progress.add_task(description, total=None)

    def set_total(self, total_bytes: int) -> None:
        self._progress.update(self._task, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        self._progress.advance(self._task, done_bytes)


ShowProgress = Callable[[str], AbstractContextManager[Progress]]


def no_progress(description: str) -> AbstractContextManager[Progress]:
    """Show nothing, whatever the work."""
    return nullcontext(_Silent())


def choose_progress() -> ShowProgress:
    """Bars when a person sees standard error and the package rich is there, else none."""
    if not sys.stderr.isatty():
        return no_progress
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichProgress
    except ImportError:
        return no_progress

    @contextmanager
    def show(description: str) -> Iterator[Progress]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield _Bar(progress, description)

    return show
