"""Long work of one client, in parts between which everyone else has a turn."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio


async def in_turns(items: Sequence[Any], size: int) -> AsyncIterator[Any]:
    """Parts of a long list; everyone else has a turn between them."""
    for start in range(0, len(items), size):
        if start:
            await trio.lowlevel.checkpoint()
        yield items[start : start + size]
