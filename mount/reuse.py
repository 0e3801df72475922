"""Opens that pyfuse3 answers by itself, as it answered the one before.

A file that the kernel serves is opened for reading the same way each time, so its first open's
answer may stand for later ones (`FileInfo.reusable`, see patches/): pyfuse3 gives it, counts, and
asks nobody, not for the releases either. Here one reader stands for all of them, so that the
version stays as it is while nobody may have it open. `mount.states` is what decides: an answer is
reused only while an open would be JOIN, or OPEN with the same bytes, and it is withdrawn *before*
anything else that could become of it:

- somebody opens the version for writing, or cuts it;
- a request that was sent back is on its way to the file, and must be told from others;
- the file loses its last name, or was changed other than through the mount;
- room is short: what stands for nobody must not keep a file from eviction.

A stat of such a file is answered likewise, as Python answered the one before, until a request
changes attributes or names, or the kernel is told to forget them.

Every `REUSED_LOOK_S` the mount does for all answers what opens that ask would have done. It notes
which files were used, and looks whether an open would still find their bytes: a file that was
written to or taken away behind our back loses its answer, and the next open finds out what that
means. So both happen that much later than by an open that asks, and no later. What was not given
again for `REUSED_S` is withdrawn, since it takes a descriptor; what is in use is kept for as long
as it is.

What is open when an answer is withdrawn stays open, and its releases come here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyfuse3
import trio

from kvfs.config import REUSED_LOOK_S, REUSED_MAX, REUSED_S

_AT_ONCE = 16  # looked at before everyone else has a turn

# The stock pyfuse3 has no such thing, nor has an older patched one.
IS_POSSIBLE = hasattr(pyfuse3, "withdraw_open")
KEEPS_ATTRIBUTES = hasattr(pyfuse3, "keep_attributes")


def mark_reusable(info: pyfuse3.FileInfo) -> None:
    """Have pyfuse3 reuse an answer."""
    patched: Any = info  # what the stock one's types do not name
    patched.reusable = True


def keep_attributes(entry: pyfuse3.EntryAttributes) -> None:
    """Have pyfuse3 say this of an inode, until a request changes attributes or names."""
    patched: Any = pyfuse3
    patched.keep_attributes(entry)


class Answers(Protocol):
    """What pyfuse3 offers, patched. By inode number."""

    def withdraw_open(self, inode: int) -> int:
        """Reuse the answer no more; how many are open with it."""

    def reusable_opens(self) -> Sequence[tuple[int, int, int]]:
        """Each number with how many are open with its answer, and how often it was given."""


@dataclass(slots=True)
class _Kept:
    """An answer that pyfuse3 has."""

    ino: int
    fh: int
    until_s: float  # unless it is used
    given: int = 1  # as often, by the last look


class ReusedOpens:
    """Which answers pyfuse3 has. `end(fh)` hears of each handle that nobody has open any more,
    `touch(inos)` of files whose answer was given again, and `is_as_opened(fh)` tells at once
    whether an open that asks would find the same bytes, without reading them."""

    def __init__(
        self,
        answers: Answers,
        end: Callable[[int], None],
        touch: Callable[[Sequence[int]], None],
        is_as_opened: Callable[[int], bool],
    ) -> None:
        self._answers = answers
        self._end = end
        self._touch = touch
        self._is_as_opened = is_as_opened
        # By number; what was not seen in use for longest comes first.
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._left: dict[int, int] = {}  # handle of a withdrawn answer -> releases to come
        self._wake = trio.Event()

    def keep(self, number: int, ino: int, fh: int) -> bool:
        """Whether the answer that is about to be given, with this handle, will be reused."""
        if number in self._kept:
            return False
        self._kept[number] = _Kept(ino, fh, trio.current_time() + REUSED_S)
        if len(self._kept) > REUSED_MAX:
            self.withdraw(next(iter(self._kept)))
        self._wake.set()
        return True

    def withdraw(self, number: int) -> None:
        """Reuse an inode's answer no more, if it is."""
        kept = self._kept.pop(number, None)
        if kept is None:
            return
        try:
            opens = self._answers.withdraw_open(number)
        except KeyError:  # it had no memory to keep it: the one open is released as others are
            return
        if opens:
            self._left[kept.fh] = opens
        else:
            self._end(kept.fh)

    def withdraw_all(self) -> None:
        """Reuse no answer any more."""
        self._note_uses()
        while self._kept:
            self.withdraw(next(iter(self._kept)))

    def is_last(self, fh: int) -> bool:
        """Count a release. Whether nobody has the handle open any more."""
        left = self._left.get(fh, 1) - 1
        if left:
            self._left[fh] = left
            return False
        self._left.pop(fh, None)
        return True

    def count_idle(self) -> int:
        """How many answers are kept for files that nobody has open."""
        if not self._kept:
            return 0
        return sum(not opens for _, opens, _ in self._answers.reusable_opens())

    async def run(self) -> None:
        """Look what became of the answers, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._kept:
                await trio.sleep(REUSED_LOOK_S)
                self._note_uses()
                await self._withdraw_old()

    async def _withdraw_old(self) -> None:
        """Withdraw what is not used any more, and what an open would not answer as before."""
        now_s = trio.current_time()
        for index, (number, kept) in enumerate(list(self._kept.items())):
            if index % _AT_ONCE == _AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if self._kept.get(number) is not kept:
                continue  # withdrawn meanwhile
            if now_s >= kept.until_s or not self._is_as_opened(kept.fh):
                self.withdraw(number)

    def _note_uses(self) -> None:
        """Note the files whose answer was given again since the last look."""
        if not self._kept:
            return
        until_s = trio.current_time() + REUSED_S
        used = []
        for number, _, given in self._answers.reusable_opens():  # not all, if memory is short
            kept = self._kept.get(number)
            if kept is not None and given > kept.given:
                kept.given, kept.until_s = given, until_s
                self._kept.move_to_end(number)
                used.append(kept.ino)
        if used:
            self._touch(used)
