"""One client's connection, and what a handler of its requests is."""

import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.node import Node
from kvfs.stage import Stage

_COUNT = itertools.count(1)


@dataclass(slots=True, eq=False)
class Session:
    """One client's connection: who it is, and the stages that it has not published yet."""

    node: Node
    uid: int
    gid: int
    stages: dict[int, Stage] = field(default_factory=dict)
    # Begins anywhere, so that a token of an earlier connection is none of this one's.
    serial: int = field(default_factory=lambda: secrets.randbits(48))
    # A number among all that read: processes that read through the mount have those above 0.
    reader: int = field(default_factory=lambda: -next(_COUNT))

    def close(self) -> None:
        """Drop what the client left unfinished."""
        for stage in self.stages.values():
            self.node.discard(stage)
        self.stages.clear()


# Given the arguments, and a list to which descriptors for the client are added; the result.
Handler = Callable[[Session, list[Any], list[int]], Awaitable[Any]]
Operations = Mapping[str, tuple[tuple[type, ...], Handler]]  # by name, with the arguments' types
