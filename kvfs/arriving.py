"""A file that is being fetched from another node, as its readers see it."""

from typing import Protocol


class Arriving(Protocol):
    """The bytes of a file on their way here. What was read is right once all was read, or once
    `is_whole`: the last bytes are shown to nobody before all were checked."""

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here, and were checked."""

    @property
    def has_failed(self) -> bool:
        """Whether they will not all come, or are wrong: what was read of them is of no use."""

    def open(self) -> int:
        """A new descriptor of the file that they go to, for the caller to close. What was not
        waited for is no byte of the file's."""

    async def wait(self, begin: int, end: int) -> None:
        """Return when the bytes from `begin` to `end` may be read. Raises `Unavailable` when they
        don't come, or not within `CLUSTER_READ_S`."""
