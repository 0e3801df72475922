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
- room is short: what stands for nobody must not keep a file from eviction;
- `REUSED_S` have gone by. So a use is noted, and a file that was changed behind our back is found,
  a little later than by an open that asks.

What is open when an answer is withdrawn stays open, and its releases come here.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyfuse3
import trio

from kvfs.config import REUSED_MAX, REUSED_S

_ENDED_AT_ONCE = 16  # before everyone else has a turn

# The stock pyfuse3 has no such thing, nor has an older patched one.
IS_POSSIBLE = hasattr(pyfuse3, "withdraw_open")


def mark_reusable(info: pyfuse3.FileInfo) -> None:
    """Have pyfuse3 reuse an answer."""
    patched: Any = info  # what the stock one's types do not name
    patched.reusable = True


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
    until_s: float


class ReusedOpens:
    """Which answers pyfuse3 has. `end(fh)` hears of each handle that nobody has open any more,
    `touch(inos)` of files whose answer was given again."""

    def __init__(
        self, answers: Answers, end: Callable[[int], None], touch: Callable[[Sequence[int]], None]
    ) -> None:
        self._answers = answers
        self._end = end
        self._touch = touch
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by number, the oldest first
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
        opens = self._answers.withdraw_open(number)
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
        """Withdraw answers when their time has come, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._kept:
                await trio.sleep(REUSED_S / 2)
                self._note_uses()
                await self._withdraw_old()

    async def _withdraw_old(self) -> None:
        ended = 0
        while self._kept:
            number, kept = next(iter(self._kept.items()))
            if trio.current_time() < kept.until_s:
                return
            self.withdraw(number)
            ended += 1
            if ended % _ENDED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _note_uses(self) -> None:
        """Note the files whose answer was given again; by the second look at the latest."""
        if not self._kept:
            return
        given = {number: times for number, _, times in self._answers.reusable_opens()}
        used = [kept.ino for number, kept in self._kept.items() if given[number] > 1]
        if used:
            self._touch(used)
