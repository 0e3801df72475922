"""What the kernel's page cache holds, as far as this process knows.

The kernel keeps the pages of a file that nobody has open. Whether the next open may use them is the
file system's to say: it may, when they are of the digest that it opens.
"""

from collections import OrderedDict

from kvfs.config import CACHED_DIGESTS_MAX
from mount.stages import Version


class CachedPages:
    """Of kernel inodes, by number; those used last are remembered."""

    def __init__(self) -> None:
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def are_of(self, version: Version) -> bool:
        """Whether the kernel's pages are those of a version's bytes."""
        return self._digests.get(version.number) == version.digest

    def note_opened(self, version: Version) -> None:
        """The kernel has pages of a version, of which those of a fetch count when it has ended."""
        if version.content is not None and version.content.is_whole:
            self.note(version)
        else:
            self.forget(version.number)

    def note(self, version: Version) -> None:
        """Whatever pages the kernel has are those of a version."""
        self._digests[version.number] = version.digest
        self._digests.move_to_end(version.number)
        while len(self._digests) > CACHED_DIGESTS_MAX:
            self._digests.popitem(last=False)

    def forget(self, number: int) -> None:
        """They are dropped, or may be of anything."""
        self._digests.pop(number, None)
