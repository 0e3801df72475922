"""Requests that were sent back and come again."""

import trio
import trio.testing

from kvfs.config import REPEATED_OPEN_S, SENT_BACK_MAX
from mount.retries import SentBack


async def test_a_thread_is_expected_once(autojump_clock: trio.testing.MockClock) -> None:
    sent = SentBack()
    assert not sent.take(1)
    sent.note(1, 7)
    assert sent.awaits(7)
    assert not sent.awaits(8)
    assert sent.take(1)
    assert not sent.awaits(7)
    assert not sent.take(1)


async def test_it_is_awaited_at_what_it_found(autojump_clock: trio.testing.MockClock) -> None:
    sent = SentBack()
    sent.note(1, 7)
    sent.note_found(1, 8)
    sent.note_found(2, 9)
    assert (sent.awaits(7), sent.awaits(8), sent.awaits(9)) == (False, True, False)


async def test_several_threads_at_one_inode(autojump_clock: trio.testing.MockClock) -> None:
    sent = SentBack()
    sent.note(1, 7)
    sent.note(2, 7)
    assert sent.take(1)
    assert sent.awaits(7)
    assert sent.take(2)
    assert not sent.awaits(7)


async def test_one_that_never_comes_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    sent = SentBack()
    sent.note(1, 7)
    await trio.sleep(REPEATED_OPEN_S + 1)
    assert not sent.awaits(7)
    assert not sent.take(1)


async def test_they_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    sent = SentBack()
    for thread in range(SENT_BACK_MAX + 10):
        sent.note(thread, thread)
    assert not sent.awaits(0)
    assert sent.awaits(SENT_BACK_MAX + 9)
